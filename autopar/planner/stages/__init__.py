"""Blocks to stages and recompute under memory."""
