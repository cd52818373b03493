"""Devices, links and clusters as data, read from ``profiles/``, from a line of text, or off the machine (``machine``)."""
