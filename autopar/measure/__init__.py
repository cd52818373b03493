"""Times operators, collectives and the host on real machines, and fits the numbers of profiles to them."""
