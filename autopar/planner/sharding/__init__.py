"""Typings of one graph on one mesh axis: exact minima of an energy."""
