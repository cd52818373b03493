"""Canonical forms: the many ways to write an operator become the few that have sharding rules."""
