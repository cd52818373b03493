"""A typing applied: a graph in, one rank's graph with explicit collectives out."""
