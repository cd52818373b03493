"""Seconds of collectives and messages on the links of a cluster.

``placement`` says on which node groups the ranks of a pipeline rank stand, how the ranks of a mesh axis lie on nodes and switches, and so
what bandwidth and latency they share; ``collectives.CollectiveModel`` has the time of a collective: latency for each step of an algorithm
and bytes over its bandwidth (the alpha-beta model; steps and factors of rings, trees and in-switch sums as in NCCL's
``src/graph/tuning.cc``), the cheapest algorithm of those that the library has.
"""
