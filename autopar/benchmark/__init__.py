"""Plans of a space run on this machine's ranks, and the prediction of each held against what was measured.

Here planning and running meet, as in ``autopar.api``: plans come from the search, ranks from the runtime.
"""
