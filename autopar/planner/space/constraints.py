"""The laws that candidates keep: what no plan may break, what pins ask for, and what is not worth trying.

Every constraint is a predicate over the columns of one table of combinations (:mod:`autopar.planner.space.candidates`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from math import gcd

import numpy as np
from numpy.typing import NDArray

from autopar.graph.rewrites import length
from autopar.hardware.device_rates import ALIGNED_ELEMENTS
from autopar.plan.schedule import SCHEDULES
from autopar.planner.space.pin_syntax import BUCKET, RELATIONS, ChoicePin, NumberPin
from autopar.planner.space.pins import Pins
from autopar.planner.space.space import ATTENTION_KINDS, Space

Column = NDArray[np.int64]
Table = Mapping[str, Column]


@dataclass(frozen=True, slots=True, kw_only=True)
class Constraint:
    """A constraint by name; ``holds`` gives a row of truths for a table, ``remedy`` is what helps beside dropping a pin."""

    name: str
    holds: Callable[[Table], NDArray[np.bool_]]
    remedy: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """What the candidates depend on.

    Attributes:
        heads: of the attentions of the model. Ulysses splits them by ``cp``; ``tp`` need not divide them: a block whose heads it
            does not divide splits something else, or nothing, which its price decides.
        sequences: lengths that the attentions of the model run over; ``cp`` divides each. Empty: none can be split.
        key_heads: heads of keys and values, likewise.
        has_written_attention: some attention is products and a softmax, which no ring runs.
        num_blocks: what pipeline stages are cut from.
        experts: how many each mixture has whose experts may be split over data ranks; empty: there are none.
        mixes_samples: operators look at the whole batch (batch norm), so that a data rank takes its
            samples in one micro-batch.
        casts: parameters are stored and computed with in different dtypes.
        num_layers: blocks of which there are equal ones; 0: not known.
        vocabularies: lengths of those that can be padded, with the elements of a row in all parameters that have it.
        unaligned_fraction: of the rate of a product that unaligned rows leave on the devices (the least of them).
        staged: the blocks whose stage is pinned, in order: the pin, the block, its stage.
    """

    world_size: int
    devices_per_node: int
    global_batch_size: int
    num_blocks: int
    heads: tuple[int, ...]
    space: Space
    mixes_samples: bool = False
    sequences: tuple[int, ...] = ()
    key_heads: tuple[int, ...] = ()
    experts: tuple[int, ...] = ()
    has_written_attention: bool = False
    casts: bool = False
    num_layers: int = 0
    vocabularies: tuple[tuple[int, int], ...] = ()
    unaligned_fraction: float = 1.0
    staged: tuple[tuple[str, int, int], ...] = ()


def divisors(n: int) -> tuple[int, ...]:
    """All divisors, ascending."""
    small = [d for d in range(1, int(n**0.5) + 1) if n % d == 0]
    return tuple(sorted({*small, *(n // d for d in small)}))


def usual_micro_batches(space: Space, samples: int) -> list[int]:
    """Sizes of micro-batches that divide a data rank's samples: for each size of the space the largest one that is not above it.

    >>> from autopar.planner.space.space import load_space
    >>> usual_micro_batches(load_space("default"), 24)
    [1, 2, 4, 8, 12, 24]
    """
    parts = divisors(samples)
    return sorted({max(part for part in parts if part <= most) for most in space.micro_batches})


def laws(problem: Problem) -> tuple[Constraint, ...]:
    """What no plan may break."""
    space, batch = problem.space, problem.global_batch_size
    none, gpipe, plain, inter = (SCHEDULES.index(n) for n in ("none", "GPipe", "1F1B", "Interleaved1F1B"))

    def samples(t: Table) -> Column:
        return t["micro_batch"] * t["dp_replicate"] * t["dp_shard"]

    def rounds(t: Table) -> NDArray[np.bool_]:
        m = t["num_micro_batches"]
        even: NDArray[np.bool_] = m % np.maximum(1, m // t["pp"]) == 0
        return even

    return (
        Constraint(
            name=f"{problem.world_size} device{'s' * (problem.world_size > 1)} = pp * dp_replicate * dp_shard * cp * tp",
            holds=lambda t: t["pp"] * t["dp_replicate"] * t["dp_shard"] * t["cp"] * t["tp"] == problem.world_size,
        ),
        Constraint(
            name=f"the global batch {batch} divides by micro_batch * dp_replicate * dp_shard",
            holds=lambda t: batch % samples(t) == 0,
            remedy="take another global batch",
        ),
        *expert_laws(problem),
        Constraint(
            name=f"pp * virtual_stages <= {problem.num_blocks} blocks",
            holds=lambda t: t["pp"] * t["virtual_stages"] <= problem.num_blocks,
        ),
        *zero_laws(problem),
        Constraint(name="zero is 0, 1, 2 or 3", holds=lambda t: t["zero"] <= 3),
        Constraint(name="zero=2 has pp=1", holds=lambda t: (t["zero"] != 2) | (t["pp"] == 1)),
        Constraint(
            name="a pipeline (pp > 1) has a schedule, and one stage has none",
            holds=lambda t: (t["schedule"] == none) == (t["pp"] == 1),
        ),
        Constraint(
            name="virtual_stages > 1 if and only if schedule=Interleaved1F1B",
            holds=lambda t: (t["schedule"] == inter) == (t["virtual_stages"] > 1),
        ),
        Constraint(
            name="1F1B has at least pp micro-batches",
            holds=lambda t: (t["schedule"] != plain) | (t["num_micro_batches"] >= t["pp"]),
        ),
        Constraint(
            name="Interleaved1F1B divides the micro-batches into even rounds of pp",
            holds=lambda t: (t["schedule"] != inter) | rounds(t),
        ),
        *((Constraint(
            name="samples that meet (batch statistics, auxiliary losses of routers, losses over pairs) take one micro-batch a data rank",
            holds=lambda t: t["num_micro_batches"] == 1,
            remedy="take one micro-batch with more data ranks or recompute=full: several would need a forward pass of all of them "
            "before the first backward, which is not done",
        ),) if problem.mixes_samples else ()),
        *(() if gpipe in (SCHEDULES.index(s) for s in space.schedules) else (
            Constraint(name=f"space {space.name} has no GPipe", holds=lambda t: t["schedule"] != gpipe),
        )),
    )  # fmt: skip


def _divides(column: str, n: int, name: str, remedy: str = "") -> Constraint:
    return Constraint(name=name, holds=lambda t: n % t[column] == 0, remedy=remedy)


def zero_laws(problem: Problem) -> tuple[Constraint, ...]:
    """FSDP has something to do where it shards, or where it casts: then it may free what it has cast."""
    if problem.casts:
        return (Constraint(name="zero=0 has dp_shard=1", holds=lambda t: (t["zero"] > 0) | (t["dp_shard"] == 1)),)
    name = "zero=0 if and only if dp_shard=1"
    return (Constraint(name=name, holds=lambda t: (t["zero"] == 0) == (t["dp_shard"] == 1)),)


def expert_laws(problem: Problem) -> tuple[Constraint, ...]:
    """What experts over data ranks ask for."""
    found = [
        Constraint(
            name="experts borrow data ranks in equal groups: ep_data divides dp_replicate * dp_shard",
            holds=lambda t: (t["dp_replicate"] * t["dp_shard"]) % t["ep_data"] == 0,
        )
    ]
    found += [_divides("ep_data", n, f"ep_data divides {n} experts") for n in sorted(set(problem.experts))]
    return tuple(found)


def sequence_laws(problem: Problem, pins: Pins) -> tuple[Constraint, ...]:
    """What a split of the sequence asks for; a pinned kind of attention has laws of its own."""
    if not problem.sequences:
        return (Constraint(name="cp=1 in a model without attention operators", holds=lambda t: t["cp"] == 1),)
    remedy = "pad sequences to a multiple of cp"
    found = [_divides("cp", n, f"cp divides the sequence of {n}", remedy) for n in problem.sequences]
    kinds = tuple(kind for kind in ATTENTION_KINDS if pins.allows("cp_attention", kind))
    if kinds == ("ulysses",):
        heads = sorted({*problem.heads, *problem.key_heads})
        found += [_divides("cp", n, f"cp divides {n} heads (Ulysses)") for n in heads]
    if kinds == ("ring",) and problem.has_written_attention:
        name = "cp=1 under ring attention in a model whose attention is written out (not scaled_dot_product_attention)"
        found.append(Constraint(name=name, holds=lambda t: t["cp"] == 1))
    elif kinds == ("ring",):
        found += [
            Constraint(
                name=f"2 * cp divides the sequence of {n} (ring)",
                holds=lambda t, n=n: (t["cp"] == 1) | (n % (2 * t["cp"]) == 0),  # type: ignore[misc]
                remedy="pad sequences to a multiple of 2 * cp",
            )
            for n in problem.sequences
        ]
    return tuple(found)


def practice(problem: Problem, pins: Pins) -> tuple[Constraint, ...]:
    """What is not worth trying unless it is pinned: dominated schedules, tensor parallelism across nodes.

    A space without ``practice`` keeps its bounds on degrees alone.
    """
    space, per_node = problem.space, problem.devices_per_node
    most = min(space.max_tp, per_node * space.max_tp_nodes)
    rules: list[_Rule] = [
        (("tp",), f"tp <= {most}, in equal parts of a node of {per_node} or whole nodes",
         lambda t: (t["tp"] <= most) & ((per_node % t["tp"] == 0) | (t["tp"] % per_node == 0))),
        (("pp",), f"pp <= {space.max_pp}", lambda t: t["pp"] <= space.max_pp),
        (("micro_batch", "num_micro_batches"), "micro_batch is the largest part of a data rank's samples up to some size",
         lambda t: _usual_sizes(t, problem)),
        *(_worth_trying(problem) if space.practice else ()),
    ]  # fmt: skip
    return tuple(
        Constraint(
            name=f"{name} (the space {space.name})",
            holds=holds,
            remedy=f"pin {' or '.join(keys)}, which lifts what a space leaves out of it",
        )
        for keys, name, holds in rules
        if not is_pinned(pins, *keys)
    )


_Rule = tuple[tuple[str, ...], str, Callable[[Table], NDArray[np.bool_]]]
"""What it is about, which pins say otherwise; its name; which rows keep it."""


def _worth_trying(problem: Problem) -> list[_Rule]:
    """What leaves out choices that are not better than others of the space."""
    space, per_node = problem.space, problem.devices_per_node
    layers, common = problem.num_layers, gcd(*(problem.experts or (1,)))
    data = "dp_shard is all data ranks or 1" + (", or those of a node" if space.hsdp else "")
    found: list[_Rule] = [
        (("dp_replicate", "dp_shard"), data, lambda t: _shard_groups(t, space.hsdp, per_node)),
        (("ep", "ep_data"), "experts are over no data ranks, over as many as can be, or as can be in a node",
         lambda t: _usual_experts(t, common, per_node)),
        # with one micro-batch ZeRO-2 is ZeRO-1
        (("zero",), "zero=2 has several micro-batches", lambda t: (t["zero"] != 2) | (t["num_micro_batches"] > 1)),
        (("vocab_multiple",), "vocabularies are padded as makes the products of their rows quickest",
         lambda t: _quickest_vocabularies(t, problem)),
        (("zero",), "zero > 0 if and only if dp_shard > 1", lambda t: (t["zero"] == 0) == (t["dp_shard"] == 1)),
    ]  # fmt: skip
    if layers:  # else some stages are a layer longer, and all wait
        divided = f"virtual_stages divides the layers of a pipeline rank, {layers} / pp rounded up"
        found.insert(0, (("virtual_stages",), divided, lambda t: -(-layers // t["pp"]) % t["virtual_stages"] == 0))
    return found


def _usual_sizes(t: Table, problem: Problem) -> NDArray[np.bool_]:
    """Micro-batches of :func:`usual_micro_batches`; all samples of a data rank where they meet."""
    samples = problem.global_batch_size // (t["dp_replicate"] * t["dp_shard"])
    found: NDArray[np.bool_] = (t["num_micro_batches"] == 1) & problem.mixes_samples
    for own in np.unique(samples[samples > 0]):
        found |= (samples == own) & np.isin(t["micro_batch"], usual_micro_batches(problem.space, int(own)))
    return found


def _usual_experts(t: Table, most: int, per_node: int) -> NDArray[np.bool_]:
    """Experts over no data ranks, over as many as can be, or over as many as can be inside a node, beside ``cp`` and ``tp``."""
    spread, largest = t["ep_data"], np.gcd(t["dp_replicate"] * t["dp_shard"], most)
    inside = np.gcd(largest, np.maximum(per_node // (t["cp"] * t["tp"]), 1))
    usual: NDArray[np.bool_] = (spread == 1) | (spread == largest) | (spread == inside)
    return usual


def _quickest_vocabularies(t: Table, problem: Problem) -> NDArray[np.bool_]:
    """The multiple of the space with which rows of vocabularies are multiplied soonest; of equal ones the least.

    That is in proportion to their number, and to the rate that unaligned rows leave. What else is done with logits and tables
    grows by the padding alone, which is a percent where the other is a factor.
    """
    known = {tp: quickest_multiple(problem, int(tp)) for tp in np.unique(t["tp"])}
    wanted = np.array([known[tp] for tp in t["tp"]])
    found: NDArray[np.bool_] = t["vocab_multiple"] == wanted
    return found


def quickest_multiple(problem: Problem, tp: int) -> int:
    """See :func:`_quickest_vocabularies`."""

    def work(multiple: int) -> float:
        padded = ((length(size, tp, multiple), width) for size, width in problem.vocabularies)
        # of a vocabulary that is split where it can be
        rows = ((n // tp if n % tp == 0 else n, width * n) for n, width in padded)
        return sum(cost / (1.0 if own % ALIGNED_ELEMENTS == 0 else problem.unaligned_fraction) for own, cost in rows)

    return min(sorted(problem.space.vocab_multiples), key=work) if problem.vocabularies else 1


def _shard_groups(t: Table, hsdp: bool, per_node: int) -> NDArray[np.bool_]:
    """Sharding over none or all data ranks, or (HSDP) over those of one node."""
    whole: NDArray[np.bool_] = (t["dp_replicate"] == 1) | (t["dp_shard"] == 1)
    node: NDArray[np.bool_] = t["dp_shard"] * t["cp"] * t["tp"] == per_node
    return whole | node if hsdp else whole


def pin_constraints(pins: Pins, global_batch_size: int) -> tuple[Constraint, ...]:
    """The pins on what candidates are made of, by their text."""
    notes = {
        "ep": " (ep is ep_data data ranks, times tp or not)",
        "num_micro_batches": f" (equal parts of a data rank's share of the global batch {global_batch_size})",
    }
    found = []
    for pin in pins.pins:
        if isinstance(pin, NumberPin) and pin.key != BUCKET:
            name = pin.text + notes.get(pin.key, "")
            found.append(Constraint(name=name, holds=lambda t, pin=pin: _number(t, pin)))  # type: ignore[misc]
        elif isinstance(pin, ChoicePin) and pin.key == "schedule":
            allowed = [i for i, name in enumerate(SCHEDULES) if pin.holds(name)]
            found.append(
                Constraint(name=pin.text, holds=lambda t, allowed=allowed: np.isin(t["schedule"], allowed))  # type: ignore[misc]
            )
    return tuple(found)


def stage_constraints(problem: Problem, pins: Pins) -> tuple[Constraint, ...]:
    """What pinned stages leave of the number of stages: these follow the order of the blocks, and none is empty."""
    last, texts = problem.num_blocks - 1, pins.texts
    staged = [own for own in problem.staged if own[0] in texts]
    found: dict[str, Constraint] = {}
    for (one, i, s), (other, j, t) in pairwise(staged):
        if not 0 <= t - s <= j - i:
            name = (
                " and ".join(dict.fromkeys((one, other)))
                + " (stages follow the order of the blocks, and none is empty)"
            )
            found[name] = Constraint(name=name, holds=lambda t: t["pp"] < 1)
    for text in dict.fromkeys(own[0] for own in staged):
        stage, blocks = next(own[2] for own in staged if own[0] == text), [own[1] for own in staged if own[0] == text]
        least, most = stage + 1, stage + 1 + last - blocks[-1]
        if stage > blocks[0]:
            name = f"{text} (its first block is number {blocks[0] + 1} of the model, and stages 0 to {stage} need {stage + 1} blocks)"
            found[name] = Constraint(name=name, holds=lambda t: t["pp"] < 1)
        else:
            name = f"{text} (which leaves {least} to {most} stages)"
            found[name] = Constraint(name=name, holds=partial(_are_stages, least=least, most=most))
    return tuple(found.values())


def _are_stages(t: Table, *, least: int, most: int) -> NDArray[np.bool_]:
    stages = t["pp"] * t["virtual_stages"]
    found: NDArray[np.bool_] = (least <= stages) & (stages <= most)
    return found


def _number(t: Table, pin: NumberPin) -> NDArray[np.bool_]:
    holds = RELATIONS[pin.relation]
    if pin.key == "ep":  # of the layout, which has to choose between the two
        found: NDArray[np.bool_] = holds(t["ep_data"], pin.value) | holds(t["ep_data"] * t["tp"], pin.value)
    else:
        found = holds(t["dp_replicate"] * t["dp_shard"] if pin.key == "dp" else t[pin.key], pin.value)
    return found


def is_pinned(pins: Pins, *keys: str) -> bool:
    """Whether pins say something of one of these."""
    return any(isinstance(pin, NumberPin | ChoicePin) and pin.key in keys for pin in pins.pins)
