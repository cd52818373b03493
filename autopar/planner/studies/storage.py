"""Optuna storages by URL: SQLite, PostgreSQL and whatever else SQLAlchemy knows, or a journal file."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from importlib.util import find_spec
from json import JSONDecodeError
from typing import Any

import optuna
from optuna.storages import BaseStorage, JournalStorage, RDBStorage, get_storage
from optuna.storages.journal import JournalFileBackend
from sqlalchemy.engine import make_url
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.pool import NullPool

from autopar.errors import UsageError

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
