"""Best-first branch and bound over candidates (Land and Doig 1960; the words are those of SCIP).

:class:`~autopar.planner.branch_and_bound.branch_and_bound.BranchAndBound` takes the open candidate of the least dual bound from the
frontier, where its bound is raised as long as a tighter relaxation is left, and evaluates it; a plan that is faster is the new
incumbent. It ends where no bound is below the incumbent; the certificate then closes the gap. The order depends on bounds alone, so
that searches can share a ledger, and one search be a group of processes, and all find the same plan. Of pools that are too large a
sampler asks for a part.
"""
