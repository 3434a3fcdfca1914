"""What a layer holds and does: weights, cache entries, and every formula of FLOPs and bytes."""
