"""Optimizers on this rank's plain tensors, on the device or on the host."""
