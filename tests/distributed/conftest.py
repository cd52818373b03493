"""Worker processes shared by the tests; a failed or late job gets new ones."""

from collections.abc import Iterator

import pytest

from autopar.verification.rank_pool import WorkerPool


@pytest.fixture(scope="session")
def pool() -> Iterator[WorkerPool]:
    with WorkerPool(4) as workers:
        yield workers
