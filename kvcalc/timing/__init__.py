"""Calibrated time laws, one file an operator family; fitting them to measured rows; and whole steps
out of them."""
