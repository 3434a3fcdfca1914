"""Every model type that kvcalc reads exactly, in YAML tables by family."""
