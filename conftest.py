"""For the examples of guides, which are run as tests."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def no_process_group_left(request: pytest.FixtureRequest) -> Iterator[None]:
    """What a guide has started by ``autopar.parallelize`` is ended with it: tests check programs, or start their own."""
    yield
    if not isinstance(request.node, pytest.DoctestItem):
        return
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        distributed.destroy_process_group()
