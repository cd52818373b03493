"""The ledger of a search as an Optuna study: in any storage, shared by processes and machines, seen in optuna-dashboard.

A trial is a candidate: WAITING where experts would try it and no search has come to it, RUNNING while a search evaluates it, COMPLETE with
the seconds of a step, PRUNED with the seconds that it takes at least where it was left unfinished, FAIL with the reason where it has no
plan or its search was interrupted. A dead search leaves a RUNNING trial, which another takes over. Whoever tells of a trial first is right:
both evaluated the same.
"""

from __future__ import annotations

import math
import os
import socket
import sqlite3
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from importlib.util import find_spec
from json import JSONDecodeError
from typing import Any

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution
from optuna.exceptions import UpdateFinishedTrialError
from optuna.storages import BaseStorage, JournalStorage, RDBStorage, get_storage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import FrozenTrial, TrialState, create_trial
from sqlalchemy.engine import make_url
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.pool import NullPool

from autopar.errors import UsageError
from autopar.planner.branch_and_bound.frontier import Result
from autopar.planner.space.candidates import Candidate

JOURNAL = "journal:///"
LOCK_TIMEOUT_S = 60.0
"""How long a process waits for the lock of an SQLite file, which others hold for milliseconds."""

_ATTEMPTS = 3
"""Of opening a storage: processes that make its tables at the same moment get into each other's way."""


def open_storage(url: str, *, durable: bool = True) -> BaseStorage:
    """The storage behind an URL.

    Args:
        url: ``sqlite:///study.db``, ``postgresql://user@host/database``, another one that SQLAlchemy knows, or
            ``journal:///study.log``, a file that may lie on a network file system.
        durable: False for an SQLite file that need not survive the machine: killed processes alone do not harm it.

    Raises:
        UsageError: it cannot be opened.
    """
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    for attempt in range(_ATTEMPTS):
        try:
            with answering(url):
                if url.startswith(JOURNAL):
                    return JournalStorage(JournalFileBackend(url.removeprefix(JOURNAL)))
                return get_storage(_database(url, durable=durable))
        except UsageError as error:
            if attempt + 1 == _ATTEMPTS or "exists" not in str(error):
                raise
    raise AssertionError("the last attempt returns or raises")


@contextmanager
def answering(url: str) -> Iterator[None]:
    """Errors of the storage as one that says what to do.

    Raises:
        UsageError: instead of them.
    """
    try:
        yield
    except (SQLAlchemyError, ImportError, OSError, JSONDecodeError, optuna.exceptions.StorageInternalError) as error:
        cause = error.__cause__ if isinstance(error, optuna.exceptions.StorageInternalError) else error
        raise UsageError(
            f"Cannot open the storage '{_shown(url)}'",
            where="--storage",
            got=str(cause or error).strip().splitlines()[0],
            fix="Write for example sqlite:///study.db, postgresql://user@host/database or journal:///study.log",
        ) from error


def _database(url: str, *, durable: bool) -> RDBStorage:
    parsed = make_url(url)
    if parsed.drivername in ("postgresql", "postgres", "postgresql+psycopg"):
        if find_spec("psycopg") is None:
            raise UsageError.missing(
                "package psycopg, which PostgreSQL needs",
                where="--storage",
                fix="Run: pip install 'autopar[postgresql]'",
            )
        parsed = parsed.set(drivername="postgresql+psycopg")
    options: dict[str, Any] = {}
    if parsed.database not in (None, "", ":memory:"):
        # evaluations take longer than to connect, and a server has few connections for many workers that are busy elsewhere
        options["poolclass"] = NullPool
    if parsed.get_backend_name() == "sqlite":
        options["connect_args"] = {"timeout": LOCK_TIMEOUT_S}
        if not durable:
            options["creator"] = partial(_quick_connection, parsed.database)
    return RDBStorage(parsed.render_as_string(hide_password=False), engine_kwargs=options)


def _quick_connection(path: str | None) -> sqlite3.Connection:
    """To a file whose writes do not wait for the disk, which takes most of the time of a trial."""
    connection = sqlite3.connect(path or ":memory:", timeout=LOCK_TIMEOUT_S, check_same_thread=False)
    connection.execute("PRAGMA synchronous=OFF")
    return connection


def _shown(url: str) -> str:
    try:
        return make_url(url).render_as_string(hide_password=True)
    except SQLAlchemyError:
        return url


KEYS = (
    *("pp", "dp_shard", "cp", "tp", "ep_data", "micro_batch", "zero", "schedule"),
    *("groups", "offload", "vocab_multiple"),
)
Value = int | str
_INTERRUPTED = "interrupted"
_PLACE = "autopar "
"""Begins the names of the study's attributes that say what it is of."""


class Study:
    """A study over a fixed pool of candidates.

    Args:
        storage, durable: see :func:`autopar.planner.studies.study.open_storage`.
        name: of the study; one that exists is gone on with.
        identity: what its times depend on, by name.

    Raises:
        UsageError: the storage cannot be opened; a study of that name is of something else.
    """

    is_shared = True

    def __init__(
        self, pool: Sequence[Candidate], *, storage: str, name: str, identity: Mapping[str, str], durable: bool = True
    ) -> None:
        self.url, self.name = storage, name
        self.pool = tuple(pool)
        self.results: dict[int, Result] = {}
        self.incumbent_s = math.inf
        self._params = [params(candidate) for candidate in self.pool]
        self._index = {tuple(p.values()): i for i, p in enumerate(self._params)}
        self._distributions: dict[str, BaseDistribution] = {
            key: CategoricalDistribution(sorted({p[key] for p in self._params}, key=str)) for key in KEYS
        }
        self._running: dict[int, list[int]] = {}  # candidates, with the numbers of their open trials
        self._waiting: dict[int, list[int]] = {}  # candidates that experts would try, likewise
        self._seen: set[int] = set()
        self._mine: dict[int, list[int]] = {}  # candidates that this search evaluates, with the ids of those trials
        self._begun: set[int] = set()  # those whose trial is this search's own
        self._read: set[int] = set()
        self._who = f"{socket.gethostname()}:{os.getpid()}"
        self.storage = open_storage(storage, durable=durable)
        with answering(self.url):
            optuna.create_study(study_name=name, storage=self.storage, load_if_exists=True, direction="minimize")
            self.id = self.storage.get_study_id_from_name(name)
            self._introduce(identity)

    def _introduce(self, identity: Mapping[str, str]) -> None:
        """Say what the study is of, or check that it is of the same.

        Raises:
            UsageError: names what differs.
        """
        known = self.storage.get_study_user_attrs(self.id)
        for key, text in identity.items():
            if _PLACE + key not in known:
                self.storage.set_study_user_attr(self.id, _PLACE + key, text)
        known = self.storage.get_study_user_attrs(self.id)
        other = [key for key, text in identity.items() if known[_PLACE + key] != text]
        if other:
            raise UsageError(
                f"The study '{self.name}' was made with other {', '.join(other)}",
                where="--study-name",
                fix="Take another name, or leave it out: then the name says what the study is of",
            )

    def close(self) -> None:
        """Give up the connections to the storage."""
        self.storage.remove_session()

    # --- the ledger

    def expect(self, seeds: Mapping[int, str]) -> None:
        """Enqueue candidates, each once in a study: whoever comes to one takes that trial.

        Their order says nothing: a trial is taken when its candidate is asked for (``docs/adr/0019-samplers.md``).
        """
        self.read()
        with answering(self.url):
            for index, why in seeds.items():
                if index not in self._seen:
                    own = dict(self._params[index])
                    trial = create_trial(
                        state=TrialState.WAITING,
                        params=own,
                        distributions=self._distributions,
                        user_attrs={"candidate": str(self.pool[index]), "rule": why},
                        system_attrs={"fixed_params": own},
                    )
                    self.storage.create_new_trial(self.id, trial)

    def finish(self, excluded_s: Callable[[int], float | None]) -> None:
        """End trials that wait, or that somebody dead has begun, of candidates that are decided."""
        self.read()
        for open_ in (self._waiting, self._running):
            for index, numbers in open_.items():
                result = self.results.get(index)
                if result is None and open_ is self._waiting and (least_s := excluded_s(index)) is not None:
                    no_layout = Result(reason="memory: fits in no layout, by a bound")
                    result = Result(at_least_s=least_s) if math.isfinite(least_s) else no_layout
                if result is not None:
                    with answering(self.url):
                        self._end([self._id(n) for n in numbers], *_written(result))

    def read(self) -> None:
        """Take in what others have written."""
        with answering(self.url):
            trials = self.storage.get_all_trials(self.id, deepcopy=False)
        self._running, self._waiting = {}, {}
        for trial in trials:
            index = self._index.get(tuple(trial.params.get(key, "") for key in KEYS))
            if index is None or trial.number in self._read:
                continue
            self._seen.add(index)
            if trial.state.is_finished():
                self._read.add(trial.number)
                self._take(index, _result(trial))
            elif trial.state == TrialState.RUNNING:
                self._running.setdefault(index, []).append(trial.number)
            else:
                self._waiting.setdefault(index, []).append(trial.number)

    def is_claimed(self, index: int) -> bool:
        return index in self._running

    def claim(self, index: int, bound_s: float) -> None:
        """Begin the trial of a candidate, or take over the one that another search has begun."""
        with answering(self.url):
            numbers, waiting = self._running.get(index, ()), self._waiting.pop(index, ())
            self._mine[index] = [self._id(n) for n in (*numbers, *waiting)]
            steps = {0: bound_s} if math.isfinite(bound_s) else {}
            for trial in self._mine[index][len(numbers) :]:
                self._take_up(trial, index, steps)
            if self._mine[index]:
                return
            attributes = {"candidate": str(self.pool[index]), "by": self._who}
            self._mine[index] = [self._new(index, TrialState.RUNNING, attributes=attributes, steps=steps)]
            self._begun.add(index)

    def release(self, index: int) -> None:
        """End the trial without an outcome; one that another search has begun is left to it."""
        trials = self._mine.pop(index, [])
        if index in self._begun:
            with answering(self.url):
                self._end(trials, TrialState.FAIL, None, {"reason": _INTERRUPTED})

    def record(self, index: int, result: Result) -> None:
        """End the trial; where another search has ended it without an outcome, a new one."""
        state, value, attributes = _written(result)
        with answering(self.url):
            if not self._end(self._mine.pop(index), state, value, attributes):
                self.read()
                known = self.results.get(index)
                if known is None or (result.at_least_s is None and known.at_least_s is not None):
                    more = {"candidate": str(self.pool[index]), "by": self._who}
                    self._new(index, state, value=value, attributes={**more, **attributes})
        self._take(index, result)

    def _take(self, index: int, result: Result | None) -> None:
        """Keep the outcome that says more: the first one that is not a bound, or else the largest bound."""
        before = self.results.get(index)
        if result is None or (before is not None and before.at_least_s is None):
            return
        if before is None or result.at_least_s is None or result.at_least_s > (before.at_least_s or 0.0):
            self.results[index] = result
        if result.time_s is not None:
            self.incumbent_s = min(self.incumbent_s, result.time_s)

    # --- trials

    def _id(self, number: int) -> int:
        return self.storage.get_trial_id_from_study_id_trial_number(self.id, number)

    def _take_up(self, trial: int, index: int, steps: Mapping[int, float]) -> None:
        """Begin a trial that waits; where another search was quicker, it is taken over from it."""
        with suppress(UpdateFinishedTrialError):
            if self.storage.set_trial_state_values(trial, TrialState.RUNNING):
                self._begun.add(index)
                self.storage.set_trial_user_attr(trial, "by", self._who)
                for step, bound_s in steps.items():
                    self.storage.set_trial_intermediate_value(trial, step, bound_s)

    def _new(
        self,
        index: int,
        state: TrialState,
        *,
        value: float | None = None,
        attributes: Mapping[str, str | int],
        steps: Mapping[int, float] | None = None,
    ) -> int:
        trial = create_trial(
            state=state,
            value=value,
            params=dict(self._params[index]),
            distributions=self._distributions,
            user_attrs=dict(attributes),
            intermediate_values=dict(steps or {}),
        )
        return self.storage.create_new_trial(self.id, trial)

    def _end(
        self, trials: Sequence[int], state: TrialState, value: float | None, attributes: Mapping[str, str | int]
    ) -> bool:
        """Whether one of them was still open."""
        ended = False
        for trial in trials:
            with suppress(UpdateFinishedTrialError):
                for key, text in attributes.items():
                    self.storage.set_trial_user_attr(trial, key, text)
                self.storage.set_trial_state_values(trial, state, None if value is None else [value])
                ended = True
        return ended


def params(candidate: Candidate) -> dict[str, Value]:
    """A candidate by the names of :data:`KEYS`: no two of a pool have equal ones."""
    return {
        "pp": candidate.mesh.pp,
        "dp_shard": candidate.mesh.dp_shard,
        "cp": candidate.mesh.cp,
        "tp": candidate.mesh.tp,
        "ep_data": candidate.mesh.ep_data,
        "micro_batch": candidate.micro_batch_size,
        "zero": candidate.zero_stage,
        "schedule": f"{candidate.schedule} v={candidate.virtual_stages}",
        "groups": ("-".join(map(str, candidate.order)) or "in order") + _shares(candidate),
        "offload": ", ".join(candidate.on_host) or "none",
        "vocab_multiple": candidate.vocab_multiple,
    }


def _shares(candidate: Candidate) -> str:
    return f", {'-'.join(map(str, candidate.shares))} samples" if candidate.shares else ""


def _written(result: Result) -> tuple[TrialState, float | None, dict[str, str | int]]:
    if result.time_s is not None:
        return TrialState.COMPLETE, result.time_s, {"peak_memory_bytes": result.peak_memory_bytes}
    if result.at_least_s is not None:
        return TrialState.PRUNED, result.at_least_s, {"reason": f"takes {result.at_least_s:.4g} s or more"}
    return TrialState.FAIL, None, {"reason": result.reason, "needs_bytes": result.needs_bytes}


def _result(trial: FrozenTrial) -> Result | None:
    """What a finished trial says; None for one that was interrupted."""
    attributes = trial.user_attrs
    if trial.state == TrialState.COMPLETE:
        return Result(time_s=trial.value, peak_memory_bytes=attributes.get("peak_memory_bytes", 0))
    if trial.state == TrialState.PRUNED:
        return Result(at_least_s=trial.value)
    if attributes.get("reason", _INTERRUPTED) == _INTERRUPTED:
        return None
    return Result(reason=attributes["reason"], needs_bytes=attributes.get("needs_bytes", 0))
