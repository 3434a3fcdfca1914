"""A model: layers in their order, one pass through them, and what they take of memory."""
