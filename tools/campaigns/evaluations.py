"""Whether evaluations are those of ``model.eval()``: the model types of :mod:`tools.campaigns.others`, with their dropout, on one rank.

``python -m tools.campaigns.evaluations [--page docs/evidence/evaluations.md] [TYPE ...]``. Of each type the loss of ``par.evaluate`` is held
against that of the model in ``eval()``, before any step, and the loss of a training step stands beside them.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import warnings
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import torch

import autopar
from autopar.models.resolve import USER_FAILURES
from autopar.ops.opaque import pick_loss
from tools.campaigns.models import said
from tools.campaigns.others import subject_of
from tools.campaigns.types import TYPES
from tools.revision import revision

SAMPLES = 4
TOLERANCE = 1e-5
"""Relative, of losses in float32."""

LIMIT_S = 300.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """Of one type: losses of the plan, of the model in ``eval()`` (twice, as it may draw random numbers) and of training; or why there are none."""

    evaluated: float = 0.0
    alone: tuple[float, float] = (0.0, 0.0)
    trained: float = 0.0
    replaced: int = 0
    error: str = ""

    @property
    def verdict(self) -> str:
        """``right``, ``wrong``, ``draws`` (no two evaluations are alike), or ``refused`` by the plan or before it is made."""
        if self.error:
            return "refused" if "cannot be evaluated" in self.error else "no plan"
        first, second = self.alone
        if abs(first - second) > TOLERANCE * abs(first):
            return "draws"
        return "right" if abs(self.evaluated - first) <= TOLERANCE * abs(first) else "wrong"


def evaluated(kind: str) -> Found:
    """Return what is found of one type."""
    subject = subject_of(kind)
    batch, model = subject.make_batch(SAMPLES, seed=0), subject.build(drops=True)
    parallel = autopar.parallelize(
        model, example_inputs=batch, cluster="cpu:1x1", global_batch_size=SAMPLES, precision="fp32"
    )
    alone = subject.build(drops=True).eval()
    with torch.no_grad():
        losses = [pick_loss(alone(**batch), kind).item() for _ in range(2)]
    loss = parallel.evaluate(batch).item()
    evaluation = parallel._program.graph.evaluation
    trained = parallel.train_step(batch).item()
    return Found(
        evaluated=loss,
        alone=(losses[0], losses[1]),
        trained=trained,
        replaced=len(evaluation.replaced) if evaluation else 0,
    )


def _child(pipe: Connection, kind: str) -> None:
    warnings.simplefilter("ignore")
    try:
        pipe.send(evaluated(kind))
    except (autopar.AutoparError, *USER_FAILURES) as error:
        pipe.send(Found(error=said(error)))


def evaluated_apart(kind: str) -> Found:
    """:func:`evaluated` in a process of its own."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tools.campaigns.others", "transformers"])
    ours, theirs = context.Pipe()
    process = context.Process(target=_child, args=(theirs, kind), daemon=True)
    process.start()
    theirs.close()
    try:
        found: Found = ours.recv() if ours.poll(LIMIT_S) else Found(error=f"no end after {LIMIT_S:.0f} s")
    except EOFError:
        found = Found(error="the process died")
    process.kill()
    process.join()
    return found


def page(found: dict[str, Found]) -> str:
    """The page: counts, and a line for each type that is not right."""
    of = {verdict: [kind for kind, one in found.items() if one.verdict == verdict] for verdict in VERDICTS}
    lines = [
        "# Evaluations\n",
        (
            "Written by `python -m tools.campaigns.evaluations --page docs/evidence/evaluations.md`; do not edit. "
            f"Run at revision {revision()}.\n"
        ),
        (
            "The loss of `par.evaluate` on one rank against that of the model in `eval()`, in float32, of small models of "
            "transformers with their dropout ([which](families.md)). "
            f"They are right within {TOLERANCE:.0e}. Of those that are right {sum(found[k].replaced > 0 for k in of['right'])} "
            "do more in training than dropout, or write it otherwise, so that values stand in the places of others "
            "([why](../adr/0028-evaluations.md)).\n"
        ),
        *(f"- {VERDICTS[verdict]}: {len(kinds)}" for verdict, kinds in of.items()),
        "",
    ]
    for verdict in ("wrong", "draws", "refused"):
        for kind in of[verdict]:
            one = found[kind]
            lines.append(
                f"- {kind}, {verdict}: {one.error or f'{one.evaluated:.6g}, alone {one.alone[0]:.6g} and {one.alone[1]:.6g}'}"
            )
    return "\n".join(lines) + "\n"


VERDICTS = {
    "right": "right",
    "draws": "no two evaluations are alike, as the model draws random numbers in `eval()` too",
    "refused": "refused with a reason",
    "wrong": "wrong",
    "no plan": "not tried, as the type has no plan",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the types; 1 if one is wrong."""
    parser = argparse.ArgumentParser(prog="python -m tools.campaigns.evaluations", description=__doc__)
    parser.add_argument("types", nargs="*", metavar="TYPE")
    parser.add_argument("--page", type=Path)
    options = parser.parse_args(arguments)
    found, kinds = dict[str, Found](), options.types or sorted(TYPES)
    with ThreadPoolExecutor(os.cpu_count()) as threads:
        for kind, one in zip(kinds, threads.map(evaluated_apart, kinds), strict=True):
            found[kind] = one
            said_of = (
                one.error
                or f"{one.evaluated:.6g} {one.alone[0]:.6g}, trained {one.trained:.6g}, {one.replaced} replaced"
            )
            sys.stdout.write(f"{kind:24} {one.verdict:8} {said_of}\n")
            sys.stdout.flush()
    if options.page is not None:
        options.page.write_text(page(found), encoding="utf-8")
    return int(any(one.verdict == "wrong" for one in found.values()))


if __name__ == "__main__":
    sys.exit(main())
