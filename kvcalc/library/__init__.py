"""From names and files to models and GPUs, checked once when they are read."""
