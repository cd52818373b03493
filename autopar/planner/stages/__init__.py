"""Blocks of a layout to pipeline stages, with what each recomputes: cut, fit, refine, move.

``cut_problem`` says what is asked for, by the laws of the space on virtual stages; ``block_options`` prices blocks in each activation mode;
``recompute`` finds the least recompute of a stage under a limit (a multiple-choice knapsack by its lower hull, Sinha and Zoltners 1979);
``stage_cut`` the stages of the least sum and slowest stage (dynamic program over prefixes, Zheng et al. 2022); ``cut_problem`` repeats it
until the memory model agrees; ``refinement`` chooses anew what ranks with several stages recompute (a covering program, Dobson 1982), and
moves blocks between stages along the longest chains of the simulated step; ``exchange`` lets blocks of a rank swap who recomputes.
"""
