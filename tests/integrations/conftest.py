"""Two worker processes that have imported the libraries once."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from autopar.graph.graph import Graph
from autopar.verification.against_one_device import PRELOAD
from autopar.verification.rank_pool import WorkerPool
from tests.support.integrations.ranks import SUBJECT

LIBRARIES = ["transformers.models.gpt2.modeling_gpt2", "transformers.trainer", "accelerate"]


@pytest.fixture(scope="session")
def pair() -> Iterator[WorkerPool]:
    with WorkerPool(2, preload=[*PRELOAD, *LIBRARIES]) as workers:
        yield workers


@pytest.fixture(scope="session")
def graph() -> Graph:
    found: Graph = SUBJECT.trace()
    return found
