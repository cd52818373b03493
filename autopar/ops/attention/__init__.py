"""Fused attention on blocks of keys and values, and the ring in which they go round."""
