"""Policies over passes: one request, a server under load."""
