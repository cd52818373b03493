"""Tracing: from a model and a batch to a :class:`~autopar.graph.graph.Graph`.

:mod:`~autopar.tracing.trace` exports the model on fake tensors, :mod:`~autopar.tracing.convert` turns each call of the exported program
into its canonical form (:mod:`~autopar.tracing.forms`), and :mod:`~autopar.tracing.finish` cleans the graph up and finds equal blocks.
What a graph cannot express is refused or rewritten by ``side_effects``, ``program_ends``, ``modes``, ``value_branches`` and
``repeated_steps``. Code that cannot be traced becomes one operator (:mod:`~autopar.tracing.opaque_regions`).
"""
