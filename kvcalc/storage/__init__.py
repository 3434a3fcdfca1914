"""How numbers are stored: the bytes of a row of a cache and of a matrix of weights, scales included."""
