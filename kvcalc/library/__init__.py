"""Load models and GPUs by name or file, and check each specification."""
