"""Code that cannot be traced, as one operator: what it is, and what it does, found by running it."""
