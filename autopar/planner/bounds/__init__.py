"""Relaxations: lower bounds of the step time of every plan of a candidate, and proofs of them.

A candidate in a layout becomes a ``PipelineInstance`` (``instance_maker``): what blocks take and hold at the least (``floors``), on which
device each pipeline rank lies, and the schedule. Relaxations read nothing else: the work relaxation (``columns``), the feasibility
relaxation (``feasibility``: can ranks take all blocks in a time?), the chain program (``chain_program``: chains of the schedule as cutting
planes, after Kelley 1960, with weights as proofs). ``cascade`` asks them in that order.
"""
