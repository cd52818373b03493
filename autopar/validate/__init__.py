"""Predictions against published and own measurements: the table, the errors, the fit of a profile's free parameters."""
