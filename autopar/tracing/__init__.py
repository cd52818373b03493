"""From a model and a batch to a :class:`~autopar.graph.graph.Graph`.

``trace`` exports the model on fake tensors, ``convert`` turns each call into one canonical form (``forms``), ``guards`` refuses what a
graph cannot say, ``opaque`` makes one operator of code that cannot be traced, and ``finish`` cleans up and finds equal blocks.
"""
