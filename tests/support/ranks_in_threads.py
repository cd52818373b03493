"""Ranks as threads of one process that form a gloo group: for rules whose kernels communicate."""

import threading
from datetime import timedelta
from functools import partial
from itertools import count
from typing import Any

import torch
import torch.distributed as dist

from autopar.rules import by_execution
from autopar.rules.by_execution import FAILURES

_SERIAL = count()
_C10D: Any = torch._C._distributed_c10d  # groups among threads: torch has no public way


def in_threads(rank: Any, size: int) -> None:
    """Run ``rank(index, group)`` on threads that form a gloo group.

    No rank begins before all are connected: a rank that has finished closes its connections, and others might still wait for them.
    """
    store = _C10D.HashStore()
    errors: list[BaseException] = []
    connected = threading.Barrier(size)
    serial = next(_SERIAL)

    def body(index: int) -> None:
        name = f"autopar-verify-{serial}-{index}"
        try:
            group = _gloo(store, index, size, name)
            connected.wait(timeout=60.0)
            rank(index, group)
        except FAILURES as error:
            errors.append(error)
            connected.abort()
        finally:
            _C10D._unregister_process_group(name)

    threads = [threading.Thread(target=body, args=(index,)) for index in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def _gloo(store: Any, rank: int, size: int, name: str) -> dist.ProcessGroup:
    """Return a group among threads of this process; only the registry of functional collectives knows it."""
    kind = _C10D.ProcessGroup.BackendType.GLOO
    options = _C10D.ProcessGroupGloo._Options()
    options._devices = [_C10D.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
    options._timeout = timedelta(seconds=20)
    group: dist.ProcessGroup = _C10D.ProcessGroup(store, rank, size)
    group._register_backend(torch.device("cpu"), kind, _C10D.ProcessGroupGloo(store, rank, size, options))
    group._set_default_backend(kind)
    group._set_group_name(name)  # type: ignore[arg-type]
    _C10D._register_process_group(name, group)
    return group


verify_rule = partial(by_execution.verify_rule, together=in_threads)
"""Also of strategies whose kernels communicate."""
