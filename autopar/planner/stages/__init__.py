"""Stage cuts: which blocks of a layout form each pipeline stage, and what each block recomputes.

- ``block_options``: the price of each block in each activation mode.
- ``recompute``: the least recompute of a stage under a limit (a multiple-choice knapsack by its lower hull, Sinha and Zoltners 1979).
- ``stage_cut``: the cut with the least sum of stages and slowest stage (a dynamic program over prefixes, Zheng et al. 2022).
- ``cut_problem``: the problem, with the limits on virtual stages; the cut is repeated until it fits by the memory model.
- ``refinement``: ranks with several stages choose their recompute anew (a covering program, Dobson 1982), and blocks move between stages
  along the longest chains of the simulated step.
- ``exchange``: blocks of a rank exchange their recompute.
"""
