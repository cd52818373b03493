"""``autopar search``: the fastest plan."""

from __future__ import annotations

from typing import Annotated

import typer

from autopar.cli.make_plan import check_output, give, make_plan
from autopar.cli.options import Asked, asks

Trials = Annotated[int | None, typer.Option(min=1, metavar="N", help="At most so many trials.")]
Timeout = Annotated[float | None, typer.Option(min=0, metavar="S", help="At most so many seconds of search.")]
Storage = Annotated[
    str | None,
    typer.Option(
        metavar="URL",
        help="Optuna storage in which trials are kept, for a later search or other machines: sqlite:///study.db, "
        "postgresql://user@host/database, journal:///study.log.",
    ),
]
StudyName = Annotated[
    str | None,
    typer.Option("--study-name", metavar="NAME", help="Of the study in --storage, if not named by what it is of."),
]
Workers = Annotated[
    int | None,
    typer.Option(
        min=1,
        metavar="N",
        help="Processes; the plan is the same for any number. If not given, as many as cores, at most 4; with --storage 1.",
    ),
]
Sampler = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="tpe, cmaes or nsga2 asks for a part of the candidates, none for nothing; if not given, as the space says.",
    ),
]
SamplerSeed = Annotated[int, typer.Option("--sampler-seed", min=0, metavar="N", help="Of the sampler's numbers.")]


@asks()
def search(
    asked: Asked,
    trials: Trials = None,
    timeout: Timeout = None,
    storage: Storage = None,
    study_name: StudyName = None,
    workers: Workers = None,
    sampler: Sampler = None,
    sampler_seed: SamplerSeed = 0,
) -> None:
    """Find the fastest plan that fits; exits with 3 and names the conflict when there is none."""
    from autopar.planner.branch_and_bound.process_group import cores

    check_output(asked.output)
    plan = make_plan(
        "search",
        asked,
        trials=trials,
        search_timeout_s=timeout,
        max_step_time_s=asked.max_step_time,
        storage=storage,
        study_name=study_name,
        workers=workers or (cores() if storage is None else 1),
        sampler=sampler,
        sampler_seed=sampler_seed,
    )
    give(plan, asked.output, asked.as_json)
