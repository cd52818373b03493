"""A place in the job's store that no earlier start of its ranks has written to.

Launchers that start ranks anew after a failure (``torchrun --max-restarts``, or with other nodes) keep the store, and in it the
addresses of processes that are gone: torch's process groups would connect to those. Each rank says hello by a name of its own process,
rank 0 offers a place to those whose names it has read, and all who find their name in the offer meet there.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from uuid import uuid4

from torch._C._distributed_c10d import PrefixStore, Store

from autopar.errors import RankFailedError

_POLL_S = 0.02


def fresh(store: Store, rank: int, size: int, *, timeout_s: float) -> Store:
    """The place that all ranks of this start get, and none of another start; all ranks call it.

    Raises:
        RankFailedError: some rank has not come after ``timeout_s``.
    """
    if size == 1:
        return store
    own, end = uuid4().hex, time.monotonic() + timeout_s
    store.set(f"hello/{rank}", own)
    if rank == 0:
        _offer(store, own, size, end)
        return PrefixStore(own, store)
    while True:
        offer = store.get("offer").decode().split() if store.check(["offer"]) else []
        if len(offer) > rank and offer[rank] == own:
            store.set(f"{offer[0]}/{rank}", "")
            return PrefixStore(offer[0], store)
        _wait(end, "Rank 0")


def _offer(store: Store, own: str, size: int, end: float) -> None:
    """Until every rank has found its name in the offer; names of an earlier start are read until they are replaced."""
    hellos, answers = ([f"{place}/{rank}" for rank in range(1, size)] for place in ("hello", own))
    offered: Sequence[bytes] = ()
    while not store.check(answers):
        if store.check(hellos):
            found = store.multi_get(hellos)
            if found != offered:
                store.set("offer", " ".join([own, *(name.decode() for name in found)]))
                offered = found
        _wait(end, "Some rank")


def _wait(end: float, who: str) -> None:
    if time.monotonic() > end:
        raise RankFailedError(
            f"{who} did not come to the start of the job",
            fix="See what the launcher says of it, and start the job again",
        )
    time.sleep(_POLL_S)
