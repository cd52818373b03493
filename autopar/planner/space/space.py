"""Search spaces: the values of each choice that a search tries, read from ``search/*.toml``."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Literal, get_args

from autopar.errors import UsageError
from autopar.plan.plan import BUCKET_BYTES, Recompute
from autopar.plan.schedule import ScheduleName
from autopar.util.files import data_files
from autopar.util.toml import MAY_BE_ZERO, Table

SamplerName = Literal["none", "tpe", "cmaes", "nsga2"]
SAMPLERS: tuple[SamplerName, ...] = get_args(SamplerName)
"""The samplers for spaces that are too large to be searched to the end; ``none``: dual bounds alone decide."""

ATTENTION_KINDS = ("gather", "ulysses", "ring")
"""The ways in which attention runs over a split sequence (:mod:`autopar.planner.sharding.input_axes`)."""

Hosted = Literal["optimizer", "activations"]
"""What may live in the host's memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Space:
    """The choices of a search, as a file names them.

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
        bucket_mib: the sizes of gradient buckets, in MiB, that are tried for the best plan of each candidate.
        offload: what may live on the host, where the profiles of the devices have the link to it: the optimizer, and activations.
        data_shares: whether, without a pipeline, data ranks on different devices may take different numbers of samples.
        sampler: what chooses the candidates to evaluate in a larger space (:mod:`autopar.planner.branch_and_bound.sampling`).
        vocab_multiples: the multiples to which each rank's part of a vocabulary may be padded.

    Raises:
        UsageError: a list without a value, or a bucket of less than a byte.
    """

    name: str
    max_tp_nodes: int
    max_pp: int
    max_tp: int
    max_cp: int
    cp_from: int
    zero_stages: tuple[Literal[0, 1, 2, 3], ...]
    micro_batches: tuple[int, ...]
    schedules: tuple[ScheduleName, ...]
    virtual_stages: tuple[int, ...]
    hsdp: bool
    recompute: tuple[Recompute, ...]
    price_ratios: tuple[float, ...] = field(metadata=MAY_BE_ZERO)
    exhaustive: int
    trials: int
    equal_stages: bool = False
    skips_unlikely: bool = True
    max_enumerated: int = 0
    bucket_mib: tuple[float, ...] = (BUCKET_BYTES / 2**20,)
    offload: tuple[Hosted, ...] = ()
    data_shares: bool = False
    sampler: SamplerName = "none"
    vocab_multiples: tuple[int, ...] = (1,)

    def __post_init__(self) -> None:
        """Check that every list has a value; nothing need live on the host."""
        for name in (f.name for f in fields(self) if f.name != "offload"):
            if getattr(self, name) == ():
                raise UsageError(f"The list '{name}' is empty", fix="Name at least one value")
        if min(self.bucket_bytes) < 1:
            raise UsageError("A bucket of 'bucket_mib' has less than a byte", fix="Name larger ones, such as 25")

    @property
    def bucket_bytes(self) -> tuple[int, ...]:
        """The sizes of gradient buckets in bytes."""
        return tuple(round(mib * 2**20) for mib in self.bucket_mib)


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
    usual = {key: getattr(load_space("default"), key) for key in ("max_cp", "cp_from") if not table.has(key)}
    return table.record(Space, **usual)
