"""Models: layers in order, one forward pass, and memory."""
