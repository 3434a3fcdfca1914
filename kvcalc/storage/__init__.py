"""Storage formats of caches and weights: their bytes, including scales."""
