"""Worker processes shared by the tests; a failed or late job gets new ones."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from autopar.verification.rank_pool import WorkerPool


@pytest.fixture(scope="session")
def pool() -> Iterator[WorkerPool]:
    with WorkerPool(4) as workers:
        yield workers


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The tests of this folder start several processes."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker("distributed")
