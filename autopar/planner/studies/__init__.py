"""Searches shared in an Optuna storage by workers on many machines."""
