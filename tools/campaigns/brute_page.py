"""``docs/evidence/brute.md`` from what :mod:`tools.campaigns.brute` found."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from statistics import median

from tools.campaigns.brute import ROUNDING, Result
from tools.revision import revision

_HEAD = """# The search beside every plan of small problems

Written by `python -m tools.campaigns.brute --page docs/evidence/brute.md`; do not edit. Run at revision {revision}. A small problem is a chain of two to five blocks on 2, 4 or 8
devices of one or two nodes. **Every** plan of it is priced: all degrees of `pp`, `dp_replicate`, `dp_shard` and `tp`, micro-batches,
ZeRO stages, schedules with virtual stages, cuts, recompute of each block, and on `tp` all strategies of all operators with all types of
all parameters at rest for which the changes of type exist. In those of even seeds without free layouts so are sizes of buckets, optimizers on the host and blocks
whose activations live there. What prices them is what prices the plans of the search; nothing else of the search is used
(`tools/campaigns/product.py`), but for the typing on `batch`, which is forced. Layouts are free in some problems, of few operators
(up to 1,000 layouts of a micro-batch on two ranks); in the others `tp=1` is pinned, for all, and blocks are larger. Then the search is asked, in the space `exhaustive` without a limit on trials, with memory between
what the leanest plan needs and what the fastest takes. Equal is up to {rounding:g} of the step.

"""

_LIFTED = """
## What this found

Mended or lifted in the space `exhaustive`, each by this comparison:

- Which of several *equal* blocks recompute was taken to make no difference. It does: what hides beside a block's backward, and what of
  memory is still held by then, depend on where it stands. Such choices cost up to 11 %, and called a problem impossible that is not.
- Cuts and layouts were those that solvers of sums name. Where all are few (`max_enumerated` of a space) all are tried now, by their bounds, and the law of even
  virtual stages ([adr/0011](../adr/0011-even-stages.md)) is lifted with them.
- GPipe was left out wherever there are as many micro-batches as ranks, as no quicker than 1F1B. Where messages between stages take long it is:
  each micro-batch of 1F1B waits for one there and back, GPipe's follow each other. `default` still leaves it out.
- ZeRO 3 without shards (`dp_shard=1`) was refused. In mixed precision FSDP casts parameters, and ZeRO 3 frees what it has cast. `default` tries it when it is pinned.
- `dp_shard` was 1, all data ranks or those of a node; `exhaustive` tries every divisor.
- What is alive in passing inside of a block was counted beside all that the last block of its stage keeps. By then that is gone: a candidate was
  called too large that was not, and the plan found took 3 % longer.

## What it does not show

- `cp`, experts over data ranks and padded vocabularies are not in these problems: of the typings on `cp` the search tries one for each kind of attention.
- Four and more equal blocks in a row share the typing of their inner ones, here as everywhere; a product over them would be too large.
- A value is changed to two further types inside of a block at most. No problem here needs three.
- Where there are more plans or layouts than `max_enumerated` says, cuts and layouts are the solvers', and the certificate is over the layouts
  that some price of memory makes best.
"""


def page(results: Sequence[Result]) -> str:
    """The counts, the gaps of both spaces, and each problem."""
    return "".join(
        (
            _HEAD.format(rounding=ROUNDING, revision=revision()),
            *_counts(results),
            _LIFTED,
            *_usual(results),
            *_rows(results),
        )
    )


def _counts(results: Sequence[Result]) -> list[str]:
    gaps = [r.gap for r in results]
    rows = (
        ("problems", len(results)),
        ("drawn models on clusters, each priced whole once", len({r.seed for r in results})),
        ("with memory that binds: the fastest plan of all does not fit", sum(r.binds for r in results)),
        ("of these without any plan that fits, by both", sum(r.best_s is None and r.found_s is None for r in results)),
        ("with free layouts", len([r for r in results if r.layouts > 1])),
        ("plans of the largest product", f"{max(r.plans for r in results):,}"),
        ("layouts of one micro-batch at most", f"{max(r.layouts for r in results):,}"),
        ("**gap zero**", f"**{sum(abs(gap) <= ROUNDING for gap in gaps)}**"),
        ("worst gap", _percent(max(gaps)) if max(gaps) > ROUNDING else "0"),
        ("feasible exactly when some plan is", sum((r.best_s is None) == (r.found_s is None) for r in results)),
        ("with a certificate that no plan is quicker than", sum(r.is_certified for r in results)),
        ("median and largest distance from the certificate to the best plan", _distance(results, lambda r: r.bound_s)),
    )
    return ["| | |\n|---|---|\n", *(f"| {name} | {value} |\n" for name, value in rows)]


def _distance(results: Sequence[Result], bound: Callable[[Result], float | None]) -> str:
    found = [r.best_s / b - 1 for r in results if r.best_s is not None and (b := bound(r))]
    return f"{_percent(median(found))}, {_percent(max(found))}" if found else "none"


def _usual(results: Sequence[Result]) -> list[str]:
    asked = [r for r in results if r.best_s is not None]
    gaps = sorted(r.usual_gap for r in asked)
    finite = [gap for gap in gaps if math.isfinite(gap)]
    why = Counter(_reason(r) for r in asked if r.usual_gap > ROUNDING)
    return [
        "\n## The space `default` on the same problems\n\n",
        (
            f"Of {len(gaps)} problems that have a plan it finds the best in {sum(gap <= ROUNDING for gap in gaps)} and none in "
            f"{len(gaps) - len(finite)}; the median gap is {_percent(median(finite))}, the worst {_percent(finite[-1])}. "
            f"Its certificate, which is over what it tries, lies above the best plan of all in {sum(not r.is_usually_certified for r in asked)}. "
            "What the best plan has that it does not try: "
        ),
        ", ".join(f"{name} ({count})" for name, count in why.most_common()) + ".\n",
    ]


def _reason(r: Result) -> str:
    degrees = dict(part.split("=") for part in r.best.split(", ")[0].split(" x ") if "=" in part)
    zero = r.best.split("zero=")[1][0]
    if "GPipe" in r.best:
        return "GPipe"
    if zero != "0" and "dp_shard" not in degrees:
        return "ZeRO without shards"
    if "dp_shard" in degrees and "dp_replicate" in degrees:
        return "other groups of shards"
    if "tp" in degrees:
        return "`tp` over two nodes" if ":2x" in r.cluster else "another layout"
    return "another cut or micro-batch"


def _rows(results: Sequence[Result]) -> list[str]:
    head = "\n## Problems\n\nModels by their blocks: linear L, MLP M, gated U, with a norm R; of one operator each S, G, N.\n\n"
    head += "| seed | model | cluster | precision | plans | binds | best of all | search | certificate | `default` |\n"
    head += "|---|---|---|---|---|---|---|---|---|---|\n"
    return [
        head,
        *(
            f"| {r.seed} | {r.model} | {r.cluster} | {r.precision} | {r.plans:,} | {'yes' if r.binds else 'no'} | {_time(r.best_s)} "
            f"| {_time(r.found_s)} | {_time(r.bound_s)} | {_time(r.usual_s)} |\n"
            for r in results
        ),
    ]


def _time(time_s: float | None) -> str:
    return "none fits" if time_s is None else f"{1e3 * time_s:.6g} ms"


def _percent(gap: float) -> str:
    return "none found" if math.isinf(gap) else f"{100 * gap:,.{0 if gap >= 0.1 else 2}f} %"
