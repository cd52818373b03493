"""The functions that generated code calls: collectives with their gradients, and kernels that run on the part of one rank.

Graphs name them ``autopar.NAME``; :func:`autopar.ops.kernels.resolve` finds them.
"""
