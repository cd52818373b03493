"""Checkpoints of a parallel model: collects its state for a save, restores it, and manages the series of checkpoints of a run."""

from __future__ import annotations

import logging
import re
import shutil
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from autopar.errors import AutoparError, CheckpointError, PlanError, UsageError, check_counts, check_flags
from autopar.plan.plan import Plan
from autopar.runtime.checkpoint import checkpoint_index, contents
from autopar.runtime.checkpoint.contents import RankContents, Settings, part_of
from autopar.runtime.checkpoint.load import Folder, Loading, saved_state, whole
from autopar.runtime.checkpoint.write import Save, copied_to_host
from autopar.runtime.checks import check_model
from autopar.runtime.state_dict import State, Untrained
from autopar.runtime.step.gradients import RankParameter
from autopar.runtime.world import DISKS, Peers, World
from autopar.util.files import check_places

if TYPE_CHECKING:
    from autopar.runtime.parallel_model import ParallelModel


_LOGGER = logging.getLogger("autopar")

RANDOM, SCHEDULER, LOADER, EXTRA = "random", "scheduler", "dataloader", "extra"

_WITH_METHODS = (SCHEDULER, LOADER)
"""Kinds of states whose owners have ``state_dict`` and ``load_state_dict``, or are lists of such."""

CallerStates: TypeAlias = Mapping[str, Any]
"""The states that a caller saves with a checkpoint, by kind; None for a kind without a state."""


class Checkpointed:
    """The checkpoints of one parallel model; every rank of the job makes one and calls the same methods."""

    def __init__(
        self, plan: Plan, world: World, held: Sequence[RankParameter], buffers: State, untrained: Untrained
    ) -> None:
        self._plan, self._world, self._held = plan, world, held
        self._buffers, self._untrained = buffers, untrained
        each = world.rank, world.mesh.world_size
        of_data = world.data_index, plan.mesh.data
        # of each kind the index of the owner of this rank's state, and the number of owners
        self._owners = {RANDOM: each, SCHEDULER: each, LOADER: of_data, EXTRA: (0, 1)}
        is_first_of_data = not any(world.coordinate[axis] for axis in ("pp", "cp", "tp"))
        self._is_sent = {RANDOM: True, SCHEDULER: True, LOADER: is_first_of_data, EXTRA: world.rank == 0}
        self._peers: Peers | None = None

    @property
    def peers(self) -> Peers:
        """All ranks, for saves and loads; their group is made for the first one."""
        if self._peers is None:
            self._peers = Peers(self._world.meeting_group(least=DISKS))
        return self._peers

    def save(
        self, path: str | Path, progress: Mapping[str, Any], optimizer: Optimizer | None, given: CallerStates
    ) -> Save:
        """Begin a save: makes its folder, but writes nothing yet.

        Raises:
            UsageError: see :class:`~autopar.runtime.checkpoint.write.Save`.
        """
        with self.peers.failing_together():
            local = self._contents(optimizer, given)
        values = {
            "progress": dict(progress),
            "plan": self._plan.to_dict(),
            "optimizer": {"kind": "" if optimizer is None else type(optimizer).__name__},
            "ranks": {"all": self._world.mesh.world_size, "data": self._plan.mesh.data},
        }
        return Save(path, local, values, self.peers)

    def _contents(self, optimizer: Optimizer | None, given: CallerStates) -> RankContents:
        """Return this rank's part of a checkpoint."""
        self.check_optimizer(optimizer)
        sent = [h for h in self._held if h.is_sent]
        local = RankContents(parts=[part_of(*named) for named in contents.tensors_of(sent, optimizer)])
        local.parts += [part_of(f"buffer.{name}", value) for name, value in self._buffers.sent().items()]
        local.parts += [part_of(self._untrained.key(name), value) for name, value in self._untrained.kept.items()]
        if optimizer is not None:
            contents.add_optimizer(local, self._held, optimizer)
        for kind, state in {RANDOM: contents.random_states(self._world.device), **given}.items():
            if state is not None:
                given_state = contents.state_dicts(state, kind) if kind in _WITH_METHODS else state
                if self._is_sent[kind]:
                    contents.add_state(local, kind, self._owners[kind][0], given_state)
        return local

    def check_optimizer(self, optimizer: Optimizer | None) -> None:
        """Check that an optimizer is of this model.

        Raises:
            UsageError: it is none, or has only parameters of another model.
        """
        if optimizer is None:
            return
        if not hasattr(optimizer, "param_groups"):
            raise UsageError(f"The optimizer is a {type(optimizer).__name__}", fix="Give one of torch.optim")
        known = {id(h.parameter) for h in self._held}
        if known and not any(id(p) in known for group in optimizer.param_groups for p in group["params"]):
            raise UsageError("The optimizer has no parameter of this model", fix="Make it of par.parameters()")

    def load(self, path: str | Path, optimizer: Optimizer | None, given: CallerStates) -> tuple[Mapping[str, Any], Any]:
        """Load a folder in place; return the saved progress and ``extra``.

        Raises:
            PlanError: the folder is no checkpoint, is damaged, differs between ranks, or is of another model; raised on all ranks.
                Nothing is changed.
        """
        with self.peers.failing_together():
            self.check_optimizer(optimizer)
        without_state = [] if optimizer is None else contents.make_state(optimizer)
        try:
            return self._load(Loading(Path(path), self.peers), optimizer, given)
        except PlanError:
            if optimizer is not None:
                for parameter in without_state:  # whose states have counted a step
                    optimizer.state.pop(parameter, None)
            raise

    def _load(
        self, loading: Loading, optimizer: Optimizer | None, given: CallerStates
    ) -> tuple[Mapping[str, Any], Any]:
        fresh = self._without_states(loading, optimizer)
        named = list(contents.tensors_of(self._held, optimizer, fresh))
        parts = [part_of(*tensor) for tensor in named]
        parts += [part_of(f"buffer.{name}", value) for name, value in self._buffers.named().items()]
        parts += [part_of(self._untrained.key(name), value) for name, value in self._untrained.targets()]
        values = loading.source.values
        saved: dict[str, Settings] = {}  # hyperparameters of each parameter's group, by its key
        stepped = [] if optimizer is None else contents.groups(self._held, optimizer)
        if optimizer is not None:
            sets = [checkpoint_index.decode_state(encoded, _no_tensor) for encoded in values["optimizer"]["settings"]]
            saved = {key: sets[number] for key, number in values["optimizer"]["of"].items()}
        missing = [f"optimizer.{h.key}.group" for h, _ in stepped if h.key not in saved]
        loading.check_holds([part.name for part in parts], missing)
        if optimizer is not None:  # before anything is changed
            contents.check_groups(str(loading.source.path), self._held, optimizer, saved, self.peers)
        loading.verify(parts)
        states = self._states(loading, given)
        loading.put(parts)
        for _, value, padding in named:
            if padding is not None:
                contents.padding_of(value, padding).zero_()
        if optimizer is not None:
            contents.put_groups(self._held, optimizer, saved, self.peers)
            for h in self._held:
                if h.key in fresh:
                    optimizer.state.pop(h.parameter, None)
                for name, value in values["optimizer"]["numbers"].get(h.key, {}).items():
                    optimizer.state[h.parameter][name] = checkpoint_index.decode_state(value, _no_tensor)
        self._put_states(states, given, loading)
        return values["progress"], states.get(EXTRA)

    def _without_states(self, loading: Loading, optimizer: Optimizer | None) -> set[str]:
        """Return the parameters that an optimizer of this kind had not stepped when it was saved: they have no states after the load."""
        saved = loading.source.values["optimizer"]
        if optimizer is None or saved.get("kind") != type(optimizer).__name__:
            return set()
        states_of = {name[10:].rpartition(".")[0] for name in loading.source.tensors if name.startswith("optimizer.")}
        return {key for key in saved["of"] if key not in states_of and key not in saved["numbers"]}

    def _states(self, loading: Loading, given: CallerStates) -> dict[str, Any]:
        """Return the decoded states of the given schedulers and loaders, and of the generators."""
        states: dict[str, Any] = {}
        with self.peers.failing_together():
            for kind, owner in self._owners.items():
                if kind in _WITH_METHODS and given.get(kind) is None:
                    continue
                try:
                    encoded = saved_state(loading.source.values, kind, *owner)
                    if encoded is not None:
                        states[kind] = checkpoint_index.decode_state(encoded, partial(whole, loading.source))
                    elif kind in _WITH_METHODS:
                        raise PlanError(
                            f"The checkpoint has no state of a {kind}",
                            where=str(loading.source.path),
                            fix=f"Load without {kind}=, and set it to step par.step_count",
                        )
                except PlanError as error:
                    if kind != RANDOM or isinstance(error, CheckpointError):
                        raise
                    _LOGGER.info("the generators of Python, numpy and torch go on as they are: %s", error.short)
                except (ValueError, TypeError, KeyError, AttributeError) as error:
                    raise CheckpointError(
                        f"The state of the {kind} cannot be read",
                        where=str(loading.source.path),
                        got=f"{type(error).__name__}: {error}",
                        fix=f"Load without {kind}=, or from the checkpoint before this one",
                    ) from error
        return states

    def _put_states(self, states: Mapping[str, Any], given: CallerStates, loading: Loading) -> None:
        with self.peers.failing_together():
            try:
                for kind in _WITH_METHODS:
                    if kind in states:
                        contents.put_state_dicts(given[kind], states[kind])
                if RANDOM in states:  # last, as the other loads may draw random numbers
                    contents.put_random_states(states[RANDOM], self._world.device)
            except Exception as error:  # of the caller's code; the other ranks must not wait for this one
                raise PlanError(
                    "A state of the checkpoint does not fit the scheduler or the dataloader that was given",
                    where=str(loading.source.path),
                    got=f"{type(error).__name__}: {error}",
                    fix="Make them as in the job that saved; the model and the optimizer are loaded",
                ) from error


def _no_tensor(name: str) -> Tensor:
    raise ValueError(f"{name} is a tensor")


_STEP = re.compile(r"step-(\d{8,})")
_UNDER_WAY = re.compile(r"\.step-\d{8,}\.saving")


class Checkpoints:
    """Checkpoints ``ROOT/step-00000100``, ``ROOT/step-00000200`` and so on; all ranks make one and call the same methods.

    Args:
        root: the folder for them, on a file system that all nodes share; made when it is first needed.
        keep: the number of complete checkpoints that are kept; older ones are removed after a newer one is complete.
        asynchronous: :meth:`save` copies the state to the host's memory and returns; a thread writes it while training continues.
            There is one such copy, so a save waits for the save before it. Its errors are raised by the next :meth:`save` or
            :meth:`wait`.

    Raises:
        UsageError: ``root`` is no path, ``keep`` no number from 1, or ``asynchronous`` no truth value.
    """

    def __init__(self, root: str | Path, keep: int = 3, *, asynchronous: bool = False) -> None:
        check_places(root=root)
        check_counts(keep=keep)
        check_flags(asynchronous=asynchronous)
        self.root, self.keep, self.asynchronous = Path(root).absolute(), keep, asynchronous
        self._damaged: set[Path] = set()
        self._peers: Peers | None = None
        self._buffers: dict[str, Tensor] = {}
        self._writer = ThreadPoolExecutor(1, "autopar-checkpoint")  # the process waits for it before it exits
        self._under_way: Future[None] | None = None

    def save(
        self,
        par: ParallelModel,
        optimizer: Optimizer | None = None,
        *,
        scheduler: Any = None,
        dataloader: Any = None,
        extra: Any = None,
    ) -> Path:
        """As :meth:`ParallelModel.save`, into the folder of the step ``par.step_count``, whose path it returns.

        Raises:
            UsageError: the folder cannot be written, or the previous save in the background failed.
        """
        self.wait()
        check_model(par, "a checkpoint")
        path = self.root / f"step-{par.step_count:08d}"
        given = {SCHEDULER: scheduler, LOADER: dataloader, EXTRA: extra}
        peers = self._get_peers()
        with par._calls.at_once("save"):
            if peers.rank == 0:
                self._clean()
            save = par._begin_save(path, optimizer, given)
            if not self.asynchronous:
                self._write(save, peers)
                return path
            save.parts = copied_to_host(save.parts, self._buffers)
        self._under_way = self._writer.submit(self._write, save, peers)
        return path

    def wait(self) -> None:
        """Wait until the save in the background is complete.

        Raises:
            UsageError: it could not be written; raised on all ranks.
        """
        future, self._under_way = self._under_way, None
        if future is not None:
            future.result()

    def latest(self) -> Path | None:
        """Return the newest complete checkpoint, the same on all ranks; None if there is none.

        Its index is undamaged and its files have the right lengths. Tensors are verified when they are loaded.
        """
        self.wait()
        return self._get_peers().from_first_rank(lambda: next(iter(self._complete()), None))

    def load(
        self,
        par: ParallelModel,
        optimizer: Optimizer | None = None,
        *,
        scheduler: Any = None,
        dataloader: Any = None,
    ) -> int | None:
        """Load the newest checkpoint; return its step, or None if there is none. Its ``extra`` is in the attribute ``extra``.

        If it is damaged, the one before it is loaded instead, with a warning; a damaged one is not removed, and does not count among those
        that are kept. A checkpoint that fits only another model or optimizer is an error at once.

        Raises:
            CheckpointError: there are checkpoints, and all of them are damaged.
            PlanError: the newest undamaged one is of another model, optimizer or number of data ranks.
        """
        self.wait()
        check_model(par, "a checkpoint")
        failure: CheckpointError | None = None
        for path in self._get_peers().from_first_rank(self._all):
            if path in self._damaged:
                continue
            try:
                self.extra = par.load(path, optimizer, scheduler=scheduler, dataloader=dataloader)
            except CheckpointError as error:
                self._damaged.add(path)
                failure = failure or error
                _LOGGER.warning("%s is damaged, and the checkpoint before it is loaded instead: %s", path, error)
                continue
            return par.step_count
        if failure is not None:
            raise failure.becoming(CheckpointError, fix=f"No checkpoint in {self.root} can be loaded. {failure.fix}")
        return None

    extra: Any = None
    """The ``extra`` of the checkpoint that was loaded."""

    def _get_peers(self) -> Peers:
        """Return all ranks, in a group of its own, as the writer uses it while steps run."""
        if self._peers is None:
            is_job = dist.is_initialized() and dist.get_world_size() > 1
            self._peers = Peers(dist.new_group(backend=dist.Backend.GLOO, timeout=DISKS) if is_job else None)
        return self._peers

    def _write(self, save: Save, peers: Peers) -> None:
        """Write a checkpoint, and remove the oldest ones, never the one just written."""
        save.write(peers)
        if peers.rank == 0:
            for path in [path for path in self._complete() if path != save.folder][self.keep - 1 :]:
                _remove(path)

    def _clean(self) -> None:
        """Remove the files of saves that were killed."""
        with suppress(OSError):
            for path in self.root.iterdir():
                if _UNDER_WAY.fullmatch(path.name):
                    shutil.rmtree(path, ignore_errors=True)

    def _all(self) -> list[Path]:
        """Return the existing checkpoints, newest first; called on rank 0."""
        if not self.root.is_dir():
            return []
        folders = [path for path in self.root.iterdir() if _STEP.fullmatch(path.name) and path.is_dir()]
        return sorted(folders, key=lambda path: int(path.name.removeprefix("step-")), reverse=True)

    def _complete(self) -> list[Path]:
        """Return the checkpoints that are complete, as far as their indexes and the lengths of their files show."""
        complete = []
        for path in self._all():
            if path not in self._damaged:
                with suppress(AutoparError):
                    Folder(path).check_files()
                    complete.append(path)
        return complete


def _remove(path: Path) -> None:
    """Remove a checkpoint. It is renamed first, so that what is left of a removal that was killed does not count as a checkpoint."""
    renamed = path.with_name(f".{path.name}.saving")
    with suppress(OSError):
        path.rename(renamed)
        shutil.rmtree(renamed, ignore_errors=True)
