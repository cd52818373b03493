"""One search as data: what it is asked, when it is to stop, what its parts share, and what it finds of a candidate and in the end."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import SupportsIndex

import torch

from autopar.cost.model import CostModel, Step
from autopar.cost.operators.work import operand_specs, work
from autopar.errors import InfeasibleError, UsageError
from autopar.graph.graph import Block, Graph
from autopar.graph.rewrites import Compact
from autopar.hardware.cluster import Cluster
from autopar.hardware.device import KernelKind
from autopar.plan.plan import BUCKET_BYTES, Precision, Recompute
from autopar.plan.prediction import Prediction
from autopar.planner.layouts.catalogue import Layouts
from autopar.planner.layouts.layout import PricedLayout, TypedLayout, layout_key_of
from autopar.planner.space.candidates import Candidate
from autopar.planner.space.pin_syntax import ChoicePin
from autopar.planner.space.pins import Pins
from autopar.planner.space.space import Space, load_space, with_sampler
from autopar.planner.stages.recompute import Mode
from autopar.request import Request


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """What a plan is wanted for.

    Attributes:
        pins: hold beside those that the graph carries from the modules of the model.
        cache_dir: where rules that are found by execution are kept; None for the user's cache directory.
        opaque: modules that the user named so, for the plan to say.
        sampler_seed: of the space's sampler.
    """

    graph: Graph
    cluster: Cluster
    global_batch_size: int
    precision: Precision
    optimizer: str
    pins: Pins
    space: Space
    cache_dir: Path | None = None
    opaque: tuple[str, ...] = ()
    sampler_seed: int = 0


def task_of(model: torch.nn.Module | Graph, request: Request, progress: Progress | None = None) -> Task:
    """What a planner is asked, the model traced where it is no graph yet.

    Raises:
        UsageError: malformed pins, cluster, space or precision; neither cluster nor global batch.
        TraceError: the model cannot be traced.
    """
    cluster, batch = request.cluster, request.global_batch_size
    if cluster is None:
        raise UsageError.missing("cluster", fix="Write for example cluster='h100-sxm5-80gb:4x8'")
    if batch is None:
        raise UsageError.missing("global batch", fix="Write for example global_batch_size=512")
    pins, space, precision = (
        Pins.parse(request.pins), with_sampler(load_space(request.space), request.sampler), request.recipe
    )  # fmt: skip
    cluster = Cluster.parse(cluster) if isinstance(cluster, str) else cluster
    if not isinstance(model, Graph):
        if progress is not None:
            progress("tracing the model", 0, 0)
        model = graph_of(model, request)
    if progress is not None:
        progress("laying out blocks", 0, 0)
    return Task(
        graph=model,
        cluster=cluster,
        global_batch_size=batch,
        precision=precision,
        optimizer=request.optimizer,
        pins=pins,
        space=space,
        cache_dir=request.cache_dir,
        opaque=_opaque(request),
        sampler_seed=request.sampler_seed,
    )


def graph_of(model: torch.nn.Module, request: Request) -> Graph:
    """The graph that plans of a request are for; see :func:`autopar.models.graph_for_plan.trace_model` for errors."""
    from autopar.models.graph_for_plan import trace_model  # the tracer is slow to import
    from autopar.planner.sharding.input_axes import samples_apart

    return trace_model(
        model,
        request.example_inputs,
        request.recipe,
        name=request.name,
        loss_fn=request.loss_fn,
        opaque=_opaque(request),
        global_batch_size=request.global_batch_size,
        samples_apart=samples_apart,
    )


def _opaque(request: Request) -> tuple[str, ...]:
    """Modules that run as they are written, the pinned ones among them."""
    return tuple(dict.fromkeys((*request.opaque, *Pins.parse(request.pins).opaque)))


def checked(task: Task) -> Task:
    """The task with the pins of its graph among its own.

    Raises:
        UsageError: a global batch below one, or of another size than the graph is for; pins that name nothing of the model.
        InfeasibleError: pins and options disagree on the precision.
    """
    pins = Pins.parse(dict.fromkeys((*task.graph.pins, *task.pins.texts)))
    task = replace(task, pins=pins, opaque=tuple(dict.fromkeys((*task.opaque, *pins.opaque))))
    batch, graph = task.global_batch_size, task.graph
    if not isinstance(batch, int) or batch < 1:
        raise UsageError(f"The global batch is {batch!r}", fix="Give a whole number of samples, at least 1")
    if graph.exact and batch != graph.batch_size:
        raise UsageError(
            f"The graph was traced for a global batch of {graph.batch_size} and holds for no other, but {batch} is asked for",
            where=graph.mixing or graph.name,
            fix="Trace the model at this global batch, or give the model instead of its graph",
        )
    pins.check(graph)
    if not pins.allows("precision", task.precision.name):
        on_precision = [pin.text for pin in pins.pins if isinstance(pin, ChoicePin) and pin.key == "precision"]
        raise InfeasibleError(
            f"The precision {task.precision.name} does not satisfy {', '.join(on_precision)}",
            fix="Change the precision, or drop the pin",
        )
    return task


Progress = Callable[[str, int, int], None]
"""``(what, done, total)``; ``total`` 0 while it is not known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """When a search stops: after so many trials or seconds; None for no limit.

    ``trials``: of all searches that share a ledger together, those that were made before among them.
    ``max_step_time_s``: slower plans do not count, and what cannot be faster by its bound is not looked at.

    Raises:
        UsageError: less than one trial, negative seconds, or no numbers.
    """

    trials: int | None = None
    search_timeout_s: float | None = None
    max_step_time_s: float | None = None

    def __post_init__(self) -> None:
        """Nothing is searched by such limits."""
        if self.trials is not None and not (isinstance(self.trials, SupportsIndex) and self.trials >= 1):
            raise UsageError(
                f"A search of {self.trials!r} trials finds nothing",
                where="trials",
                fix="Give 1 or more, or leave it out for no limit",
            )
        for name in ("search_timeout_s", "max_step_time_s"):
            seconds = getattr(self, name)
            if seconds is not None and not (isinstance(seconds, int | float) and seconds >= 0):
                raise UsageError(f"The limit of time is {seconds!r}", where=name, fix="Give a number of seconds from 0")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Outcome:
    """What a search found.

    Attributes:
        best: the fastest plan that fits; None when none of those evaluated does.
        candidates: how many there were.
        evaluated: how many of them were looked at; the others cannot fit in any layout, or are slower by a bound.
        lower_bound_s: no candidate that may fit is faster.
        misfits: those that failed, with their reasons.
        finished: False where a limit or an interrupt stopped the search.
        interrupted: by the user.
    """

    best: Evaluation | None
    candidates: int
    evaluated: int
    lower_bound_s: float
    misfits: tuple[Misfit, ...]
    finished: bool
    interrupted: bool = False


def peak_bytes(prediction: Prediction) -> int:
    """The upper end of the predicted peak."""
    return int(max((prediction.peak_memory_bytes, *prediction.peak_memory_interval_bytes)))


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchContext:
    """One model, cluster, batch and space; made by :meth:`of`.

    Attributes:
        graph: as traced.
        model: the cost model of the whole cluster.
        space, pins: what may be chosen.
        global_batch_size: samples of a step.
        layouts: all layouts of the model.
        modes: of recompute that the space allows.
        recompute, stages: pinned mode and pinned stage of blocks of ``graph``, by position.
        moved: its blocks whose activations are pinned to the host.
        buckets: sizes of what is summed together, of which a plan takes the quickest.
        flops_per_sample, tokens_per_sample: of the model.
    """

    graph: Graph
    model: CostModel
    space: Space
    pins: Pins
    global_batch_size: int
    layouts: Layouts
    modes: tuple[Recompute, ...]
    recompute: Mapping[int, Recompute]
    stages: Mapping[int, int]
    moved: frozenset[int]
    buckets: tuple[int, ...]
    flops_per_sample: float
    tokens_per_sample: int

    @classmethod
    def of(cls, graph: Graph, model: CostModel, *, global_batch_size: int, pins: Pins, space: Space) -> SearchContext:
        """The context of a search."""
        layouts = Layouts(graph, model, global_batch_size=global_batch_size, pins=pins, space=space)
        moved = pins.moved(graph)
        return cls(
            graph=graph,
            model=model,
            space=space,
            pins=pins,
            global_batch_size=global_batch_size,
            layouts=layouts,
            modes=space.recompute if not moved else tuple(m for m in space.recompute if m != "selective"),
            recompute=pins.recompute(graph),
            stages=pins.stages(graph),
            moved=moved,
            buckets=pins.buckets(space.bucket_bytes),
            flops_per_sample=flops_per_sample(layouts.compact, model.device.kernel_kind),
            tokens_per_sample=tokens_per_sample(graph),
        )

    def step(self, candidate: Candidate, layout: PricedLayout) -> Step:
        """How the cost model sees a candidate in a layout."""
        return Step(
            mesh=candidate.mesh,
            schedule=candidate.schedule,
            num_micro_batches=candidate.num_micro_batches,
            zero_stage=candidate.zero_stage,
            global_batch_size=self.global_batch_size,
            flops_per_sample=self.flops_per_sample,
            tokens_per_sample=self.tokens_per_sample,
            prelude_s=layout.prelude_s,
            adds_gradients=True,
            totals=layout.totals,
            bucket_bytes=self.buckets[0],
            offload=candidate.offload,
        )

    def unsplit(self, candidate: Candidate) -> PricedLayout:
        """What the parts of a candidate's layouts are taken of; see :meth:`Layouts.unsplit`."""
        return self.layouts.unsplit(layout_key_of(candidate))

    def typed_layouts(self, candidate: Candidate) -> tuple[TypedLayout, ...]:
        """The layouts of a candidate before they are priced.

        Raises:
            InfeasibleError: the pins of parameters allow none.
        """
        in_flight = min(candidate.num_micro_batches, candidate.mesh.pp)
        count = candidate.num_micro_batches
        return self.layouts.typed(layout_key_of(candidate), num_micro_batches=count, in_flight=in_flight)

    def known_layouts(self, candidate: Candidate) -> tuple[TypedLayout, ...]:
        """As :meth:`typed_layouts`; none where there is none, which the candidate's evaluation explains."""
        try:
            return self.typed_layouts(candidate)
        except InfeasibleError:
            return ()


def readable(num_bytes: float) -> str:
    """Bytes for people.

    >>> readable(3 * 2**29)
    '1.5 GiB'
    """
    for unit, name in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if num_bytes >= unit:
            return f"{num_bytes / unit:.1f} {name}"
    return f"{num_bytes:.0f} bytes"


def flops_per_sample(compact: Compact, kind: KernelKind) -> float:
    """Products of matrices, forward and backward."""
    blocks = zip(compact.graph.blocks, compact.members, strict=True)
    return sum(flops_of_block(compact.graph, block, kind) * len(members) for block, members in blocks)


def flops_of_block(graph: Graph, block: Block, kind: KernelKind = "cuda") -> float:
    """Products of matrices of one block and one sample, forward and backward."""
    found = [work(op, operand_specs(op, graph.spec), kind) for op in graph.block_ops(block)]
    return sum(done.flops + done.backward_flops for done in found) / graph.batch_size


def tokens_per_sample(graph: Graph) -> int:
    """Elements of one sample of the first batch input where it is a sequence of ids, else 1."""
    for leaf in graph.inputs:
        if leaf.batch_dim is not None:
            return leaf.spec.numel // graph.batch_size if not leaf.spec.dtype.is_floating_point else 1
    return 1


SLOW = "slower than the best plan by a bound"
"""The reason of a candidate that was left unfinished."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Evaluation:
    """A candidate that fits.

    Attributes:
        option: the layout.
        stops: where each stage ends.
        modes: how each block recomputes, or that it keeps on the host what it needs.
        prediction: of its step.
        bucket_bytes: of gradients that are summed together.
    """

    candidate: Candidate
    option: PricedLayout
    stops: tuple[int, ...]
    modes: tuple[Mode, ...]
    prediction: Prediction
    bucket_bytes: int = BUCKET_BYTES

    @property
    def time_s(self) -> float:
        """Predicted seconds of a step."""
        return self.prediction.step_time_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Misfit:
    """A candidate without a plan, and why; ``needs_bytes``: of the leanest that was tried, 0 where not known."""

    candidate: Candidate
    reason: str
    needs_bytes: int = 0


def needs_text(model: CostModel, predicted_bytes: int) -> str:
    """The upper end of a predicted peak, which has to fit, and what there is."""
    return f"{readable(predicted_bytes * model.memory_spread)} of {memory_of_devices(model)}"


def memory_of_devices(model: CostModel) -> str:
    """What a device has, for people; from the smallest to the largest where they differ."""
    sizes = {device.memory_bytes for device in model.devices}
    return " to ".join(readable(size) for size in sorted({min(sizes), max(sizes)}))
