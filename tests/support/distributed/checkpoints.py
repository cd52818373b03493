"""What tests of checkpoints, and the campaign of them, run on every rank; by name, so that workers can import it."""

import os
import shutil
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from autopar.errors import AutoparError
from autopar.runtime.checkpoint import contents
from autopar.runtime.checkpoint.series import Checkpoints
from autopar.runtime.parallel_model import ParallelModel
from autopar.verification.reference import adamw
from tests.support.damage import damage
from tests.support.distributed.jobs import Batch, steps
from tests.support.said import said


def trained(par: ParallelModel, batches: Sequence[Batch]) -> torch.optim.Optimizer:
    optimizer = adamw(par.parameters())
    steps(par, optimizer, batches)
    return optimizer


def saved(par: ParallelModel, batches: Sequence[Batch], folders: Sequence[str]) -> None:
    optimizer = trained(par, batches[:1])
    for folder in folders:
        par.save(folder, optimizer)
        steps(par, optimizer, batches[-1:])


def moved(par: ParallelModel, source: str, target: str) -> None:
    """Loads one checkpoint into other weights, and saves another."""
    par.seed = 5
    optimizer = torch.optim.AdamW(par.parameters(), lr=0.5)
    par.load(source, optimizer)
    par.save(target, optimizer)


def exported(par: ParallelModel, batches: Sequence[Batch], folder: str, size: str) -> Any:
    trained(par, batches)
    par.save_pretrained(folder, max_shard_size=size)
    return par.full_state_dict()


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Of a damaged checkpoint: what ranks said, empty or not; ``is_right``: they loaded what was saved, or nothing was changed."""

    kind: str
    what: str
    said: tuple[str, ...]
    is_right: bool


def damaged(par: ParallelModel, run: str, other: str, work: str, seeds: Sequence[int]) -> list[Outcome]:
    """Damages copies of ``run``, loads each, and says what came of it; ``other`` is of another step."""
    optimizer = adamw(par.parameters())
    par.load(run, optimizer)
    wanted = _values(par, optimizer)
    par.load(other, optimizer)
    before, copy, found = _values(par, optimizer), Path(work), list[Outcome]()
    for seed in seeds:
        done: list[Any] = [None]
        if dist.get_rank() == 0:
            shutil.rmtree(copy, ignore_errors=True)
            shutil.copytree(run, copy)
            done = [damage(copy, Path(other), seed)]
        dist.broadcast_object_list(done)
        try:
            par.load(copy, optimizer)
            mine = "", _same(_values(par, optimizer), wanted)
        except AutoparError as error:
            mine = f"{type(error).__name__}: {error}", _same(_values(par, optimizer), before)
        said: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(said, mine)
        found.append(
            Outcome(
                kind=done[0][0], what=done[0][1], said=tuple(text for text, _ in said),
                is_right=all(ok for _, ok in said),
            )
        )  # fmt: skip
        if not mine[0]:
            par.load(other, optimizer)
    return found


def _values(par: ParallelModel, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    named = contents.tensors_of(par._assembly.held, optimizer)
    return [contents.local_box(value)[2].clone() for _, value, _ in named]


def _same(one: list[Tensor], other: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def killed(par: ParallelModel, batches: Sequence[Batch], root: str, rank: int, where: str) -> None:
    """Saves one step, and is killed on one rank while it saves the next."""
    optimizer = trained(par, batches[:1])
    checkpoints = Checkpoints(root, asynchronous=where.startswith("beside "))
    checkpoints.save(par, optimizer)
    checkpoints.wait()
    steps(par, optimizer, batches[1:])

    def kill(*_: object) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    name = "autopar.runtime.checkpoint." + where.removeprefix("beside ")
    with mock.patch(name, kill) if dist.get_rank() == rank else mock.patch("builtins.print"):
        checkpoints.save(par, optimizer)
        checkpoints.wait()


def resumed(par: ParallelModel, root: str) -> tuple[int | None, list[str]]:
    """The step that is loaded, and what is in the folder after the next save."""
    par.seed = 5
    optimizer = torch.optim.AdamW(par.parameters(), lr=0.5)
    checkpoints = Checkpoints(root)
    step = checkpoints.load(par, optimizer)
    checkpoints.save(par, optimizer)
    return step, sorted(path.name for path in Path(root).iterdir())


def beside_and_at_once(par: ParallelModel, batches: Sequence[Batch], root: str) -> list[float]:
    """Saves each step both ways, in the background with steps going on; losses."""
    optimizer = trained(par, batches[:1])
    one, other = Checkpoints(f"{root}/at_once"), Checkpoints(f"{root}/beside", asynchronous=True)
    losses = []
    for batch in batches:
        one.save(par, optimizer)
        other.save(par, optimizer)
        losses += steps(par, optimizer, [batch])
    other.wait()
    return losses


class Position:
    """As a loader's: where each data rank is."""

    def __init__(self, state: Any = None) -> None:
        self.state = state

    def state_dict(self) -> Any:
        return self.state

    def load_state_dict(self, state: Any) -> None:
        self.state = state


def saved_positions(par: ParallelModel, folder: str) -> None:
    """A position of each data rank, and a scheduler's state that all share."""
    state = {"seen": 10 * par.data_rank, "order": torch.arange(3) + par.data_rank}
    par.save(folder, dataloader=Position(state), scheduler=Position({"epoch": 4}))


def loaded_positions(par: ParallelModel, folder: str) -> Any:
    """The data rank, its position and the scheduler's state; or what is said."""
    position, scheduler = Position(), Position()
    if text := said(AutoparError, par.load, folder, dataloader=position, scheduler=scheduler):
        return text
    return par.data_rank, position.state["seen"], position.state["order"].tolist(), scheduler.state
