"""The graph of a model as plain data, with what can be derived from it alone: aliases, kinds of operators, rewrites and an interpreter.

:mod:`autopar.tracing` makes graphs; this package does not trace.
"""
