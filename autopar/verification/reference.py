"""The two runs that are compared, one device and one rank, and the errors between them.

Both train a :class:`Subject`, a model with its batches, for a few steps of AdamW. :func:`errors` compares losses, the gradients of the
first step, and parameters. :class:`Compared` adds a loss function or float64 to a subject, and :func:`traced_in_double` traces its graph in
float64.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol, TypeAlias, TypedDict, cast

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from autopar.errors import TraceError, VerificationError, first_line
from autopar.graph.graph import Graph
from autopar.graph.operator_kinds import OPAQUE, draws_random, draws_values
from autopar.lower.program import Program
from autopar.ops import seeded
from autopar.ops.kernels import MODULE, region_of
from autopar.ops.opaque import pick_loss, without_dropout
from autopar.plan.plan import FP32, Precision
from autopar.rules.sample_order import by_sample
from autopar.runtime.parallel_model import ParallelModel
from autopar.tracing.batch import arguments, tensors_of
from autopar.tracing.failures import FAILURES, explained
from autopar.tracing.model_with_loss import LossFunction
from autopar.tracing.modes import in_double
from autopar.tracing.trace import trace
from autopar.verification.results import RankErrors
from autopar.verification.slices import Split

LEARNING_RATE = 1e-3
"""AdamW's learning rate in both runs."""
ADAM_EPSILON = 1e-5
"""AdamW's epsilon in both runs.

It is larger than rounding noise, so that a gradient that is zero but for rounding (of a key's bias) does not become a step."""

LOSS_FLOOR = 1e-2
"""Part of the largest sum of products of a tensor's elements and their gradients below which a loss has no scale."""


def adamw(parameters: Any) -> torch.optim.AdamW:
    """Return the optimizer of both runs."""
    return torch.optim.AdamW(parameters, lr=LEARNING_RATE, eps=ADAM_EPSILON)


def loss_of(output: Any) -> Tensor:
    """Return the loss in a model's output as a trace takes it: the output itself, its ``loss``, or its first scalar."""
    return pick_loss(output, "verify")


class Trained(TypedDict):
    """The results of a run.

    Attributes:
        losses: one for each step.
        gradients: those of the first step, by the model's names.
        parameters: those after the last step, and buffers that the steps changed.
    """

    losses: tuple[float, ...]
    gradients: dict[str, Tensor]
    parameters: dict[str, Tensor]


@dataclass(frozen=True, slots=True)
class Draw:
    """Random numbers that one device has drawn for a whole batch.

    Attributes:
        kind: the operator, without its overload; one that writes into a tensor has the name of the other.
        value: the numbers.
    """

    kind: str
    value: Tensor


Draws: TypeAlias = list[tuple[Draw, ...]]
"""The random numbers of each step, in order."""


class _Drawing(TorchDispatchMode):
    """Records the random numbers that a step draws, in ``made``, or gives it those that another run has drawn.

    Args:
        known: the random numbers of that run; None: there is none.
    """

    def __init__(self, known: Sequence[Draw] | None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.known, self.made = known, list[Draw]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if not isinstance(result, Tensor) or not draws_random(str(func)):
            return result
        if self.known is not None:
            value = self.known[len(self.made)].value.to(result.dtype)
            result = result.copy_(value) if func._schema.is_mutable else value.clone()
        self.made.append(Draw(kind_of_draw(str(func)), result.detach().clone()))
        return result


def kind_of_draw(target: str) -> str:
    """Return what :attr:`Draw.kind` is for an operator.

    >>> kind_of_draw("aten.bernoulli_.float"), kind_of_draw("aten.normal_functional.default")
    ('bernoulli', 'normal')
    """
    return target.split(".")[1].removesuffix("_").removesuffix("_functional")


def trained_alone(model: nn.Module, batches: Sequence[Mapping[str, Tensor]], draws: Draws | None = None) -> Trained:
    """Train a model on one device.

    Args:
        model: the model.
        batches: one for each step.
        draws: the random numbers of each step; an empty list gets those that this run draws. None: no matter which.

    Raises:
        VerificationError: the model cannot make these steps; the error names the line of its code.
    """
    try:
        return _trained(model, batches, draws)
    except FAILURES as failure:
        raise VerificationError(
            "One device alone cannot train the model",
            where=explained(failure, model).where,
            got=f"{type(failure).__name__}: {first_line(failure)}",
            fix="Correct that line, or give inputs and settings that fit the model",
        ) from failure


def loss_with(draws: Draws | None, step: int, model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    """Return the loss of a step, with the random numbers that :func:`trained_alone` describes."""
    if draws is None:
        return loss_of(model(**batch))
    with _Drawing(draws[step] if step < len(draws) else None) as drawing:
        loss = loss_of(model(**batch))
    if step == len(draws):
        draws.append(tuple(drawing.made))
    return loss


def _trained(model: nn.Module, batches: Sequence[Mapping[str, Tensor]], draws: Draws | None) -> Trained:
    """Train a model for a step on each batch, and return its results."""
    optimizer = adamw(model.parameters())
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    losses: list[float] = []
    gradients: dict[str, Tensor] = {}
    for step, batch in enumerate(batches):
        optimizer.zero_grad()
        loss = loss_with(draws, step, model, batch)
        loss.backward()  # type: ignore[no-untyped-call]
        losses.append(loss.item())
        if step == 0:
            gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        optimizer.step()
    parameters = {name: p.detach() for name, p in model.named_parameters() if p.is_floating_point() or p.is_complex()}
    changed = ((name, model.get_buffer(name), old) for name, old in buffers.items())
    parameters |= {name: new for name, new, old in changed if not torch.equal(new, old)}
    return {"losses": tuple(losses), "gradients": gradients, "parameters": parameters}


def trained_in_parallel(parallel: ParallelModel, batches: Sequence[Mapping[str, Tensor]]) -> Trained:
    """Train one rank's part of a model; the result has whole tensors."""
    optimizer = adamw(parallel.parameters())
    losses: list[float] = []
    gradients: dict[str, Tensor] = {}
    for step, batch in enumerate(batches):
        optimizer.zero_grad()
        losses.append(parallel.train_step(tensors_of(batch)).item())
        if step == 0:
            gradients = parallel.full_gradients()
        optimizer.step()
    return {"losses": tuple(losses), "gradients": gradients, "parameters": parallel.full_state_dict()}


def give_draws(program: Program, rank: int, draws: Sequence[Sequence[Tensor]], places: Mapping[str, int]) -> None:
    """Make a rank's program use its parts of the random numbers that one device has drawn.

    Args:
        program: the program; its code is changed.
        rank: the rank.
        draws: the random numbers of each step.
        places: the place of each operator's random numbers among those of a step.
    """
    split = Split.of(program.mesh, program.plan.num_micro_batches, program.graph)
    # each step has so many streams, of which the micro-batches take the first ones
    period = program.plan.num_micro_batches + 1

    def part_for(node: fx.Node) -> Callable[..., Tensor]:
        place, layout, dtype = places[node.meta["op"]], node.meta["types"], node.meta["spec"].dtype
        seed_of = cast("fx.Node", node.kwargs["seed"])
        is_of_step = seed_of.target is operator.floordiv

        def given(*args: Any, seed: int, **options: Any) -> Tensor:
            step, micro_batch = (seed, 0) if is_of_step else divmod(seed, period)
            part = split.part(draws[step][place], layout, split.coordinate(rank, micro_batch))
            return part.to(dtype, copy=True)

        return given

    for stage in program.stages:
        for block in stage.blocks:
            for node in block.module.graph.nodes:
                if node.target is seeded.draw:
                    node.target = part_for(node)
            block.module.recompile()


def places_of_draws(graph: Graph, drawn: Sequence[Draw], samples: int) -> dict[str, int]:
    """Return for each random operator of a graph but dropout the place of its numbers among those of one device.

    Args:
        graph: the graph.
        drawn: what one device has drawn in a step of ``samples``.

    Raises:
        VerificationError: one device did not draw them, such as in a part of the graph that it runs otherwise.
    """
    places, following = dict[str, int](), iter(enumerate(drawn))
    for op in filter(draws_values, graph.ops):
        sizes = [{size, size * samples // graph.batch_size} for size in op.spec.shape]
        for place, draw in following:
            same_shape = len(sizes) == draw.value.dim() and all(map(set.__contains__, sizes, draw.value.shape))
            if same_shape and draw.kind == kind_of_draw(op.target):
                places[op.name] = place
                break
        else:
            raise VerificationError(
                f"One device does not draw the random numbers of {op.name} ({op.target}) in the order of the graph",
                where=op.source or op.module,
                fix="Turn them off in the model that is verified",
            )
    return places


def errors(rank: int, found: Trained, reference: Trained, precision: Precision = FP32) -> RankErrors:
    """Return the largest errors of one rank's run against that of one device.

    The error of a loss is relative to the loss, or to :data:`LOSS_FLOOR` of what one tensor's gradients say it may change by where this is
    more: the loss of a policy gradient whose advantages sum to zero is nothing but rounding.
    """
    products = (gradient * reference["parameters"][name] for name, gradient in reference["gradients"].items())
    change = max((float(product.abs().sum()) for product in products), default=0.0)
    losses = zip(found["losses"], reference["losses"], strict=True)
    gradient_name, gradient = worst(found["gradients"], reference["gradients"])
    parameter_name, parameter = worst(found["parameters"], reference["parameters"])
    return RankErrors(
        rank=rank,
        losses=found["losses"],
        loss=max(_relative(abs(a - b), max(abs(b), LOSS_FLOOR * change)) for a, b in losses),
        gradient=gradient,
        gradient_name=gradient_name,
        parameter=parameter,
        parameter_name=parameter_name,
        precision=precision.name,
    )


def worst(found: Mapping[str, Tensor], reference: Mapping[str, Tensor]) -> tuple[str, float]:
    """Return the tensor with the largest relative error, and that error; a missing tensor has an infinite error.

    The error is relative to the tensor's largest element, or to 1e-6 of the largest element of all tensors where this is more: a tensor of
    nothing but rounding noise has no scale of its own.
    """
    reference = {name: tensor for name, tensor in reference.items() if tensor.numel()}
    floor = 1e-6 * max((float(tensor.abs().max()) for tensor in reference.values()), default=0.0)
    relative_errors = {
        name: _relative(float((found[name] - tensor).abs().max()), max(float(tensor.abs().max()), floor))
        if name in found
        else float("inf")
        for name, tensor in reference.items()
    }
    name = max(relative_errors, key=lambda name: relative_errors[name])
    return name, relative_errors[name]


def _relative(difference: float, size: float) -> float:
    """Return the ratio of a difference to a size; infinity if it is not a number."""
    if difference == 0.0:
        return 0.0
    ratio = difference / size if size else float("inf")
    return float("inf") if math.isnan(ratio) else ratio


class Subject(Protocol):
    """A model with its batches. It is picklable, and makes the same model and batches in every process."""

    def build(self, *, drops: bool = False) -> nn.Module:
        """Return the model on CPU with real weights, the same ones each time.

        Args:
            drops: whether dropout stays on, as in the graphs that plans are made for.
        """

    def make_batch(self, batch_size: int, *, seed: int) -> dict[str, Tensor]:
        """Return inputs by name. Samples differ in length and have ignored labels at their ends, where the model supports that."""


@dataclass(frozen=True, slots=True)
class Compared:
    """A subject with a loss function or in float64. Modules and parameters keep their names. It is picklable if its parts are.

    Attributes:
        subject: the model and its batches.
        loss_fn: ``loss_fn(output, batch)``, used in place of the loss that the model returns; a function that can be imported.
        is_double: whether the float32 values of parameters, buffers and inputs are converted to float64.
        drawing: paths of the modules whose random numbers are operators of the graph, as of dropout of channels. All ranks get those
            that one device draws, so that they stay on.
    """

    subject: Subject
    loss_fn: LossFunction | None = None
    is_double: bool = False
    drawing: frozenset[str] = frozenset()

    def build(self, *, drops: bool = False) -> nn.Module:
        """Return the model on CPU. With a loss function its forward takes all of a batch by name."""
        model = self.subject.build(drops=drops or bool(self.drawing))
        if self.drawing and not drops:
            without_dropout(model, self.drawing)
        if self.loss_fn is not None:
            model.forward = partial(_loss, model.forward, self.loss_fn)
        return model.double() if self.is_double else model

    def make_batch(self, batch_size: int, *, seed: int) -> dict[str, Tensor]:
        """Return inputs by name, with those that the loss function reads."""
        batch = self.subject.make_batch(batch_size, seed=seed)
        return widened(batch) if self.is_double else batch


def _loss(forward: Callable[..., Any], loss_fn: LossFunction, **batch: Any) -> Tensor:
    """Return the loss of a batch by a loss function; the model gets those inputs that its forward takes."""
    positional, named = arguments(forward, batch)
    return loss_fn(forward(*(batch[k] for k in positional), **{k: batch[k] for k in named}), batch)


def widened(batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return a batch with its floating-point tensors in float64."""
    double: dict[str, Tensor] = pytree.tree_map_only(
        Tensor, lambda value: value.double() if value.is_floating_point() else value, dict(batch)
    )
    return double


def traced_in_double(subject: Compared, graph: Graph) -> Graph | None:
    """Return the graph of the subject in float64, or None where its operators, names or blocks differ from those of ``graph``.

    The result has the fingerprint and blocks of ``graph``, so that its plans fit. It is traced anew, since constants that a trace in
    float32 has folded are rounded.
    """
    batch = subject.make_batch(max(graph.batch_size, 2), seed=0)
    example = pytree.tree_map_only(Tensor, lambda value: value.to("meta"), batch)
    model = subject.build(drops=any(op.target == "autopar.dropout" for op in graph.ops))
    try:
        with in_double():
            traced = trace(
                model,
                (),
                example,
                examples=batch,
                name=graph.name,
                opaque=_opaque_modules(graph),
                exact=graph.exact,
                evaluates=False,
            )
    except TraceError:
        return None
    double_graph = next((g for g in (traced, by_sample(traced)[0]) if _outline(g) == _outline(graph)), None)
    if double_graph is None:
        return None
    return replace(double_graph, fingerprint=graph.fingerprint, blocks=graph.blocks, mixing=graph.mixing)


def _opaque_modules(graph: Graph) -> tuple[str, ...]:
    """Return the paths of the modules that are opaque in a graph, without the model itself, which cannot be named."""
    regions = (region_of(str(op.args[0])) for op in (*graph.prelude, *graph.ops) if op.target == OPAQUE)
    return tuple(dict.fromkeys(region.name for region in regions if region.kind == MODULE and region.name))


def _outline(graph: Graph) -> tuple[object, ...]:
    """Return the parts of a graph that do not depend on dtypes."""
    ops = (*graph.prelude, *graph.ops)
    return (
        tuple(p.name for p in graph.parameters),
        tuple((op.name, op.target, op.operands, tuple(o.shape for o in op.outputs)) for op in ops),
        tuple((b.index, b.label) for b in graph.blocks),
    )
