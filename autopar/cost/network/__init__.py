"""Seconds of collectives and messages on the links of a cluster.

``placement`` says on which node groups the ranks of a pipeline rank lie, how the ranks of a mesh axis lie on nodes and switches, and so
which bandwidth and latency they share. ``collectives.CollectiveModel`` gives the time of a collective: that of the fastest of the library's
algorithms, each a latency per step and a bandwidth for the bytes (the alpha-beta model; steps and factors of rings, trees and in-switch
sums as in NCCL's ``src/graph/tuning.cc``).
"""
