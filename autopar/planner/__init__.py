"""Finds the plan of a graph on a cluster: exact inside (typings, stages), branch and bound outside."""
