"""A process group of one rank, and a small model that trains in it."""

from collections.abc import Iterator

import pytest
from torch import Tensor

from autopar.runtime.job import start, stop
from autopar.runtime.parallel_model import ParallelModel
from tests.support.parallel import SMALL, small


@pytest.fixture
def one_rank() -> Iterator[None]:
    start("cpu")
    yield
    stop()


@pytest.fixture
def parallel(one_rank: None) -> ParallelModel:
    return small()


@pytest.fixture
def batch() -> dict[str, Tensor]:
    return SMALL.make_batch(8, seed=0)
