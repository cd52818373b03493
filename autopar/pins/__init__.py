"""Pins in code: constraints on the plan that are attached to modules of the model."""
