"""The constraints on candidates: those that every plan must satisfy, those of pins, and those that leave out what is not worth trying.

Every constraint is a predicate over the columns of one table of combinations (:mod:`autopar.planner.space.candidates`). A new one belongs
in the function of its kind below. Its name and its remedy are shown to the user where no candidate is left.
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
from autopar.hardware.device import ALIGNED_ELEMENTS
from autopar.plan.schedule import SCHEDULES
from autopar.planner.space.pin_syntax import BUCKET, RELATIONS, ChoicePin, NumberPin
from autopar.planner.space.pins import Pins
from autopar.planner.space.space import ATTENTION_KINDS, Space

Column = NDArray[np.int64]
Table = Mapping[str, Column]
"""Combinations of choices: a column for each choice by its name, a row for each combination."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Constraint:
    """A constraint on candidates.

    Attributes:
        name: the constraint in words, shown in conflicts.
        holds: returns for each row of a table whether it satisfies the constraint.
        remedy: what resolves a conflict besides dropping a pin; empty if nothing does.
    """

    name: str
    holds: Callable[[Table], NDArray[np.bool_]]
    remedy: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """What the candidates depend on.

    Attributes:
        world_size: the number of devices.
        devices_per_node: the number of devices of a node.
        global_batch_size: the samples of a step.
        num_blocks: the number of blocks from which stages are cut.
        heads: the numbers of heads of the model's attentions. ``cp`` divides them under Ulysses. ``tp`` need not: a block whose heads it does
            not divide splits something else, or nothing, as its price decides.
        space: the values to try.
        mixes_samples: whether operators read the whole batch (batch norm); a data rank then takes its samples in one micro-batch.
        sequences: the sequence lengths of the model's attentions, each divided by ``cp``; empty: none can be split.
        key_heads: the numbers of heads of keys and values, as ``heads``.
        experts: the number of experts of each mixture whose experts may be split over data ranks; empty: there are none.
        has_written_attention: whether some attention is written as products and a softmax, which ring attention cannot run.
        casts: whether parameters are stored in another dtype than they are computed with.
        num_layers: the number of blocks that are equal to another block; 0 if unknown.
        vocabularies: the lengths of vocabularies that can be padded, each with the elements of a row in all parameters that have it.
        unaligned_fraction: the part of a product's rate that unaligned rows leave, the least over the devices.
        staged: the pin, the block and the stage of each block whose stage is pinned, in the order of blocks.
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
    """Return all divisors in ascending order."""
    small = [d for d in range(1, int(n**0.5) + 1) if n % d == 0]
    return tuple(sorted({*small, *(n // d for d in small)}))


def usual_micro_batches(space: Space, samples: int) -> list[int]:
    """Return the micro-batch sizes to try: for each size of the space the largest divisor of a data rank's samples that is not above it.

    >>> from autopar.planner.space.space import load_space
    >>> usual_micro_batches(load_space("default"), 24)
    [1, 2, 4, 8, 12, 24]
    """
    parts = divisors(samples)
    return sorted({max(part for part in parts if part <= most) for most in space.micro_batches})


def plan_constraints(problem: Problem) -> tuple[Constraint, ...]:
    """Return the constraints that every plan must satisfy."""
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
        *expert_constraints(problem),
        Constraint(
            name=f"pp * virtual_stages <= {problem.num_blocks} blocks",
            holds=lambda t: t["pp"] * t["virtual_stages"] <= problem.num_blocks,
        ),
        *zero_constraints(problem),
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


def zero_constraints(problem: Problem) -> tuple[Constraint, ...]:
    """Return the constraints between ZeRO and ``dp_shard``.

    FSDP needs something to do: it shards, or it casts parameters and may then free the casted copies.
    """
    if problem.casts:
        return (Constraint(name="zero=0 has dp_shard=1", holds=lambda t: (t["zero"] > 0) | (t["dp_shard"] == 1)),)
    name = "zero=0 if and only if dp_shard=1"
    return (Constraint(name=name, holds=lambda t: (t["zero"] == 0) == (t["dp_shard"] == 1)),)


def expert_constraints(problem: Problem) -> tuple[Constraint, ...]:
    """Return the constraints on experts that are split over data ranks."""
    constraints = [
        Constraint(
            name="experts borrow data ranks in equal groups: ep_data divides dp_replicate * dp_shard",
            holds=lambda t: (t["dp_replicate"] * t["dp_shard"]) % t["ep_data"] == 0,
        )
    ]
    constraints += [_divides("ep_data", n, f"ep_data divides {n} experts") for n in sorted(set(problem.experts))]
    return tuple(constraints)


def sequence_constraints(problem: Problem, pins: Pins) -> tuple[Constraint, ...]:
    """Return the constraints on a split of the sequence, among them those of a pinned kind of attention."""
    if not problem.sequences:
        return (Constraint(name="cp=1 in a model without attention operators", holds=lambda t: t["cp"] == 1),)
    remedy = "pad sequences to a multiple of cp"
    constraints = [_divides("cp", n, f"cp divides the sequence of {n}", remedy) for n in problem.sequences]
    kinds = tuple(kind for kind in ATTENTION_KINDS if pins.allows("cp_attention", kind))
    if kinds == ("ulysses",):
        heads = sorted({*problem.heads, *problem.key_heads})
        constraints += [_divides("cp", n, f"cp divides {n} heads (Ulysses)") for n in heads]
    if kinds == ("ring",) and problem.has_written_attention:
        name = "cp=1 under ring attention in a model whose attention is written out (not scaled_dot_product_attention)"
        constraints.append(Constraint(name=name, holds=lambda t: t["cp"] == 1))
    elif kinds == ("ring",):
        constraints += [
            Constraint(
                name=f"2 * cp divides the sequence of {n} (ring)",
                holds=lambda t, n=n: (t["cp"] == 1) | (n % (2 * t["cp"]) == 0),  # type: ignore[misc]
                remedy="pad sequences to a multiple of 2 * cp",
            )
            for n in problem.sequences
        ]
    return tuple(constraints)


def usual_constraints(problem: Problem, pins: Pins) -> tuple[Constraint, ...]:
    """Return the constraints that leave out what is not worth trying unless it is pinned, such as dominated schedules and ``tp`` across nodes.

    A space without ``skips_unlikely`` has only its limits on degrees and sizes of micro-batches.
    """
    space, per_node = problem.space, problem.devices_per_node
    most = min(space.max_tp, per_node * space.max_tp_nodes)
    rules: list[_Rule] = [
        (("tp",), f"tp <= {most}, in equal parts of a node of {per_node} or whole nodes",
         lambda t: (t["tp"] <= most) & ((per_node % t["tp"] == 0) | (t["tp"] % per_node == 0))),
        (("pp",), f"pp <= {space.max_pp}", lambda t: t["pp"] <= space.max_pp),
        (("micro_batch", "num_micro_batches"), "micro_batch is the largest part of a data rank's samples up to some size",
         lambda t: _usual_sizes(t, problem)),
        *(_worth_trying(problem) if space.skips_unlikely else ()),
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
"""The keys whose pins lift the constraint, its name, and its predicate."""


def _worth_trying(problem: Problem) -> list[_Rule]:
    """Return the constraints that leave out choices that are no better than others of the space."""
    space, per_node = problem.space, problem.devices_per_node
    layers, num_experts = problem.num_layers, gcd(*(problem.experts or (1,)))
    data = "dp_shard is all data ranks or 1" + (", or those of a node" if space.hsdp else "")
    rules: list[_Rule] = [
        (("dp_replicate", "dp_shard"), data, lambda t: _shard_groups(t, space.hsdp, per_node)),
        (("ep", "ep_data"), "experts are over no data ranks, over as many as can be, or as can be in a node",
         lambda t: _usual_experts(t, num_experts, per_node)),
        # With one micro-batch ZeRO-2 is ZeRO-1.
        (("zero",), "zero=2 has several micro-batches", lambda t: (t["zero"] != 2) | (t["num_micro_batches"] > 1)),
        (("vocab_multiple",), "vocabularies are padded as makes the products of their rows quickest",
         lambda t: _quickest_vocabularies(t, problem)),
        (("zero",), "zero > 0 if and only if dp_shard > 1", lambda t: (t["zero"] == 0) == (t["dp_shard"] == 1)),
    ]  # fmt: skip
    if layers:  # uneven stages are a layer longer than others, which wait for them
        divided = f"virtual_stages divides the layers of a pipeline rank, {layers} / pp rounded up"
        rules.insert(0, (("virtual_stages",), divided, lambda t: -(-layers // t["pp"]) % t["virtual_stages"] == 0))
    return rules


def _usual_sizes(t: Table, problem: Problem) -> NDArray[np.bool_]:
    """Return whether micro-batches are those of :func:`usual_micro_batches`, or all samples of a data rank where samples mix."""
    samples = problem.global_batch_size // (t["dp_replicate"] * t["dp_shard"])
    is_usual: NDArray[np.bool_] = (t["num_micro_batches"] == 1) & problem.mixes_samples
    for count in np.unique(samples[samples > 0]):
        is_usual |= (samples == count) & np.isin(t["micro_batch"], usual_micro_batches(problem.space, int(count)))
    return is_usual


def _usual_experts(t: Table, num_experts: int, per_node: int) -> NDArray[np.bool_]:
    """Return whether experts are split over no data ranks, over as many as possible, or over as many as fit in a node with ``cp`` and ``tp``."""
    spread, largest = t["ep_data"], np.gcd(t["dp_replicate"] * t["dp_shard"], num_experts)
    inside = np.gcd(largest, np.maximum(per_node // (t["cp"] * t["tp"]), 1))
    usual: NDArray[np.bool_] = (spread == 1) | (spread == largest) | (spread == inside)
    return usual


def _quickest_vocabularies(t: Table, problem: Problem) -> NDArray[np.bool_]:
    """Return whether ``vocab_multiple`` is the one with the fastest products over rows of vocabularies, the least of equally fast ones.

    Their time is proportional to the number of rows, over the rate that unaligned rows leave. Other work on logits and tables grows by the
    padding alone, by a percent where the rate changes by a factor.
    """
    best = {tp: quickest_multiple(problem, int(tp)) for tp in np.unique(t["tp"])}
    wanted = np.array([best[tp] for tp in t["tp"]])
    is_best: NDArray[np.bool_] = t["vocab_multiple"] == wanted
    return is_best


def quickest_multiple(problem: Problem, tp: int) -> int:
    """Return the ``vocab_multiple`` of the space for a degree of ``tp``; see :func:`_quickest_vocabularies`."""

    def work(multiple: int) -> float:
        padded = ((length(size, tp, multiple), width) for size, width in problem.vocabularies)
        # The rows of one rank: vocabularies are split if tp divides them.
        rows = ((n // tp if n % tp == 0 else n, width * n) for n, width in padded)
        return sum(cost / (1.0 if n % ALIGNED_ELEMENTS == 0 else problem.unaligned_fraction) for n, cost in rows)

    return min(sorted(problem.space.vocab_multiples), key=work) if problem.vocabularies else 1


def _shard_groups(t: Table, hsdp: bool, per_node: int) -> NDArray[np.bool_]:
    """Return whether states are sharded over no or all data ranks, or (HSDP) over those of one node."""
    is_unmixed: NDArray[np.bool_] = (t["dp_replicate"] == 1) | (t["dp_shard"] == 1)
    in_node: NDArray[np.bool_] = t["dp_shard"] * t["cp"] * t["tp"] == per_node
    return is_unmixed | in_node if hsdp else is_unmixed


def pin_constraints(pins: Pins, global_batch_size: int) -> tuple[Constraint, ...]:
    """Return the constraints of pins on the choices of candidates, named by the pins' texts."""
    notes = {
        "ep": " (ep is ep_data data ranks, times tp or not)",
        "num_micro_batches": f" (equal parts of a data rank's share of the global batch {global_batch_size})",
    }
    constraints = []
    for pin in pins.pins:
        if isinstance(pin, NumberPin) and pin.key != BUCKET:
            name = pin.text + notes.get(pin.key, "")
            constraints.append(Constraint(name=name, holds=lambda t, pin=pin: _number(t, pin)))  # type: ignore[misc]
        elif isinstance(pin, ChoicePin) and pin.key == "schedule":
            allowed = [i for i, name in enumerate(SCHEDULES) if pin.holds(name)]
            constraints.append(
                Constraint(name=pin.text, holds=lambda t, allowed=allowed: np.isin(t["schedule"], allowed))  # type: ignore[misc]
            )
    return tuple(constraints)


def stage_constraints(problem: Problem, pins: Pins) -> tuple[Constraint, ...]:
    """Return the constraints of pinned stages on the number of stages: stages follow the order of blocks, and none is empty."""
    last, texts = problem.num_blocks - 1, pins.texts
    staged = [row for row in problem.staged if row[0] in texts]
    constraints: dict[str, Constraint] = {}
    for (pin, i, s), (next_pin, j, t) in pairwise(staged):
        if not 0 <= t - s <= j - i:
            name = (
                " and ".join(dict.fromkeys((pin, next_pin)))
                + " (stages follow the order of the blocks, and none is empty)"
            )
            constraints[name] = Constraint(name=name, holds=lambda t: t["pp"] < 1)
    for text in dict.fromkeys(row[0] for row in staged):
        stage, blocks = next(row[2] for row in staged if row[0] == text), [row[1] for row in staged if row[0] == text]
        least, most = stage + 1, stage + 1 + last - blocks[-1]
        if stage > blocks[0]:
            name = f"{text} (its first block is number {blocks[0] + 1} of the model, and stages 0 to {stage} need {stage + 1} blocks)"
            constraints[name] = Constraint(name=name, holds=lambda t: t["pp"] < 1)
        else:
            name = f"{text} (which leaves {least} to {most} stages)"
            constraints[name] = Constraint(name=name, holds=partial(_are_stages, least=least, most=most))
    return tuple(constraints.values())


def _are_stages(t: Table, *, least: int, most: int) -> NDArray[np.bool_]:
    stages = t["pp"] * t["virtual_stages"]
    in_range: NDArray[np.bool_] = (least <= stages) & (stages <= most)
    return in_range


def _number(t: Table, pin: NumberPin) -> NDArray[np.bool_]:
    holds = RELATIONS[pin.relation]
    if pin.key == "ep":  # the layout decides whether experts are split over tp too
        is_kept: NDArray[np.bool_] = holds(t["ep_data"], pin.value) | holds(t["ep_data"] * t["tp"], pin.value)
    else:
        is_kept = holds(t["dp_replicate"] * t["dp_shard"] if pin.key == "dp" else t[pin.key], pin.value)
    return is_kept


def is_pinned(pins: Pins, *keys: str) -> bool:
    """Return whether there is a pin on one of these keys."""
    return any(isinstance(pin, NumberPin | ChoicePin) and pin.key in keys for pin in pins.pins)
