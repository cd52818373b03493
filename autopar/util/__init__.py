"""Helpers that know nothing of models and machines: files, TOML with line numbers, and formatting."""
