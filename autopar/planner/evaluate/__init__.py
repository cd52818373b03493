"""One candidate to its best plan, or the reason why there is none."""
