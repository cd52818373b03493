"""Devices, links and clusters as data: from profiles, from a line of text, or measured on this machine (``machine``)."""
