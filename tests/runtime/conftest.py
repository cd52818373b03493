"""A process group of one rank."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from autopar.runtime.job import start, stop


@pytest.fixture
def one_rank() -> Iterator[None]:
    """Of a test that trains in this process."""
    start("cpu")
    yield
    stop()
