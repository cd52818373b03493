"""Runs of files predicted, and what came of it: the answer of ``autopar validate``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from autopar.hardware.read import MachineProfile, profile_to_dict
from autopar.planner.task import Progress
from autopar.util.files import as_toml
from autopar.validate.report import failures, markdown, parameters_table, worst
from autopar.validate.robust_fit import Fit
from autopar.validate.runs import read_rows
from autopar.validate.scores import Outcome, calibrate, evaluate, write_profile
from autopar.validate.session import Session, predictable


@dataclass(frozen=True, slots=True, kw_only=True)
class Validation:
    """What the runs of some files were predicted to take.

    Attributes:
        session: the runs, under the profiles that they were predicted by.
        num_rows: of the files, those that could not be predicted among them.
        fit: of the profiles' numbers; None where profiles are as they are.
        profiles: those that were fitted, by name.
    """

    session: Session
    outcome: Outcome
    num_rows: int
    fit: Fit | None = None
    profiles: Mapping[str, MachineProfile] = field(default_factory=dict)

    def to_dict(self, *, with_profiles: bool) -> dict[str, Any]:
        """As JSON values."""
        fitted = {name: profile_to_dict(profile) for name, profile in self.profiles.items()}
        return self.outcome.to_dict(self.session) | ({"profiles": fitted} if with_profiles and fitted else {})

    def text(self, *, with_profiles: bool) -> str:
        """Scores, what was fitted, what is missed most, what failed, and the profiles as their files."""
        shown = [markdown(self.outcome.scores)]
        if self.fit is not None:
            shown.append(parameters_table(self.fit.values, self.session.start, self.fit.num_seen))
        shown.append(
            "Missed most:\n\n" + "\n".join(f"- {line}" for line in worst(self.session.runs, self.outcome.predictions))
        )
        missing = failures(self.outcome.failed, self.num_rows)
        shown += ["\n".join(missing)] if missing else []
        if with_profiles:
            shown += [as_toml(profile_to_dict(p), comment=f"{name}.toml") for name, p in self.profiles.items()]
        return "\n\n".join(shown)

    def write_profiles(self, folder: Path) -> list[Path]:
        """Each in a file of its name; gives the files."""
        paths = {folder / f"{name}.toml": profile for name, profile in self.profiles.items()}
        for path, profile in paths.items():
            write_profile(profile, path)
        return list(paths)


def validated(
    files: Sequence[Path], *, sources: Sequence[str] = (), leave_one_out: bool = False, progress: Progress
) -> Validation:
    """The runs of some files, predicted.

    Args:
        sources: to which profiles are fitted before; none: they are as they are.
        leave_one_out: each source is predicted with parameters that are fitted to the others.

    Raises:
        UsageError: a file that cannot be read, or a source of no run.
    """
    rows = tuple(row for path in files for row in read_rows(path))
    session, failed = predictable(rows, place=", ".join(map(str, files)), progress=progress)
    fit: Fit | None = None
    profiles: Mapping[str, MachineProfile] = {}
    if sources:
        profiles, fit, fitted = calibrate(session, sources)
        devices = {session.runs[i].device for i in fitted}
        session = session.under({d: profiles[session.profiles[d].device.name] for d in devices})
    outcome = evaluate(session, leave_one_out=leave_one_out, failed=failed)
    return Validation(session=session, outcome=outcome, num_rows=len(rows), fit=fit, profiles=profiles)
