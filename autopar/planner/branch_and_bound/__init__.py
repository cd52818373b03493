"""Best-first branch and bound over candidates (Land and Doig 1960), in the terms of SCIP.

:class:`~autopar.planner.branch_and_bound.branch_and_bound.BranchAndBound` takes the open candidate of the least dual bound from the
frontier. The frontier raises that bound while a tighter relaxation is left; then the candidate is evaluated, and a faster plan becomes the
incumbent. The search ends when no bound is below the incumbent. The certificate then closes the gap where it can.

The order depends on bounds alone. So several searches can share a ledger, and one search can run in several processes; all find the same
plan. For pools that are too large to search to the end, a sampler proposes candidates.
"""
