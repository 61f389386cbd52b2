"""Measured kernels, one module per kind: their rows, the fit of the cost model's constants, and its errors."""
