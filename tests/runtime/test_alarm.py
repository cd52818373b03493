"""A rank that waits for its device, outside of any call, hears of the failure of another one."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
from torch._C._distributed_c10d import HashStore, PrefixStore

from autopar.errors import RankFailedError
from autopar.runtime.failure_watch import Alarm

POLL_S = 0.02
PATIENCE_S = 20.0
"""Of tests whose outcome does not depend on it: it is what they wait before they fail."""


class Device:
    """Work of calls: done once it is told so."""

    def __init__(self) -> None:
        self.is_done = False

    def mark(self) -> Callable[[], bool]:
        self.is_done = False
        return lambda: self.is_done


class Pair:
    """The alarms of two ranks of one job in this process."""

    def __init__(self) -> None:
        store, self.device, self.ended = HashStore(), Device(), list[str]()
        self.has_ended = threading.Event()

        def end(alarm: Alarm, said: str) -> None:
            self.ended.append(said)
            self.has_ended.set()
            alarm._closed.set()

        with (
            mock.patch("autopar.runtime.failure_watch.own_store", return_value=PrefixStore("job", store)),
            mock.patch("autopar.runtime.failure_watch.dist.get_backend", return_value="nccl"),
        ):
            options: Any = {"poll_s": POLL_S, "grace_s": POLL_S, "launched": self.device.mark}
            self.alarms = [Alarm(rank, 2, **options) for rank in range(2)]
        for alarm in self.alarms:
            mock.patch.object(alarm, "_end", lambda said, alarm=alarm: end(alarm, said)).start()

    def call(self, rank: int, what: str = "train_step", *, fails: bool = False) -> None:
        with self.alarms[rank].watched(what):
            self.alarms[rank].runs()
            if fails:
                raise ValueError("no such token")


@pytest.fixture
def pair() -> Iterator[Pair]:
    made = Pair()
    yield made
    for alarm in made.alarms:
        alarm._closed.set()
    mock.patch.stopall()


@pytest.mark.parametrize("ahead", [1, 3])
def test_a_rank_whose_device_waits_is_ended_with_what_the_other_said(pair: Pair, ahead: int) -> None:
    for _ in range(ahead):
        pair.call(1)  # returns, and its work waits for rank 0
    with pytest.raises(ValueError, match="no such token"):
        pair.call(0, fails=True)
    assert pair.has_ended.wait(PATIENCE_S)
    assert pair.ended == ["rank 0: ValueError: no such token"]


def test_a_rank_that_works_by_itself_is_told_by_its_next_call(pair: Pair) -> None:
    pair.call(1)
    pair.device.is_done = True
    with pytest.raises(ValueError, match="no such token"):
        pair.call(0, fails=True)
    end = time.monotonic() + PATIENCE_S
    while not pair.alarms[1]._failure and time.monotonic() < end:
        time.sleep(POLL_S)
    assert not pair.ended
    with pytest.raises(RankFailedError, match="rank 0: ValueError: no such token"):
        pair.call(1)


def test_a_device_that_waits_for_another_call_says_which(pair: Pair) -> None:
    pair.call(0, "evaluate")
    pair.call(1, "train_step")
    assert pair.has_ended.wait(PATIENCE_S)
    assert "evaluate on rank 0, train_step on rank 1: different calls at the same time" in " ".join(pair.ended) or (
        "train_step on rank 1, evaluate on rank 0: different calls at the same time" in " ".join(pair.ended)
    )


def test_ranks_whose_devices_take_long_are_left_alone(pair: Pair) -> None:
    for rank in range(2):
        for _ in range(2):
            pair.call(rank)
    assert not pair.has_ended.wait(20 * POLL_S)
    assert not any(alarm._failure for alarm in pair.alarms)
