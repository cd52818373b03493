"""Relaxations: lower bounds of step time over every plan of a candidate."""
