"""Layers: weights, cache entries, and all formulas of FLOPs and bytes."""
