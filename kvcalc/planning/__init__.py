"""Many deployments side by side: the same model with other attention."""
