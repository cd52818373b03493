"""Worker processes shared by the tests; a failed or late job gets new ones."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from autopar.verification.against_one_device import PRELOAD
from autopar.verification.rank_pool import WorkerPool

MODELS = [f"transformers.models.{kind}.modeling_{kind}" for kind in ("gpt2", "llama")]
"""Of most jobs: imported once for all workers."""


@pytest.fixture(scope="session")
def pool() -> Iterator[WorkerPool]:
    with WorkerPool(4, preload=[*PRELOAD, *MODELS]) as workers:
        yield workers
