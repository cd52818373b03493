"""Helpers without knowledge of models or machines: atomic writes, TOML with line numbers, shipped data, tables as text."""
