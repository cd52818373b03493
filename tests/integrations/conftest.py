"""Two worker processes."""

from collections.abc import Iterator

import pytest

from autopar.graph.graph import Graph
from autopar.verification.rank_pool import WorkerPool
from tests.support.integrations.ranks import SUBJECT


@pytest.fixture(scope="session")
def pair() -> Iterator[WorkerPool]:
    with WorkerPool(2) as workers:
        yield workers


@pytest.fixture(scope="session")
def graph() -> Graph:
    return SUBJECT.trace()
