"""Checkpoints of one parallel model: what it has, gathered for a save, and what a load puts back."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from autopar.errors import AutoparError, CheckpointError, PlanError, UsageError
from autopar.plan.plan import Plan
from autopar.runtime.checkpoint import contents, states
from autopar.runtime.checkpoint.contents import Own, part_of
from autopar.runtime.checkpoint.load import Loading, state_of
from autopar.runtime.checkpoint.meeting import Meeting
from autopar.runtime.checkpoint.optimizer_groups import Settings, check_groups, groups, make_state, put_groups
from autopar.runtime.checkpoint.write import Save
from autopar.runtime.step.changed_buffers import State
from autopar.runtime.step.gradients import Held
from autopar.runtime.weights.untrained import Untrained
from autopar.runtime.world import World

_LOGGER = logging.getLogger("autopar")

RANDOM, SCHEDULER, LOADER, EXTRA = "random", "scheduler", "dataloader", "extra"


@dataclass(frozen=True, slots=True, kw_only=True)
class Beside:
    """What a caller keeps with a checkpoint: each has ``state_dict`` and ``load_state_dict``, or is a list of such."""

    scheduler: Any = None
    dataloader: Any = None
    extra: Any = None


class Checkpointed:
    """The checkpoints of one parallel model; every rank of the job makes one and calls the same methods."""

    def __init__(self, plan: Plan, world: World, held: Sequence[Held], buffers: State, untrained: Untrained) -> None:
        self._plan, self._world, self._held = plan, world, held
        self._buffers, self._untrained = buffers, untrained
        self._meeting: Meeting | None = None

    @property
    def meeting(self) -> Meeting:
        """Of saves and loads, made with the first one."""
        if self._meeting is None:
            self._meeting = Meeting(self._world.checkpoint_group())
        return self._meeting

    def save(self, path: str | Path, progress: Mapping[str, Any], optimizer: Optimizer | None, beside: Beside) -> Save:
        """Begins a save: after it the folder for it is there, and nothing is written.

        Raises:
            UsageError: see :class:`~autopar.runtime.checkpoint.write.Save`.
        """
        own: Own | AutoparError
        try:
            own = self._own(optimizer, beside)
        except UsageError as error:
            own = error
        values = {
            "progress": dict(progress),
            "plan": self._plan.to_dict(),
            "optimizer": {"kind": "" if optimizer is None else type(optimizer).__name__},
            "ranks": {"all": self._world.mesh.world_size, "data": self._plan.mesh.data},
        }
        return Save(path, own, values, self.meeting)

    def _own(self, optimizer: Optimizer | None, beside: Beside) -> Own:
        own = Own(parts=[part_of(*one) for one in contents.tensors_of(self._held, optimizer)])
        own.parts += [part_of(f"buffer.{name}", value) for name, value in self._buffers.named().items()]
        own.parts += [part_of(self._untrained.key(name), value) for name, value in self._untrained.own.items()]
        if optimizer is not None:
            contents.of_optimizer(own, self._held, optimizer)
        rank = self._world.rank
        contents.of_state(own, RANDOM, rank, contents.random_states(self._world.device))
        if beside.scheduler is not None:
            contents.of_state(own, SCHEDULER, rank, contents.state_dicts(beside.scheduler, SCHEDULER))
        if beside.dataloader is not None:
            loader = contents.state_dicts(beside.dataloader, LOADER)
            contents.of_state(own, LOADER, self._world.data_index, loader)
        if beside.extra is not None:
            contents.of_state(own, EXTRA, 0, beside.extra)
        return own

    def load(
        self, path: str | Path, optimizer: Optimizer | None, beside: Beside, *, allow_pickle: bool = False
    ) -> tuple[Mapping[str, Any], Any]:
        """Reads a folder in place: the progress and the extra that were saved.

        Raises:
            PlanError: the folder is no checkpoint, is damaged, is another one on some rank, or of another model; on all ranks
                alike. Everything is as it was.
        """
        is_new = optimizer is not None and make_state(optimizer)
        try:
            return self._load(Loading.begin(Path(path), self.meeting, allow_pickle=allow_pickle), optimizer, beside)
        except PlanError:
            if optimizer is not None and is_new:
                optimizer.state.clear()  # for who goes on without: what was made here has counted a step
            raise

    def _load(self, loading: Loading, optimizer: Optimizer | None, beside: Beside) -> tuple[Mapping[str, Any], Any]:
        fresh = self._without_states(loading, optimizer)
        named = [
            one
            for one in contents.tensors_of(self._held, optimizer)
            if not one[0].startswith("optimizer.") or one[0][10:].rpartition(".")[0] not in fresh
        ]
        untrained = self._untrained.targets() if loading.source.is_complete else []
        parts = [part_of(*one) for one in named]
        parts += [part_of(f"buffer.{name}", value) for name, value in self._buffers.named().items()]
        parts += [part_of(self._untrained.key(name), value) for name, value in untrained]
        values = loading.source.values
        saved = self._settings(values, optimizer)
        lacking = [f"optimizer.{h.key}.group" for h, _ in groups(self._held, optimizer)] if optimizer else []
        loading.check_holds([part.name for part in parts], [name for name in lacking if name[10:-6] not in saved])
        if optimizer is not None:  # before anything is changed
            check_groups(str(loading.path), self._held, optimizer, saved, self.meeting)
        loading.verify(parts)
        found = self._states(loading, beside)
        loading.put(parts)
        self._finish(named, untrained, loading)
        if optimizer is not None:
            put_groups(self._held, optimizer, saved, self.meeting)
            for h in self._held:
                if h.key in fresh:
                    optimizer.state.pop(h.parameter, None)
            self._put_numbers(optimizer, values)
        self._put_states(found, beside, loading)
        return values["progress"], found.get(EXTRA)

    def _without_states(self, loading: Loading, optimizer: Optimizer | None) -> set[str]:
        """Parameters that an optimizer of this kind had not stepped when it was saved: it begins with no states of them again."""
        saved = loading.source.values["optimizer"]
        if optimizer is None or saved.get("kind") != type(optimizer).__name__:
            return set()
        states_of = {name[10:].rpartition(".")[0] for name in loading.source.tensors if name.startswith("optimizer.")}
        return {key for key in saved["of"] if key not in states_of and key not in saved["numbers"]}

    def _settings(self, values: Mapping[str, Any], optimizer: Optimizer | None) -> dict[str, Settings]:
        if optimizer is None:
            return {}
        sets = [states.decode(one, _no_tensor) for one in values["optimizer"]["settings"]]
        return {key: sets[number] for key, number in values["optimizer"]["of"].items()}

    def _states(self, loading: Loading, beside: Beside) -> dict[str, Any]:
        """The states of schedulers, loaders and generators that are wanted, read."""
        rank, size = self._world.rank, self._world.mesh.world_size
        owners = {RANDOM: (rank, size), SCHEDULER: (rank, size), EXTRA: (0, 1)}
        owners[LOADER] = self._world.data_index, self._plan.mesh.data
        wanted = {RANDOM, EXTRA}
        wanted |= {
            kind for kind, one in ((SCHEDULER, beside.scheduler), (LOADER, beside.dataloader)) if one is not None
        }
        found: dict[str, Any] = {}
        failure: AutoparError | None = None
        for kind in sorted(wanted):
            try:
                encoded = state_of(loading.source.values, kind, *owners[kind])
                if encoded is not None:
                    found[kind] = states.decode(encoded, loading.tensor)
                elif kind in {SCHEDULER, LOADER}:
                    failure = PlanError(
                        f"The checkpoint has no state of a {kind}",
                        where=str(loading.path),
                        fix=f"Load without {kind}=, and set it to step par.step_count",
                    )
            except PlanError as error:
                if kind == RANDOM and not isinstance(error, CheckpointError):
                    _LOGGER.info("the generators of Python, numpy and torch go on as they are: %s", error.short)
                else:
                    failure = error
            except (ValueError, TypeError, KeyError, AttributeError) as error:
                failure = CheckpointError(
                    f"The state of the {kind} cannot be read",
                    where=str(loading.path),
                    got=f"{type(error).__name__}: {error}",
                    fix=f"Load without {kind}=, or from the checkpoint before this one",
                )
        loading.source.close()
        self.meeting.agree(failure)
        return found

    def _finish(
        self, named: Sequence[tuple[str, Tensor, Any]], untrained: list[tuple[str, Tensor]], loading: Loading
    ) -> None:
        for _, value, padding in named:
            if padding is not None:
                contents.padding_of(value, padding).zero_()
        if loading.source.is_complete:
            self._untrained.put(untrained)

    def _put_numbers(self, optimizer: Optimizer, values: Mapping[str, Any]) -> None:
        numbers = values["optimizer"]["numbers"]
        for h in self._held:
            for name, value in numbers.get(h.key, {}).items():
                optimizer.state[h.parameter][name] = states.decode(value, _no_tensor)

    def _put_states(self, found: Mapping[str, Any], beside: Beside, loading: Loading) -> None:
        failure: AutoparError | None = None
        try:
            if beside.scheduler is not None:
                contents.put_state_dicts(beside.scheduler, found[SCHEDULER])
            if beside.dataloader is not None:
                contents.put_state_dicts(beside.dataloader, found[LOADER])
            if RANDOM in found:  # after what may draw
                contents.put_random_states(found[RANDOM], self._world.device)
        except Exception as error:  # noqa: BLE001  code of the caller's, which the other ranks do not wait for
            failure = PlanError(
                "A state of the checkpoint does not fit the scheduler or the dataloader that was given",
                where=str(loading.path),
                got=f"{type(error).__name__}: {error}",
                fix="Make them as in the job that saved; the model and the optimizer are loaded",
            )
        self.meeting.agree(failure)


def _no_tensor(name: str) -> Tensor:
    raise ValueError(f"{name} is a tensor")
