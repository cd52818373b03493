"""The folder of a checkpoint: what is written becomes a checkpoint in one step, in place of the one before it, or not at all.

A save writes into a folder of its own: beside the target, and renamed, where that is not there yet; inside of it where it is. Then
its data files, whose names no earlier save has had, are moved, and a rename puts its index in place of the old one: at no moment is
there none, or one without its files. What a save leaves that was killed is removed by the next one.
"""

from __future__ import annotations

import os
import re
import shutil
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from autopar.runtime.checkpoint.checkpoint_index import FILE, NAME, PLAN

_INSIDE = ".saving"
_OLD = re.compile(r"\.metadata|\.metadata\.tmp|__\d+_.*\.distcp")
"""Files of checkpoints before version 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """Where a save goes; rank 0 decides, and tells the others.

    Attributes:
        is_there: the folder is there already, with a checkpoint or with something else.
        generation: part of the names of its data files.
    """

    is_there: bool = False
    generation: int = 0


def look(folder: Path) -> Target:
    """What is there; an empty folder counts as none."""
    if not folder.is_dir():
        return Target()
    names = [path.name for path in folder.iterdir() if path.name != _INSIDE]
    found = [int(match[1]) for match in map(FILE.fullmatch, names) if match is not None]
    return Target(is_there=bool(names) or _is_mount(folder), generation=max(found, default=-1) + 1)


def _is_mount(folder: Path) -> bool:
    with suppress(OSError):
        return folder.is_mount()
    return False


def staging(folder: Path, target: Target) -> Path:
    """Where the files of a save are written first."""
    return folder / _INSIDE if target.is_there else folder.with_name(f".{folder.name}{_INSIDE}")


def begin(folder: Path, target: Target) -> None:
    """Removes what a save has left that was killed; called by rank 0.

    Raises:
        OSError: it cannot.
    """
    for path in (folder / _INSIDE, folder.with_name(f".{folder.name}{_INSIDE}")):
        if path.is_dir():
            shutil.rmtree(path)
    staging(folder, target).mkdir(parents=True)


def give_up(folder: Path, target: Target, *, own: str, is_first: bool) -> None:
    """After a save that has failed: removes its files, this rank's ``own`` or all, so that they do not fill a disk without room."""
    place = staging(folder, target)
    with suppress(OSError):
        (place / own).unlink()
    if is_first:
        shutil.rmtree(place, ignore_errors=True)
    with suppress(OSError):  # of a rank that was given another folder than the first
        place.rmdir()


def write(path: Path, data: bytes) -> None:
    """Writes a file through to the disk.

    Raises:
        OSError: it cannot be written.
    """
    with path.open("xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def commit(folder: Path, target: Target) -> None:
    """Makes what has been written the checkpoint of the folder; called by rank 0 after all have written.

    Raises:
        OSError: it cannot; what was there is as it was.
    """
    place = staging(folder, target)
    _sync(place)
    if not target.is_there:
        place.rename(folder)
        _sync(folder.parent)
        return
    names = {path.name for path in place.iterdir()}
    for name in sorted(names - {NAME, PLAN}):
        (place / name).rename(folder / name)
    _sync(folder)
    (place / NAME).replace(folder / NAME)
    _sync(folder)
    with suppress(OSError):  # the checkpoint is complete without that: its index has the plan, too
        (place / PLAN).replace(folder / PLAN)
        for path in folder.iterdir():
            if (FILE.fullmatch(path.name) or _OLD.fullmatch(path.name)) and path.name not in names:
                path.unlink()
        place.rmdir()


def _sync(folder: Path) -> None:
    """Writes through to the disk which files a folder has, where that can be asked for."""
    with suppress(OSError):
        number = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(number)
        finally:
            os.close(number)
