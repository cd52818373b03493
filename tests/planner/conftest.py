"""A small graph for whole searches."""

import pytest

from autopar.graph.graph import Graph
from tests.support.planner.graphs import mlp


@pytest.fixture(scope="session")
def graph() -> Graph:
    return mlp(layers=6, batch=2, width=64, hidden=256)
