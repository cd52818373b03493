"""Sharding rules: for each operator and mesh axis the typed ways to run it.

``grammar`` reads rules of one line, ``table`` has one for each operator of torch, ``moving_patterns``, ``computing_patterns`` and
``other_kernels`` what depends on literals. ``apply`` makes one rank's graph of a typing, ``by_execution`` holds rules against execution.
:mod:`autopar.rules.table` is what others ask.
"""
