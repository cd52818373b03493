"""Profiles: reading the shipped ones, measuring this machine, storing what was measured."""
