"""Seconds and bytes of one operator on one device."""
