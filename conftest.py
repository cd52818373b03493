"""For every test and every example of the guides, which are run as tests."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest


def has_process_group() -> bool:
    """Whether torch.distributed has been imported and started in this process."""
    distributed = sys.modules.get("torch.distributed")
    return distributed is not None and distributed.is_available() and distributed.is_initialized()


@pytest.fixture(autouse=True)
def no_process_group_left() -> Iterator[None]:
    """End with a test what it has started, as by ``autopar.parallelize``; what a fixture of its module has started goes on."""
    was_there = has_process_group()
    yield
    if not was_there and has_process_group():
        sys.modules["torch.distributed"].destroy_process_group()
