"""Runs one rank's program: process groups, parameters, steps, checkpoints. It imports neither planner nor cost."""
