"""Predictions against measured runs: the table of runs, errors of the predictions, and the fit of a profile's free parameters."""
