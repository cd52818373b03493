"""What may be chosen: the space, pins, candidates, and constraints with their remedies."""
