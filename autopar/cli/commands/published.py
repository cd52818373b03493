"""``autopar published``: published layouts beside autopar's plans."""

from __future__ import annotations

from typing import Annotated

import typer

from autopar.cli.console import print_json, print_text, progress
from autopar.cli.options import Json, Space

Name = Annotated[str | None, typer.Argument(metavar="NAME|FILE", help="A shipped layout, or a TOML file of one.")]


def published(name: Name = None, space: Space = "default", as_json: Json = False) -> None:
    """List published layouts, or search a plan for the model and cluster of one and print it beside the layout."""
    from autopar.planner.branch_and_bound.process_group import cores
    from autopar.planner.space.space import load_space
    from autopar.questions import answers_as_text as text
    from autopar.questions.published_layouts import load_study, run_study, study_files

    if name is None:
        studies = [load_study(shipped) for shipped in study_files()]
        if as_json:
            print_json(text.list_summary(studies))
        else:
            print_text(text.render_list(studies))
        return
    found = load_study(name)
    load_space(space)  # what is wrong with it is said before the model is traced
    with progress("reading the study") as advance:
        result = run_study(found, space=space, progress=advance, workers=cores())
    if as_json:
        print_json(text.study_summary(result))
    else:
        print_text(text.render_result(result))
