"""Misuse and failures found early: calls that ranks do not make together, a model that trains beside its plan, a rank that fails."""
