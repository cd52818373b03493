"""Relaxations: lower bounds of the step time of all plans of a candidate, and certificates of these bounds.

``instance_maker`` turns a candidate in a layout into a ``PipelineInstance``: the least time and memory of each block (``floors``), the
device of each pipeline rank, and the schedule. Relaxations read nothing else. ``cascade`` runs them from cheap to tight: the work
relaxation (``columns``), the feasibility relaxation (``feasibility``: can the ranks take all blocks within a time?), and the chain program
(``chain_program``: chains of the schedule as cutting planes, after Kelley 1960, whose weights are a certificate).
"""
