"""Search spaces: which values of each choice are tried; data in ``search/*.toml``."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, cast

from autopar.errors import UsageError
from autopar.plan.plan import BUCKET_BYTES, RECOMPUTES, Recompute, ScheduleName
from autopar.plan.schedule import SCHEDULES
from autopar.util.files import data_files
from autopar.util.toml import Table

SamplerName = Literal["none", "tpe", "cmaes", "nsga2"]
SAMPLERS: tuple[SamplerName, ...] = ("none", "tpe", "cmaes", "nsga2")
ATTENTION_KINDS = ("gather", "ulysses", "ring")
"""How attention runs over a split sequence (:mod:`autopar.planner.sharding.input_axes`)."""

Hosted = Literal["optimizer", "activations"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Space:
    """What the outer search may choose.

    Attributes:
        max_tp_nodes: ``tp`` groups span at most this many nodes (1: they stay on NVLink).
        max_pp, max_tp, max_cp: bounds on degrees; a file without ``max_cp`` or ``cp_from`` has those of ``default``.
        cp_from: length of the sequence from which on ``cp`` > 1 is tried unless it is pinned.
        zero_stages, micro_batches, schedules, virtual_stages: values tried; pins may name others.
        hsdp: also split the data axis into ``dp_replicate`` x ``dp_shard`` at node boundaries.
        recompute: modes that a block may take.
        equal_stages: every stage holds as many of the largest group of equal blocks as any other, or one more where they do
            not divide; False where a file does not say.
        bucket_bytes: sizes of the buckets in which gradients are summed, for the best plan of each candidate; a file has them
            as ``bucket_mib``.
        offload: what may live on the host, where the devices' profiles have the link to it: optimizers, and what blocks keep for
            backward.
        data_shares: without a pipeline, data ranks on different devices may take different numbers of samples; False where a
            file does not say.
        price_ratios: memory prices of the layout search, as the seconds that a rank's whole memory is worth over
            the block's compute time.
        practice: what is hardly ever worth trying is left out (see :func:`autopar.planner.space.constraints.practice`).
        every: up to so many plans of a candidate in one layout (cuts with recompute) are all priced, and up to so many layouts
            on ``tp`` all tried; past it cuts and layouts are those of the solvers. 0: always those.
        exhaustive: up to so many candidates are searched to the end.
        trials: evaluations in a larger space, where the caller says nothing.
        sampler: what asks for a part of these (:mod:`autopar.planner.branch_and_bound.sampling`); ``none``: bounds alone decide. So where a file does
            not say.
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
    practice: bool = True
    every: int = 0
    bucket_bytes: tuple[int, ...] = (BUCKET_BYTES,)
    offload: tuple[Hosted, ...] = ()
    data_shares: bool = False
    sampler: SamplerName = "none"
    vocab_multiples: tuple[int, ...] = (1,)


def with_sampler(space: Space, name: str | None) -> Space:
    """A space whose sampler is named by the caller, and takes part whatever the size of the pool; None: as it is.

    Raises:
        UsageError: there is no such sampler.
    """
    if name is None:
        return space
    if name not in SAMPLERS:
        raise UsageError.unknown("sampler", name, SAMPLERS)
    return replace(space, sampler=name, exhaustive=space.exhaustive if name == "none" else 0)


def load_space(name: str) -> Space:
    """A space by name (``default``, ``quick``) or from a TOML file.

    Raises:
        UsageError: unknown name, malformed file (file, line, key).
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
    usual = None if has_all else load_space("default")
    schedules = _texts(table, "schedules", SCHEDULES)
    space = Space(
        name=table.text("name"),
        max_tp_nodes=table.integer("max_tp_nodes"),
        max_pp=table.integer("max_pp"),
        max_tp=table.integer("max_tp"),
        max_cp=table.integer("max_cp", usual.max_cp if usual else None),
        cp_from=table.integer("cp_from", usual.cp_from if usual else None),
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
        practice=table.flag("practice", True),
        every=table.integer("every", 0, positive=False),
        bucket_bytes=_buckets(table),
        offload=_offload(table),
        data_shares=table.flag("data_shares", default=False),
        sampler=_sampler(table),
        vocab_multiples=_integers(table, "vocab_multiples", 1) if table.has("vocab_multiples") else (1,),
    )
    table.finish()
    return space


def _sampler(table: Table) -> SamplerName:
    found = table.text("sampler", "none")
    if found not in SAMPLERS:
        raise UsageError.unknown("sampler", found, SAMPLERS, where=table.place("sampler"))
    return found


def _offload(table: Table) -> tuple[Hosted, ...]:
    if not table.has("offload") or table.raw("offload") == []:
        return ()
    return cast("tuple[Hosted, ...]", _texts(table, "offload", ("optimizer", "activations")))


def _buckets(table: Table) -> tuple[int, ...]:
    """Of ``bucket_mib``; that of ``Plan.bucket_bytes`` where a file does not say."""
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
