"""What a concrete plan costs on a concrete cluster: the one place that knows seconds and bytes.

:class:`autopar.cost.model.CostModel` prices operators, blocks and whole plans (``predict``, ``memory``), and ``of(step)`` blocks and
stages inside one step. ``operators`` counts work and turns it into seconds by a roofline; ``network`` prices collectives by latency and
bandwidth; ``blocks`` puts both together for one block of one rank's graph; ``step`` adds up stages, simulates the schedule and counts
the memory of every rank. Each imports only those before it. All constants come from profiles, with their provenance.

What a program decides is a hook, :class:`autopar.cost.step.step.Runtime`, which is autopar's own here.
"""
