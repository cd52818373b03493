"""What the outer search chooses from: mesh degrees, ZeRO, micro-batch and schedule, under named constraints.

Every constraint is a predicate over the columns of one table of combinations. The same table and predicates give the
candidates of a search and, when there are none, the smallest set of constraints that conflict.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from math import gcd

import numpy as np
from numpy.typing import NDArray

from autopar.mesh import Mesh
from autopar.plan import Offload, ScheduleName
from autopar.schedule import SCHEDULES
from autopar.search.pins import BUCKET, ChoicePin, NumberPin, Pin, Pins
from autopar.search.sequence import KINDS
from autopar.search.space import Space

Column = NDArray[np.int64]
Table = Mapping[str, Column]
_DEGREES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")

MAX_FREE_WORLD = 64
"""Up to this world size a conflict is looked for among all degrees; past it among those that multiply to the world
size, and combinations of what the pins name."""


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Candidate:
    """One choice of the outer search.

    Attributes:
        order: of the node groups along the ranks, empty: as the cluster has them.
        offload: what lives on the host.
    """

    mesh: Mesh
    micro_batch_size: int
    num_micro_batches: int
    zero_stage: int
    schedule: ScheduleName
    virtual_stages: int
    order: tuple[int, ...] = ()
    offload: tuple[Offload, ...] = ()

    def __hash__(self) -> int:
        """Of what tells candidates of one pool apart, in one tuple: they are looked up again and again."""
        mesh = self.mesh
        degrees = (mesh.pp, mesh.dp_shard, mesh.cp, mesh.tp, mesh.ep_data, self.micro_batch_size, self.zero_stage)
        return hash((*degrees, self.schedule, self.virtual_stages, self.order, self.offload))

    def __str__(self) -> str:
        parts = [str(self.mesh), f"zero={self.zero_stage}", f"micro_batch={self.micro_batch_size}"]
        if self.mesh.pp > 1:
            parts.append(self.schedule + (f" v={self.virtual_stages}" if self.virtual_stages > 1 else ""))
        if self.order:
            parts.append(f"node groups {'-'.join(map(str, self.order))}")
        if self.offload:
            parts.append(f"{', '.join(self.offload)} on the host")
        return ", ".join(parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Constraint:
    """A law by name; ``holds`` gives a row of truths for a table, ``remedy`` is what helps beside dropping a pin."""

    name: str
    holds: Callable[[Table], NDArray[np.bool_]]
    remedy: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """What the candidates depend on.

    Attributes:
        heads: of the attentions of the model; ``tp`` divides each.
        sequences: lengths that the attentions of the model run over; ``cp`` divides each. Empty: none can be split.
        key_heads: heads of keys and values; Ulysses splits them by ``cp``.
        has_written_attention: some attention is products and a softmax, which no ring runs.
        num_blocks: what pipeline stages are cut from.
        experts: how many each mixture has whose experts may be split over data ranks; empty: there are none.
        mixes_samples: operators look at the whole batch (batch norm), so that a data rank takes its
            samples in one micro-batch.
        casts: parameters are stored and computed with in different dtypes.
        num_layers: blocks of which there are equal ones; 0: not known.
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


def divisors(n: int) -> tuple[int, ...]:
    """All divisors, ascending."""
    small = [d for d in range(1, int(n**0.5) + 1) if n % d == 0]
    return tuple(sorted({*small, *(n // d for d in small)}))


def candidates(problem: Problem, pins: Pins) -> list[Candidate]:
    """All candidates that keep every constraint, in a fixed order."""
    constraints = (*_strict(problem, pins), *practice(problem, pins))
    table = _table(problem, pins, whole_world=True, early=constraints)
    keep = np.ones(len(table["pp"]), dtype=bool)
    if not keep.any():
        return []
    for constraint in constraints:
        keep &= constraint.holds(table)
    rows = np.flatnonzero(keep)
    return [_candidate(table, int(row), problem.global_batch_size) for row in rows]


def conflict(problem: Problem, pins: Pins) -> tuple[str, ...]:
    """Names of a smallest-by-inclusion set of constraints without any candidate; empty when there are candidates.

    Found by deletion: a constraint without which there is still no candidate is not needed for the conflict.
    """
    table = _table(problem, pins, whole_world=False)
    held = {c.name: c.holds(table) for c in _strict(problem, pins)}

    def possible(names: Iterable[str]) -> bool:
        keep = np.ones(len(table["pp"]), dtype=bool)
        for name in names:
            keep &= held[name]
        return bool(keep.any())

    left = list(held)
    if possible(left):
        return ()
    for name in list(held):
        without = [n for n in left if n != name]
        if not possible(without):
            left = without
    return tuple(left)


def remedies(problem: Problem, pins: Pins, names: Iterable[str]) -> tuple[str, ...]:
    """What else than dropping a pin resolves a conflict of these names."""
    named = set(names)
    return tuple(dict.fromkeys(c.remedy for c in _strict(problem, pins) if c.name in named and c.remedy))


def _strict(problem: Problem, pins: Pins) -> tuple[Constraint, ...]:
    """Laws and pins."""
    return (*laws(problem), *sequence_laws(problem, pins), *pin_constraints(pins, problem.global_batch_size))


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
            name=f"{problem.world_size} devices = pp * dp_replicate * dp_shard * cp * tp",
            holds=lambda t: t["pp"] * t["dp_replicate"] * t["dp_shard"] * t["cp"] * t["tp"] == problem.world_size,
        ),
        Constraint(
            name=f"the global batch {batch} divides by micro_batch * dp_replicate * dp_shard",
            holds=lambda t: batch % samples(t) == 0,
            remedy="take another global batch",
        ),
        *(
            Constraint(name=f"tp divides {n} attention heads", holds=lambda t, n=n: n % t["tp"] == 0)  # type: ignore[misc]
            for n in problem.heads
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
    found += [
        Constraint(name=f"ep_data divides {n} experts", holds=lambda t, n=n: n % t["ep_data"] == 0)  # type: ignore[misc]
        for n in sorted(set(problem.experts))
    ]
    return tuple(found)


def sequence_laws(problem: Problem, pins: Pins) -> tuple[Constraint, ...]:
    """What a split of the sequence asks for; a pinned kind of attention has laws of its own."""
    if not problem.sequences:
        return (Constraint(name="cp=1 in a model without attention operators", holds=lambda t: t["cp"] == 1),)
    found = [
        Constraint(
            name=f"cp divides the sequence of {n}",
            holds=lambda t, n=n: n % t["cp"] == 0,  # type: ignore[misc]
            remedy="pad sequences to a multiple of cp",
        )
        for n in problem.sequences
    ]
    kinds = pinned_kinds(pins)
    if kinds == ("ulysses",):
        found += [
            Constraint(name=f"cp divides {n} heads (Ulysses)", holds=lambda t, n=n: n % t["cp"] == 0)  # type: ignore[misc]
            for n in sorted({*problem.heads, *problem.key_heads})
        ]
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


def pinned_kinds(pins: Pins) -> tuple[str, ...]:
    """The kinds of attention over a split sequence that the pins leave."""
    return tuple(kind for kind in KINDS if pins.allows("cp_attention", kind))


def practice(problem: Problem, pins: Pins) -> tuple[Constraint, ...]:
    """What is not worth trying unless it is pinned: dominated schedules, tensor parallelism across nodes.

    A space without ``practice`` keeps its bounds on degrees alone.
    """
    found = []
    space, per_node = problem.space, problem.devices_per_node
    if not _pinned(pins, "tp"):
        most = min(space.max_tp, per_node * space.max_tp_nodes)
        found.append(
            Constraint(name="tp inside a node", holds=lambda t: (t["tp"] <= most) & _in_nodes(t["tp"], per_node))
        )
    if not _pinned(pins, "pp"):
        found.append(Constraint(name="max_pp", holds=lambda t: t["pp"] <= space.max_pp))
    if not space.practice:
        return tuple(found)
    if not _pinned(pins, "schedule"):  # GPipe holds more than 1F1B, and is quicker only where messages take long
        gpipe = SCHEDULES.index("GPipe")
        found.append(
            Constraint(name="GPipe", holds=lambda t: (t["schedule"] != gpipe) | (t["num_micro_batches"] < t["pp"]))
        )
    if problem.num_layers and not _pinned(pins, "virtual_stages"):  # else some stages are a layer longer, and all wait
        found.append(
            Constraint(
                name="virtual stages", holds=lambda t: -(-problem.num_layers // t["pp"]) % t["virtual_stages"] == 0
            )
        )
    if not _pinned(pins, "dp_replicate", "dp_shard"):
        found.append(Constraint(name="shard groups", holds=lambda t: _shard_groups(t, space.hsdp, per_node)))
    if not _pinned(pins, "ep", "ep_data"):
        common = gcd(*problem.experts) if problem.experts else 1
        found.append(Constraint(name="experts", holds=lambda t: _usual_experts(t, common, per_node)))
    if not _pinned(pins, "zero"):  # with one micro-batch ZeRO-2 is ZeRO-1
        found.append(Constraint(name="ZeRO-2", holds=lambda t: (t["zero"] != 2) | (t["num_micro_batches"] > 1)))
        found.append(Constraint(name="shards", holds=lambda t: (t["zero"] == 0) == (t["dp_shard"] == 1)))
    return tuple(found)


def _in_nodes(tp: Column, per_node: int) -> NDArray[np.bool_]:
    """Groups that are equal parts of a node, or whole nodes."""
    inside: NDArray[np.bool_] = (per_node % tp == 0) | (tp % per_node == 0)
    return inside


def _usual_experts(t: Table, most: int, per_node: int) -> NDArray[np.bool_]:
    """Experts over no data ranks, over as many as can be, or over as many as can be inside a node, beside ``cp`` and ``tp``."""
    spread, largest = t["ep_data"], np.gcd(t["dp_replicate"] * t["dp_shard"], most)
    inside = np.gcd(largest, np.maximum(per_node // (t["cp"] * t["tp"]), 1))
    usual: NDArray[np.bool_] = (spread == 1) | (spread == largest) | (spread == inside)
    return usual


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


def _number(t: Table, pin: NumberPin) -> NDArray[np.bool_]:
    if pin.key == "ep":  # of the layout, which has to choose between the two
        pairs = zip(t["ep_data"], t["tp"], strict=True)
        known = {pair: pin.holds(int(pair[0])) or pin.holds(int(pair[0] * pair[1])) for pair in set(pairs)}
        return np.array([known[pair] for pair in zip(t["ep_data"], t["tp"], strict=True)])
    column = t["dp_replicate"] * t["dp_shard"] if pin.key == "dp" else t[pin.key]
    return np.array([pin.holds(int(v)) for v in np.unique(column)])[np.unique(column, return_inverse=True)[1]]


def _pinned(pins: Pins, *keys: str) -> bool:
    return any(_key(pin) in keys for pin in pins.pins)


def _key(pin: Pin) -> str:
    return pin.key if isinstance(pin, NumberPin | ChoicePin) else ""


def _values(pins: Pins, key: str, usual: Sequence[int]) -> list[int]:
    """The usual values and those that pins name, with their neighbours for inequalities."""
    named = [p.value for p in pins.pins if isinstance(p, NumberPin) and p.key == key]
    return sorted({*usual, *(v for n in named for v in (n, n - 1, n + 1) if v >= (0 if key == "zero" else 1))})


def _table(problem: Problem, pins: Pins, *, whole_world: bool, early: Sequence[Constraint] = ()) -> Table:
    """All combinations as columns; with ``whole_world`` those alone whose degrees multiply to the world size.

    Args:
        early: what breaks one of these in the degrees alone, or in the other columns alone, is left out.
    """
    space, world = problem.space, problem.world_size
    found = divisors(world)
    long = any(n >= space.cp_from for n in problem.sequences)
    split = found if _pinned(pins, "cp") else tuple(d for d in found if d <= space.max_cp) if long else (1,)
    degrees = [
        (pp, world // (pp * tp * cp * shard), shard, cp, tp)
        for pp in found
        for tp in found
        for cp in split
        if world % (pp * tp * cp) == 0
        for shard in divisors(world // (pp * tp * cp))
    ]
    if not whole_world:
        usual = found if world <= MAX_FREE_WORLD else (1, 2, world)
        free = [_values(pins, key, split if key == "cp" and world <= MAX_FREE_WORLD else usual) for key in _DEGREES]
        degrees = sorted({*degrees, *product(*free)})  # type: ignore[arg-type]
    zero = _values(pins, "zero", space.zero_stages)
    micro = _values(pins, "micro_batch", [m for m in space.micro_batches if m <= problem.global_batch_size])
    data = np.unique(np.array([d[1] * d[2] for d in degrees]))
    if problem.mixes_samples:
        shares = {problem.global_batch_size // int(d) for d in data}
        micro = sorted({*micro, *(s for s in shares if s)})
    for pin in pins.pins:  # a pinned number of micro-batches gives the micro-batch
        if isinstance(pin, NumberPin) and pin.key == "num_micro_batches" and pin.value:
            sizes = {problem.global_batch_size // (pin.value * int(d)) for d in data}
            micro = sorted({*micro, *(s for s in sizes if s)})
    virtual = _values(pins, "virtual_stages", (1, *space.virtual_stages))
    names = ("none", *space.schedules)
    named = tuple(p.value for p in pins.pins if isinstance(p, ChoicePin) and p.key == "schedule")
    schedules = sorted({SCHEDULES.index(n) for n in (*names, *named)})
    others = product(zero, micro, schedules, virtual, _expert_ranks(problem, pins))
    left = _kept(_columns(_DEGREES, degrees), early)
    rest = _kept(_columns(("zero", "micro_batch", "schedule", "virtual_stages", "ep_data"), others), early)
    rows, times = len(left["pp"]), len(rest["zero"])
    table = {key: np.repeat(column, times) for key, column in left.items()}
    table |= {key: np.tile(column, rows) for key, column in rest.items()}
    samples = table["micro_batch"] * table["dp_replicate"] * table["dp_shard"]
    table["num_micro_batches"] = problem.global_batch_size // samples
    return table


def _columns(names: Sequence[str], rows: Iterable[Sequence[int]]) -> dict[str, Column]:
    found = np.array(list(rows), dtype=np.int64).reshape(-1, len(names))
    return {name: found[:, i] for i, name in enumerate(names)}


def _kept(part: dict[str, Column], constraints: Iterable[Constraint]) -> dict[str, Column]:
    """The rows that keep the constraints on these columns alone; those that read other columns wait for the whole table."""
    for constraint in constraints:
        try:
            keep = constraint.holds(part)
        except KeyError:
            continue
        part = {key: column[keep] for key, column in part.items()}
        if not keep.any():
            break
    return part


def _expert_ranks(problem: Problem, pins: Pins) -> list[int]:
    """Numbers of data ranks that experts may borrow."""
    most = gcd(*problem.experts) if problem.experts else 1
    return _values(pins, "ep_data", divisors(gcd(most, problem.world_size)))


def _candidate(t: Table, row: int, global_batch_size: int) -> Candidate:
    spread = int(t["ep_data"][row])
    mesh = Mesh(**{key: int(t[key][row]) for key in _DEGREES}, ep=spread, ep_data=spread)
    schedule: ScheduleName = SCHEDULES[int(t["schedule"][row])]  # type: ignore[assignment]
    return Candidate(
        mesh=mesh,
        micro_batch_size=int(t["micro_batch"][row]),
        num_micro_batches=int(t["num_micro_batches"][row]),
        zero_stage=int(t["zero"][row]),
        schedule=schedule,
        virtual_stages=int(t["virtual_stages"][row]),
    )
