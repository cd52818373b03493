"""Measurement of operators, collectives and the host on real machines, and the fit of profiles to the results."""
