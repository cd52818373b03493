"""Runs one rank's program: groups, parameters, steps, checkpoints; it knows neither planner nor cost."""
