"""The graph of a model as plain data, and questions asked of it: blocks, aliases, FLOPs, attention, an interpreter.

Nothing here traces: :mod:`autopar.tracing` makes graphs.
"""
