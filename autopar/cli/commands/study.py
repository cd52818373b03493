"""``autopar study``: published layouts beside ours."""

from __future__ import annotations

from typing import Annotated

import typer

from autopar.cli.console import print_json, print_text, progress
from autopar.cli.options import Json

study = typer.Typer(
    help="Published layouts as problems: our plan beside theirs under the same cost model.",
    no_args_is_help=True,
    rich_markup_mode=None,
)


@study.command("list")
def list_studies(as_json: Json = False) -> None:
    """List the studies that are shipped."""
    from autopar.questions.published_as_text import render_list
    from autopar.questions.published_layouts import load_study, study_files

    found = [load_study(name) for name in study_files()]
    if as_json:
        print_json({s.name: {"title": s.title, "source": s.source, "cluster": s.cluster} for s in found})
    else:
        print_text(render_list(found))


@study.command("run")
def run(
    name: Annotated[str, typer.Argument(metavar="NAME|FILE", help="A shipped study, or a TOML file of one.")],
    space: Annotated[str, typer.Option(metavar="NAME|FILE", help="What our plan may choose.")] = "default",
    as_json: Json = False,
) -> None:
    """Search a plan for a study, and print it beside the published layout."""
    from autopar.planner.branch_and_bound.process_group import cores
    from autopar.planner.space.space import load_space
    from autopar.questions.published_as_text import render_result, study_summary
    from autopar.questions.published_layouts import load_study, run_study

    found = load_study(name)
    load_space(space)  # what is wrong with it is said before the model is traced
    with progress("reading the study") as advance:
        result = run_study(found, space=space, progress=advance, workers=cores())
    if as_json:
        print_json(study_summary(result))
    else:
        print_text(render_result(result))
