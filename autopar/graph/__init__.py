"""From a model and a batch to a graph: tracing, clean-up, blocks, counts."""

from autopar.graph.ir import Graph
from autopar.graph.trace import trace

__all__ = ["Graph", "trace"]
