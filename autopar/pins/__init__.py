"""Pins that the modules of a model carry for the plan."""
