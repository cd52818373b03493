"""What generated code calls: collectives with their gradients, and kernels that know they hold one rank's part.

A graph names them ``autopar.NAME``; :func:`autopar.ops.kernels.resolve` finds them.
"""
