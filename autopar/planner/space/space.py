"""Search spaces: the values of each choice that a search tries, read from ``search/*.toml``."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, cast

from autopar.errors import UsageError
from autopar.plan.plan import BUCKET_BYTES, RECOMPUTES, Recompute
from autopar.plan.schedule import SCHEDULES, ScheduleName
from autopar.util.files import data_files
from autopar.util.toml import Table

SamplerName = Literal["none", "tpe", "cmaes", "nsga2"]
SAMPLERS: tuple[SamplerName, ...] = ("none", "tpe", "cmaes", "nsga2")
"""The samplers for spaces that are too large to be searched to the end; ``none``: dual bounds alone decide."""

ATTENTION_KINDS = ("gather", "ulysses", "ring")
"""The ways in which attention runs over a split sequence (:mod:`autopar.planner.sharding.input_axes`)."""

Hosted = Literal["optimizer", "activations"]
"""What may live in the host's memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Space:
    """The choices of a search.

    Attributes:
        name: the space's name.
        max_tp_nodes: the number of nodes that a ``tp`` group spans at most (1: it stays on NVLink).
        max_pp, max_tp, max_cp: the largest degrees. A file without ``max_cp`` or ``cp_from`` has those of ``default``.
        cp_from: the sequence length from which on ``cp`` > 1 is tried unless it is pinned.
        zero_stages, micro_batches, schedules, virtual_stages: the values that are tried; pins may name others.
        hsdp: whether the data axis is also split into ``dp_replicate`` x ``dp_shard`` at node boundaries.
        recompute: the modes that a block may take.
        price_ratios: the prices of memory for which layouts are searched: the seconds that a rank's whole memory is worth, over the compute
            time of the block.
        exhaustive: the number of candidates up to which a space is searched to the end.
        trials: the number of evaluations in a larger space, unless the caller gives a limit.
        equal_stages: whether all stages hold equally many blocks of the largest group of equal blocks, or one more where they do not
            divide.
        skips_unlikely: whether what is hardly ever worth trying is left out (:func:`~autopar.planner.space.constraints.usual_constraints`).
        max_enumerated: the number of plans of a candidate in one layout (cuts with recompute), and of layouts on ``tp``, up to which all are tried.
            Above it cuts and layouts are those of the solvers. 0: always those.
        bucket_bytes: the sizes of gradient buckets that are tried for the best plan of each candidate; ``bucket_mib`` in a file.
        offload: what may live on the host, where the profiles of the devices have the link to it: the optimizer, and activations.
        data_shares: whether, without a pipeline, data ranks on different devices may take different numbers of samples.
        sampler: what chooses the candidates to evaluate in a larger space (:mod:`autopar.planner.branch_and_bound.sampling`).
        vocab_multiples: the multiples to which each rank's part of a vocabulary may be padded.
    """

    name: str
    max_tp_nodes: int
    max_pp: int
    max_tp: int
    max_cp: int
    cp_from: int
    zero_stages: tuple[int, ...]
    micro_batches: tuple[int, ...]
    schedules: tuple[ScheduleName, ...]
    virtual_stages: tuple[int, ...]
    hsdp: bool
    recompute: tuple[Recompute, ...]
    price_ratios: tuple[float, ...]
    exhaustive: int
    trials: int
    equal_stages: bool = False
    skips_unlikely: bool = True
    max_enumerated: int = 0
    bucket_bytes: tuple[int, ...] = (BUCKET_BYTES,)
    offload: tuple[Hosted, ...] = ()
    data_shares: bool = False
    sampler: SamplerName = "none"
    vocab_multiples: tuple[int, ...] = (1,)


def with_sampler(space: Space, name: str | None) -> Space:
    """Return a space with a sampler that the caller names, which is used for any size of the pool; None leaves the space as it is.

    Raises:
        UsageError: there is no such sampler.
    """
    if name is None:
        return space
    if name not in SAMPLERS:
        raise UsageError.unknown("sampler", name, SAMPLERS)
    return replace(space, sampler=name, exhaustive=space.exhaustive if name == "none" else 0)


def load_space(name: str) -> Space:
    """Return a space by name (``default``, ``quick``) or from a TOML file.

    Raises:
        UsageError: the name is unknown, or the file is malformed (with file, line and key).
    """
    shipped = data_files("search")
    if name.endswith(".toml"):
        path = Path(name)
    elif name in shipped:
        path = shipped[name]
    else:
        raise UsageError.unknown("space", name, shipped, fix="or give the path of a .toml file")
    table = Table.load(path)
    has_all = path == shipped["default"] or (table.has("max_cp") and table.has("cp_from"))
    defaults = None if has_all else load_space("default")
    schedules = _texts(table, "schedules", SCHEDULES)
    space = Space(
        name=table.text("name"),
        max_tp_nodes=table.integer("max_tp_nodes"),
        max_pp=table.integer("max_pp"),
        max_tp=table.integer("max_tp"),
        max_cp=table.integer("max_cp", defaults.max_cp if defaults else None),
        cp_from=table.integer("cp_from", defaults.cp_from if defaults else None),
        zero_stages=_integers(table, "zero_stages", 0, 3),
        micro_batches=_integers(table, "micro_batches", 1),
        schedules=cast("tuple[ScheduleName, ...]", schedules),
        virtual_stages=_integers(table, "virtual_stages", 1),
        hsdp=table.flag("hsdp"),
        recompute=cast("tuple[Recompute, ...]", _texts(table, "recompute", RECOMPUTES)),
        price_ratios=tuple(_numbers(table, "price_ratios")),
        exhaustive=table.integer("exhaustive"),
        trials=table.integer("trials"),
        equal_stages=table.flag("equal_stages", default=False),
        skips_unlikely=table.flag("skips_unlikely", True),
        max_enumerated=table.integer("max_enumerated", 0, positive=False),
        bucket_bytes=_buckets(table),
        offload=_offload(table),
        data_shares=table.flag("data_shares", default=False),
        sampler=_sampler(table),
        vocab_multiples=_integers(table, "vocab_multiples", 1) if table.has("vocab_multiples") else (1,),
    )
    table.finish()
    return space


def _sampler(table: Table) -> SamplerName:
    name = table.text("sampler", "none")
    if name not in SAMPLERS:
        raise UsageError.unknown("sampler", name, SAMPLERS, where=table.place("sampler"))
    return name


def _offload(table: Table) -> tuple[Hosted, ...]:
    if not table.has("offload") or table.raw("offload") == []:
        return ()
    return cast("tuple[Hosted, ...]", _texts(table, "offload", ("optimizer", "activations")))


def _buckets(table: Table) -> tuple[int, ...]:
    """Return the sizes of ``bucket_mib`` in bytes; the default of ``Plan.bucket_bytes`` if the file has none."""
    if not table.has("bucket_mib"):
        return (BUCKET_BYTES,)
    sizes = tuple(round(mib * 2**20) for mib in _numbers(table, "bucket_mib"))
    if min(sizes) < 1:
        raise table.wrong("bucket_mib", "buckets of at least one byte", repr(table.raw("bucket_mib")))
    return sizes


def _numbers(table: Table, key: str) -> list[float]:
    value = table.raw(key)
    if not isinstance(value, list) or not value or not all(isinstance(v, int | float) and v >= 0 for v in value):
        raise table.wrong(key, "a list of numbers from zero", repr(value))
    return [float(v) for v in value]


def _integers(table: Table, key: str, least: int, most: float = float("inf")) -> tuple[int, ...]:
    numbers = _numbers(table, key)
    if any(n != int(n) or not least <= n <= most for n in numbers):
        end = f" to {most}" if most < float("inf") else ""
        raise table.wrong(key, f"a list of whole numbers from {least}{end}", repr(numbers))
    return tuple(int(n) for n in numbers)


def _texts(table: Table, key: str, known: tuple[str, ...]) -> tuple[str, ...]:
    value = table.raw(key)
    if not isinstance(value, list) or not value or not all(v in known for v in value):
        raise table.wrong(key, f"a list of {', '.join(known)}", repr(value))
    return tuple(str(v) for v in value)
