"""Sharding rules: the typed ways to run each operator on a mesh axis.

``grammar`` reads rules of one line, and ``table`` has the rules of torch's operators; other packages ask it for strategies. The modules
``moving_patterns``, ``computing_patterns`` and ``other_kernels`` have the rules that depend on literals of a call. ``apply`` makes the
graph of one rank from a typing. ``by_execution`` checks rules by running them, and ``missing`` finds rules that the table lacks. ``sample_order`` puts rows of joined
batches in the order of samples, where rules say that operators treat rows alike.
"""
