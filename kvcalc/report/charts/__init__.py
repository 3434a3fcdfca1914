"""Charts, made from records."""
