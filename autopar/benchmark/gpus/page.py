"""The page of ``make gpus``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from autopar.benchmark.machine_facts import facts_text
from autopar.util.units import seconds

_HEAD = """# Plans on {ranks} ranks of one machine

Written by `make gpus`; do not edit. {facts}

Each plan trains a small model for three steps of AdamW, and so does one device: the largest relative difference of a loss, and of
a parameter over the parameter's largest element. Step: the median of a few more steps of the slowest rank. Waits: how often the
host of a rank waits for its device in a step. Models are small so that any GPU runs them: hosts are what their steps take.

| plan | mesh | loss off by | parameter off by | right | step | predicted | waits |
|---|---|--:|--:|---|--:|--:|---|
"""


def page(found: Mapping[str, Any]) -> str:
    """Markdown of what :func:`autopar.benchmark.gpus.__main__.run` found."""
    lines = [_HEAD.format(ranks=found["ranks"], facts=facts_text(found["machine"])).rstrip("\n")]
    for name, row in found.get("trainings", {}).items():
        if "failure" in row:
            lines.append(f"| {name} | | | | failed | | | |")
            continue
        syncs = [count for count in row["syncs"] if count is not None]
        cells = [
            name, row["mesh"], f"{row['loss_error']:.1e}", f"{row['parameter_error']:.1e}", "yes" if row["is_right"] else "no",
            seconds(row["step_s"]), seconds(row["predicted_s"]), str(max(syncs)) if syncs else "",
        ]  # fmt: skip
        lines.append("| " + " | ".join(cells) + " |")
    for name, row in found.get("trainings", {}).items():
        if "failure" in row:
            lines += ["", f"{name}:", "", "```", row["failure"].replace("```", "'''"), "```"]
    if "links" in found:
        lines += ["", "## Links", "", found["links"]]
    if "failure" in found:
        lines += ["", "## A failure on purpose", "", found["failure"]["said"]]
    return "\n".join(lines) + "\n"
