"""From a model and a batch to a :class:`~autopar.graph.graph.Graph`.

``trace`` exports the model on fake tensors, ``convert`` turns each call into one canonical form (``forms``), and ``finish`` cleans up
and finds equal blocks. What a graph cannot say is refused or made sayable (``side_effects``, ``repeated_steps``, ``modes``, ``value_branches``);
code that cannot be traced becomes one operator (``opaque_regions``).
"""
