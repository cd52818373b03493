"""Rules by execution: each strategy held against one device, a user's rule checked, a missing one found."""
