"""Tables and sentences, made from records."""
