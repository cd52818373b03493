"""Sharding rules: for each operator and mesh axis the typed ways to run it."""
