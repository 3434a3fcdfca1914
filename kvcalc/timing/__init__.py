"""Predict times: kernel models per operator family, their fits to measured rows, and whole
passes."""
