"""Layouts of one micro-batch over all axes: typed, then priced."""
