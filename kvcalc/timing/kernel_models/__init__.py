"""Kernel models: the time of one kernel family on one GPU, one file per family."""
