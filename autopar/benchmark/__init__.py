"""Benchmarks: plans of a space run on this machine's ranks, and their predictions are compared with the measurements.

This package uses the planner and the runtime, as ``autopar.api`` does.
"""
