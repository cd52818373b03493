"""The cost model: what a concrete plan costs on a concrete cluster, in seconds and bytes.

:class:`autopar.cost.model.CostModel` prices operators, blocks and whole plans (``predict``, ``memory``); its ``of(step)`` prices blocks and
stages within one step. ``operators`` counts the work of operators and times it by a roofline. ``network`` prices collectives by latency and
bandwidth. ``blocks`` combines both for one block of one rank's graph. ``step`` adds up stages, simulates the schedule and counts the memory
of every rank. Each imports only those before it. All constants come from profiles, with their provenance.

The training program's own decisions are methods of :class:`autopar.cost.step.step.Runtime`, whose default is autopar's.
"""
