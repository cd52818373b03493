"""Comparison of a plan's program with one device: losses, gradients and parameters, and the first operator at which they differ."""
