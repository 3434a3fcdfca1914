"""Search, compare and sweep deployments of a model."""
