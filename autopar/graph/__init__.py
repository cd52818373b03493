"""Model to graph: trace, clean-up, blocks, FLOPs and bytes."""
