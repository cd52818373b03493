"""Canonical forms: equivalent torch operators become the few operators that have sharding rules."""
