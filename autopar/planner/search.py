"""One search as data: its task, its limits, the context that its parts share, the result of a candidate, and the outcome."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch

from autopar.cost.model import CostModel, Step, flops_per_sample, tokens_per_sample
from autopar.errors import InfeasibleError, UsageError, check_counts, check_seconds
from autopar.graph.graph import Graph
from autopar.hardware.cluster import Cluster
from autopar.plan.plan import BUCKET_BYTES, PRECISIONS, Precision, Recompute
from autopar.plan.prediction import Prediction
from autopar.planner.layouts.catalogue import Layouts
from autopar.planner.layouts.layout import PricedLayout, TypedLayout, layout_key_of
from autopar.planner.space.candidates import Candidate
from autopar.planner.space.pin_syntax import ChoicePin
from autopar.planner.space.pins import Pins
from autopar.planner.space.space import Space, load_space, with_sampler
from autopar.planner.stages.recompute import Mode
from autopar.request import Request
from autopar.util.formatting import num_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """The task of a planner.

    Attributes:
        graph: the graph of the model.
        cluster: the devices and links.
        global_batch_size: the samples of a step.
        precision: the dtypes.
        optimizer: the optimizer's name.
        pins: the user's pins; those that the graph has from modules of the model are added by :func:`checked`.
        space: the choices to try.
        opaque: the modules that the user named opaque, for the plan's record.
        sampler_seed: the seed of the space's sampler.
    """

    graph: Graph
    cluster: Cluster
    global_batch_size: int
    precision: Precision
    optimizer: str
    pins: Pins
    space: Space
    opaque: tuple[str, ...] = ()
    sampler_seed: int = 0


def task_of(model: torch.nn.Module | Graph, request: Request, progress: Progress | None = None) -> Task:
    """Return the task of a request; a model that is no graph yet is traced.

    Raises:
        UsageError: pins, cluster, space or precision are malformed, or the cluster or the global batch is missing.
        TraceError: the model cannot be traced.
    """
    cluster, batch = request.cluster, request.global_batch_size
    if progress is not None and not callable(progress):
        raise UsageError(f"The progress is {progress!r:.60}", fix="Give a function of (what, done, total)")
    if cluster is None:
        raise UsageError.missing("cluster", fix="Write for example cluster='h100-sxm5-80gb:4x8'")
    if batch is None:
        raise UsageError.missing("global batch", fix="Write for example global_batch_size=512")
    pins, space, precision = (
        Pins.parse(request.pins), with_sampler(load_space(request.space), request.sampler), request.recipe
    )  # fmt: skip
    cluster = Cluster.parse(cluster) if isinstance(cluster, str) else cluster
    if isinstance(model, Graph):
        _check_traced_for(model, request)
    else:
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
        opaque=_opaque(request),
        sampler_seed=request.sampler_seed,
    )


def _check_traced_for(graph: Graph, request: Request) -> None:
    """Check that a request asks nothing of a graph that is decided when the model is traced.

    Raises:
        UsageError: it was traced for another precision, or the request has keywords of :func:`autopar.api.trace`.
    """
    for name in ("example_inputs", "loss_fn", "name"):
        if getattr(request, name):
            raise UsageError(f"{name} cannot be given with a graph", fix=f"Give {name} to autopar.trace")
    dtypes = {p.spec.dtype for p in graph.parameters if p.spec.dtype.is_floating_point}
    compute = getattr(torch, request.recipe.compute)
    if dtypes - {compute}:
        got = ", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in dtypes))
        also = next(
            (f"Give precision='{name}', or trace" for name, recipe in PRECISIONS.items() if recipe.compute == got),
            "Trace",
        )
        raise UsageError(
            f"The graph was traced for {got}, but a plan in {request.precision} computes in {request.recipe.compute}",
            fix=f"{also} the model with precision='{request.precision}'",
        )


def graph_of(model: torch.nn.Module, request: Request, *, evaluates: bool = False) -> Graph:
    """Return the traced graph of a request's model; for errors and ``evaluates`` see :func:`autopar.models.graph_for_plan.trace_model`."""
    from autopar.models.graph_for_plan import trace_model  # the tracer is slow to import
    from autopar.planner.sharding.input_axes import samples_apart

    return trace_model(
        model,
        request.example_inputs,
        request.recipe,
        name=request.name,
        loss_fn=request.loss_fn,
        opaque=_opaque(request),
        evaluates=evaluates,
        global_batch_size=request.global_batch_size,
        samples_apart=samples_apart,
    )


def _opaque(request: Request) -> tuple[str, ...]:
    """Return the modules that are not traced, those of pins among them."""
    return tuple(dict.fromkeys((*request.opaque, *Pins.parse(request.pins).opaque)))


def checked(task: Task) -> Task:
    """Return the task with the pins of its graph, before the user's pins.

    Raises:
        UsageError: the global batch is another than the graph's, or pins name nothing of the model.
        InfeasibleError: pins and options disagree on the precision.
    """
    pins = Pins.parse(dict.fromkeys((*task.graph.pins, *task.pins.texts)))
    task = replace(task, pins=pins, opaque=tuple(dict.fromkeys((*task.opaque, *pins.opaque))))
    batch, graph = task.global_batch_size, task.graph
    if graph.exact and batch != graph.batch_size:
        raise UsageError(
            f"The graph was traced for a global batch of {graph.batch_size} and holds for no other, but {batch} is asked for",
            where=graph.mixing or graph.name,
            fix="Trace the model at this global batch, or give the model instead of its graph",
        )
    pins.check(graph)
    if task.opaque and not any(op.target == "autopar.opaque" for op in (*graph.prelude, *graph.ops)):
        raise UsageError(
            f"The model was traced without opaque='{task.opaque[0]}'",
            where=graph.name,
            fix="Give the model instead of its graph, or trace it with opaque=[...]",
        )
    if not pins.allows("precision", task.precision.name):
        on_precision = [pin.text for pin in pins.pins if isinstance(pin, ChoicePin) and pin.key == "precision"]
        raise InfeasibleError(
            f"The precision {task.precision.name} does not satisfy {', '.join(on_precision)}",
            fix="Change the precision, or drop the pin",
        )
    return task


Progress = Callable[[str, int, int], None]
"""A callback ``(what, done, total)``; ``total`` is 0 while it is unknown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """When a search stops.

    Attributes:
        trials: the number of evaluations of all searches that share a ledger, earlier ones included. None: the space's number where the pool is
            larger than what the space searches to the end, otherwise no limit.
        search_timeout_s: the seconds of the search; None: no limit.
        max_step_time_s: slower plans do not count, and candidates whose bound is above it are not evaluated; None: no limit.

    Raises:
        UsageError: less than one trial, negative seconds, or values that are no numbers.
    """

    trials: int | None = None
    search_timeout_s: float | None = None
    max_step_time_s: float | None = None

    def __post_init__(self) -> None:
        """Check the limits."""
        if self.trials is not None:
            check_counts(trials=self.trials)
        times = {"search_timeout_s": self.search_timeout_s, "max_step_time_s": self.max_step_time_s}
        check_seconds(**{name: time for name, time in times.items() if time is not None})


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Outcome:
    """The outcome of a search.

    Attributes:
        best: the fastest plan that fits; None if no evaluated candidate has one.
        candidates: the number of candidates.
        evaluated: the number of candidates with a result; a bound excludes the others as too large or too slow.
        lower_bound_s: the least dual bound: no candidate that may fit is faster, in seconds.
        misfits: the candidates without a plan, with reasons.
        finished: False if a limit or an interrupt stopped the search.
        interrupted: whether the user interrupted it.
    """

    best: Evaluation | None
    candidates: int
    evaluated: int
    lower_bound_s: float
    misfits: tuple[Misfit, ...]
    finished: bool
    interrupted: bool = False


def peak_bytes(prediction: Prediction) -> int:
    """Return the upper end of the predicted peak in bytes."""
    return int(max((prediction.peak_memory_bytes, *prediction.peak_memory_interval_bytes)))


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchContext:
    """What the parts of a search share: one model, cluster, batch and space. Constructed by :meth:`of`.

    Attributes:
        graph: the graph as traced.
        model: the cost model of the whole cluster.
        space, pins: the choices.
        global_batch_size: the samples of a step.
        layouts: all layouts of the model.
        modes: the recompute modes that the space allows.
        recompute, stages: the pinned mode and the pinned stage of blocks of ``graph``, by position.
        offloaded: the blocks whose activations are pinned to the host.
        buckets: the sizes of gradient buckets in bytes, of which a plan takes the fastest.
        flops_per_sample: the FLOPs of matrix products of one sample, forward and backward.
        tokens_per_sample: the tokens of one sample; 1 if it is no sequence of ids.
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
    offloaded: frozenset[int]
    buckets: tuple[int, ...]
    flops_per_sample: float
    tokens_per_sample: int

    @classmethod
    def of(cls, graph: Graph, model: CostModel, *, global_batch_size: int, pins: Pins, space: Space) -> SearchContext:
        """Return the context of a search."""
        layouts = Layouts(graph, model, global_batch_size=global_batch_size, pins=pins, space=space)
        offloaded = pins.offloaded(graph)
        return cls(
            graph=graph,
            model=model,
            space=space,
            pins=pins,
            global_batch_size=global_batch_size,
            layouts=layouts,
            modes=space.recompute if not offloaded else tuple(m for m in space.recompute if m != "selective"),
            recompute=pins.recompute(graph),
            stages=pins.stages(graph),
            offloaded=offloaded,
            buckets=pins.buckets(space.bucket_bytes),
            flops_per_sample=flops_per_sample(layouts.compact, model.device.kernel_kind),
            tokens_per_sample=tokens_per_sample(graph),
        )

    def step(self, candidate: Candidate, layout: PricedLayout) -> Step:
        """Return a candidate in a layout as the cost model takes it."""
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
        """Return the layout without ``cp`` and ``tp`` from which floors of a candidate's layouts are derived; see :meth:`Layouts.unsplit`."""
        return self.layouts.unsplit(layout_key_of(candidate))

    def typed_layouts(self, candidate: Candidate) -> tuple[TypedLayout, ...]:
        """Return the layouts of a candidate before they are priced.

        Raises:
            InfeasibleError: the pins of parameters allow no layout.
        """
        in_flight = min(candidate.num_micro_batches, candidate.mesh.pp)
        count = candidate.num_micro_batches
        return self.layouts.typed(layout_key_of(candidate), num_micro_batches=count, in_flight=in_flight)

    def known_layouts(self, candidate: Candidate) -> tuple[TypedLayout, ...]:
        """Return :meth:`typed_layouts`, empty instead of an error; the evaluation of the candidate gives the reason."""
        try:
            return self.typed_layouts(candidate)
        except InfeasibleError:
            return ()


SLOW = "slower than the best plan by a bound"
"""The reason of a candidate whose evaluation was cut off."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Evaluation:
    """The best plan of a candidate.

    Attributes:
        candidate: the candidate.
        option: its layout.
        stops: the end of each stage, as a position among the blocks.
        modes: the mode of each block: its recompute, or that its activations live on the host.
        prediction: the prediction of its step.
        bucket_bytes: the size of gradient buckets.
    """

    candidate: Candidate
    layout: PricedLayout
    stops: tuple[int, ...]
    modes: tuple[Mode, ...]
    prediction: Prediction
    bucket_bytes: int = BUCKET_BYTES

    @property
    def time_s(self) -> float:
        """The predicted seconds of a step."""
        return self.prediction.step_time_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Misfit:
    """A candidate without a plan.

    Attributes:
        candidate: the candidate.
        reason: why it has none.
        needs_bytes: the bytes of the leanest plan that was tried; 0 if unknown.
    """

    candidate: Candidate
    reason: str
    needs_bytes: int = 0


def needs_text(model: CostModel, predicted_bytes: int) -> str:
    """Return the upper end of a predicted peak, which must fit, and the memory of devices, in words."""
    return f"{num_bytes(predicted_bytes * model.memory_spread)} of {memory_of_devices(model)}"


def memory_of_devices(model: CostModel) -> str:
    """Return the memory of a device in words; from the smallest to the largest if they differ."""
    sizes = {device.memory_bytes for device in model.devices}
    return " to ".join(num_bytes(size) for size in sorted({min(sizes), max(sizes)}))
