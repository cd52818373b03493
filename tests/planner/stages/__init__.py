"""Tests of the stage cut, its refinement and the local search."""
