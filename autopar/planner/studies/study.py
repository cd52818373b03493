"""The ledger of a search as an Optuna study: in any storage, shared by processes and machines, shown by optuna-dashboard.

A trial is a candidate, and its state says how far the candidate is. WAITING: experts would try it, and no search has reached it. RUNNING: a
search evaluates it. COMPLETE: its value is the step time in seconds. PRUNED: it was left unfinished, and its value is a lower bound in
seconds. FAIL: it has no plan, for the reason given, or its search was interrupted.

A dead search leaves a RUNNING trial, which another search takes over. If both end it, the first result stays; both evaluated the same.
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
"""The prefix of the URL of a journal file."""

LOCK_TIMEOUT_S = 60.0
"""Seconds to wait for the lock of an SQLite file, which others hold for milliseconds."""

_ATTEMPTS = 3
"""The number of attempts to open a storage: processes that create its tables at the same moment fail."""


def open_storage(url: str, *, durable: bool = True) -> BaseStorage:
    """Return the storage of a URL.

    Args:
        url: ``sqlite:///study.db``, ``postgresql://user@host/database``, another URL of SQLAlchemy, or ``journal:///study.log``, a file that
            may lie on a network file system.
        durable: False for an SQLite file that need not survive a crash of the machine; killed processes do not harm it.

    Raises:
        UsageError: the storage cannot be opened.
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
    """Turn errors of the storage into one with a remedy.

    Raises:
        UsageError: the storage failed within the ``with`` block.
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
        # Connecting takes less time than an evaluation, and a server has few connections for many workers that rarely need one.
        options["poolclass"] = NullPool
    if parsed.get_backend_name() == "sqlite":
        options["connect_args"] = {"timeout": LOCK_TIMEOUT_S}
        if not durable:
            options["creator"] = partial(_quick_connection, parsed.database)
    return RDBStorage(parsed.render_as_string(hide_password=False), engine_kwargs=options)


def _quick_connection(path: str | None) -> sqlite3.Connection:
    """Return a connection to a file whose writes do not wait for the disk, which would take most of the time of a trial."""
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
"""The parameters of a trial. They identify a candidate: no two candidates of a pool have equal ones."""

Value = int | str
_INTERRUPTED = "interrupted"
_PREFIX = "autopar "
"""The prefix of the study's attributes that identify its task."""


class StudyLedger:
    """The ledger of a fixed pool of candidates, as a study.

    Args:
        storage, durable: see :func:`autopar.planner.studies.study.open_storage`.
        name: the study's name; a study that exists is continued.
        identity: what its times depend on, by name.

    Raises:
        UsageError: the storage cannot be opened, or the study of that name has another identity.
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
        self._running: dict[int, list[int]] = {}  # numbers of the RUNNING trials, by candidate
        self._waiting: dict[int, list[int]] = {}  # numbers of the WAITING trials, by candidate
        self._seen: set[int] = set()
        self._claimed: dict[int, list[int]] = {}  # ids of the trials that this search has claimed, by candidate
        self._begun: set[int] = set()  # candidates whose trial this search has begun, not taken over
        self._read: set[int] = set()  # numbers of the finished trials that were read
        self._who = f"{socket.gethostname()}:{os.getpid()}"
        self.storage = open_storage(storage, durable=durable)
        with answering(self.url):
            optuna.create_study(study_name=name, storage=self.storage, load_if_exists=True, direction="minimize")
            self.id = self.storage.get_study_id_from_name(name)
            self._check_identity(identity)

    def _check_identity(self, identity: Mapping[str, str]) -> None:
        """Write the identity into a new study, or compare it with that of an existing one.

        Raises:
            UsageError: the identities differ; the message names where.
        """
        attributes = self.storage.get_study_user_attrs(self.id)
        for key, text in identity.items():
            if _PREFIX + key not in attributes:
                self.storage.set_study_user_attr(self.id, _PREFIX + key, text)
        attributes = self.storage.get_study_user_attrs(self.id)
        differing = [key for key, text in identity.items() if attributes[_PREFIX + key] != text]
        if differing:
            raise UsageError(
                f"The study '{self.name}' was made with other {', '.join(differing)}",
                where="--study-name",
                fix="Take another name, or leave it out: then the name says what the study is of",
            )

    def close(self) -> None:
        """Close the connections to the storage."""
        self.storage.remove_session()

    # --- the ledger

    def expect(self, seeds: Mapping[int, str]) -> None:
        """Enqueue candidates, each once in a study, as trials that wait.

        Their order has no meaning: a trial is claimed when the search reaches its candidate (``docs/adr/0019-samplers.md``).
        """
        self.read()
        with answering(self.url):
            for index, why in seeds.items():
                if index not in self._seen:
                    values = dict(self._params[index])
                    trial = create_trial(
                        state=TrialState.WAITING,
                        params=values,
                        distributions=self._distributions,
                        user_attrs={"candidate": str(self.pool[index]), "rule": why},
                        system_attrs={"fixed_params": values},
                    )
                    self.storage.create_new_trial(self.id, trial)

    def finish(self, excluded_s: Callable[[int], float | None]) -> None:
        """End the waiting trials of candidates that have a result or are excluded, and the trials that dead searches left of those with a result."""
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
        """Read the trials that other searches have begun or ended."""
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
                self._keep(index, _result(trial))
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
            self._claimed[index] = [self._id(n) for n in (*numbers, *waiting)]
            steps = {0: bound_s} if math.isfinite(bound_s) else {}
            for trial in self._claimed[index][len(numbers) :]:
                self._begin(trial, index, steps)
            if self._claimed[index]:
                return
            attributes = {"candidate": str(self.pool[index]), "by": self._who}
            self._claimed[index] = [self._new(index, TrialState.RUNNING, attributes=attributes, steps=steps)]
            self._begun.add(index)

    def release(self, index: int) -> None:
        """End the trial as interrupted if this search has begun it; one that was taken over stays open."""
        trials = self._claimed.pop(index, [])
        if index in self._begun:
            with answering(self.url):
                self._end(trials, TrialState.FAIL, None, {"reason": _INTERRUPTED})

    def record(self, index: int, result: Result) -> None:
        """End the trial with a result; if it was already ended without a result, add a new trial."""
        state, value, attributes = _written(result)
        with answering(self.url):
            if not self._end(self._claimed.pop(index), state, value, attributes):
                self.read()
                known = self.results.get(index)
                if known is None or (result.at_least_s is None and known.at_least_s is not None):
                    origin = {"candidate": str(self.pool[index]), "by": self._who}
                    self._new(index, state, value=value, attributes={**origin, **attributes})
        self._keep(index, result)

    def _keep(self, index: int, result: Result | None) -> None:
        """Keep the more informative of two results: the first that is no lower bound, else the largest lower bound."""
        current = self.results.get(index)
        if result is None or (current is not None and current.at_least_s is None):
            return
        if current is None or result.at_least_s is None or result.at_least_s > (current.at_least_s or 0.0):
            self.results[index] = result
        if result.time_s is not None:
            self.incumbent_s = min(self.incumbent_s, result.time_s)

    # --- trials

    def _id(self, number: int) -> int:
        return self.storage.get_trial_id_from_study_id_trial_number(self.id, number)

    def _begin(self, trial: int, index: int, steps: Mapping[int, float]) -> None:
        """Begin a waiting trial; if another search was faster, it is taken over from that one."""
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
        """End trials and return whether one of them was still open."""
        ended = False
        for trial in trials:
            with suppress(UpdateFinishedTrialError):
                for key, text in attributes.items():
                    self.storage.set_trial_user_attr(trial, key, text)
                self.storage.set_trial_state_values(trial, state, None if value is None else [value])
                ended = True
        return ended


def params(candidate: Candidate) -> dict[str, Value]:
    """Return the parameters of a candidate's trial, by the names of :data:`KEYS`."""
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
    """Return the result of a finished trial; None if it was interrupted."""
    attributes = trial.user_attrs
    if trial.state == TrialState.COMPLETE:
        return Result(time_s=trial.value, peak_memory_bytes=attributes.get("peak_memory_bytes", 0))
    if trial.state == TrialState.PRUNED:
        return Result(at_least_s=trial.value)
    if attributes.get("reason", _INTERRUPTED) == _INTERRUPTED:
        return None
    return Result(reason=attributes["reason"], needs_bytes=attributes.get("needs_bytes", 0))
