"""Models as they are compared: one of the command line or of a plan's file, or one's own, with their batches and their graphs."""

from __future__ import annotations

import copy
import io
import pickle
import sys
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.utils import _pytree as pytree

from autopar.errors import InternalError, UsageError, reason
from autopar.graph.graph import Graph
from autopar.hardware.cluster import Cluster
from autopar.hardware.describe import with_free_links
from autopar.models.graph_for_plan import is_factory, model_of, samples_of, sequence_of, trace_model
from autopar.models.inputs import order_of_samples
from autopar.models.resolve import random_example_for, resolve_model, without_dropout
from autopar.ops.opaque import deep_copy
from autopar.plan.check import check_model
from autopar.plan.plan import FP32, Plan, Precision
from autopar.request import Request
from autopar.tracing.batch import named_batch

if TYPE_CHECKING:
    from autopar.models.resolve import ModelSource
    from autopar.planner.search import Progress


_NOISE = 0.02
"""Standard deviation of what is added to each parameter before ``verify``."""


def with_noise(model: torch.nn.Module) -> torch.nn.Module:
    """The same model, each parameter moved a little, in the same way each time."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator) * _NOISE
            parameter.add_(noise.to(parameter.dtype))
    return model


@dataclass(frozen=True)
class VerifiedModel:
    """A model whose batches hold only the inputs that were traced; every process makes the same one.

    With ``masked`` the padding mask is one of them; labels are ignored where a sample ends in any case.
    """

    source: ModelSource
    masked: bool

    def build(self, *, drops: bool = False) -> torch.nn.Module:
        """The model on CPU; no parameter is left at zero or one, where a wrong sum or factor would not show."""
        return with_noise(self.source.build(drops=drops))

    def make_batch(self, batch_size: int, *, seed: int) -> dict[str, Any]:
        """Random inputs, of different lengths where the model knows such."""
        batch = self.source.make_batch(batch_size, seed=seed, padded=True)
        names = batch if self.masked else self.source.example_inputs
        return {name: batch[name] for name in names if name in batch}

    def trace(
        self,
        precision: Precision = FP32,
        *,
        global_batch_size: int | None = None,
        opaque: Sequence[str] = (),
        as_trained: bool = False,
    ) -> Graph:
        """The graph on such batches.

        Args:
            precision: of the plans that it is for.
            global_batch_size: at which the model is traced where samples meet; without it they must be apart.
            opaque: modules that are not looked into.
            as_trained: with the noise that training draws, as plans are made for; otherwise a model that draws any
                is traced without dropping anything: what two processes draw cannot be compared, and one device, in
                float64 as well, runs without.
        """
        from autopar.graph.operator_kinds import draws_random
        from autopar.planner.sharding.input_axes import samples_apart

        batch = self.make_batch(self.source.batch_size, seed=0)
        example = pytree.tree_map_only(Tensor, lambda value: value.to("meta"), batch)
        options: dict[str, Any] = {"name": self.source.name, "opaque": opaque, "global_batch_size": global_batch_size}
        traced = partial(trace_model, example_inputs=example, precision=precision, samples_apart=samples_apart)
        graph = traced(self.source.model, **options)
        if as_trained or not any(draws_random(op.target) or op.target == "autopar.dropout" for op in graph.ops):
            return graph
        model = copy.deepcopy(self.source.model)
        without_dropout(model)
        return traced(model, **options)


EXAMPLES = 8
"""Samples that are made for a model whose config says how."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnModel:
    """A module, or a function that makes it; picklable where the class or the function can be imported.

    Attributes:
        source: stays as it is, and is copied.
        examples: inputs by name, on the CPU.
    """

    source: nn.Module | Callable[[], nn.Module]
    examples: Mapping[str, Any]

    def __reduce__(self) -> tuple[Any, ...]:
        file = io.BytesIO()
        _Parametrized(file).dump((self.source, self.examples))
        return _received, (file.getvalue(),)

    def build(self, *, drops: bool = False) -> nn.Module:
        """The model on CPU in float32, without dropout unless it ``drops``; no parameter is left at zero or one."""
        model = deep_copy(made(self.source)).float().cpu().train()
        if not drops:
            without_dropout(model)
        return with_noise(model)

    def make_batch(self, batch_size: int, *, seed: int) -> dict[str, Any]:
        """Samples of the examples: each as often as any other, in an order that depends on the seed alone."""
        size = samples_of(self.examples) or 1
        order = order_of_samples(size, batch_size, torch.Generator().manual_seed(seed))

        def drawn(value: Tensor) -> Tensor:
            value = value.float() if value.is_floating_point() else value
            return value[order] if value.dim() > 0 and value.shape[0] == size else value

        batch: dict[str, Any] = pytree.tree_map_only(Tensor, drawn, dict(self.examples))
        return batch


class _Parametrized(pickle.Pickler):
    """Sends parametrized modules as well: torch refuses to, as their classes are made when they are parametrized."""

    def reducer_override(self, value: Any) -> Any:
        """How a module is put together again; NotImplemented: in the usual way."""
        if not isinstance(value, nn.Module) or not parametrize.is_parametrized(value):
            return NotImplemented
        kind = parametrize.type_before_parametrizations(value)
        state = vars(value) | {
            "_load_state_dict_pre_hooks": OrderedDict()
        }  # weight_norm has one, a function in a function
        return kind.__new__, (kind,), state, None, None, _set


def _set(module: Any, state: dict[str, Any]) -> None:
    """Gives a module what it holds, and the properties that compute its parametrized tensors."""
    module.__setstate__(state)
    parametrize._inject_new_class(module)
    for name in module.parametrizations:
        parametrize._inject_property(module, name)


def _received(sent: bytes) -> OwnModel:
    source, examples = pickle.loads(sent)
    return OwnModel(source=source, examples=examples)


def made(source: nn.Module | Callable[[], nn.Module]) -> nn.Module:
    """The module itself, or what the function makes, which is the same each time.

    Raises:
        UsageError: neither.
    """
    if isinstance(source, nn.Module):
        return source
    if not callable(source):
        raise UsageError(
            f"A {type(source).__name__} is no model",
            expected="a torch.nn.Module, or a function without arguments that returns one",
            fix="Give the model that trains on one device",
        )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = source()
    if not isinstance(model, nn.Module):
        raise UsageError(
            f"The function {getattr(source, '__name__', source)} returns a {type(model).__name__}",
            expected="a torch.nn.Module",
            fix="Return the model that trains on one device",
        )
    return model


def own_model(
    source: nn.Module | Callable[[], nn.Module], model: nn.Module, plan: Plan, example_inputs: Any
) -> OwnModel:
    """A model that can be compared under a plan.

    Args:
        source: a module, or a function that makes it.
        model: what :func:`made` gives of it.
        example_inputs: a batch, by name or in order; made from its config for a Hugging Face model.

    Raises:
        UsageError: the model is on meta; one sample is to stand for those of several ranks; the class of the model cannot
            be imported by other processes.
    """
    if any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers())):
        raise UsageError(
            "A model on the meta device has no weights to train with",
            fix="Build it on the CPU, or give a function that builds it there",
        )
    given = random_example_for(model, batch_size=EXAMPLES) if example_inputs is None else example_inputs
    if isinstance(given, Tensor):
        given = (given,)
    named = named_batch(model, (), given) if isinstance(given, Mapping) else named_batch(model, tuple(given), {})
    examples = pytree.tree_map_only(Tensor, lambda value: value.detach().cpu(), named)
    if plan.mesh.data > 1 and samples_of(examples) == 1:
        raise UsageError(
            f"One example is too few for {plan.mesh.data} data ranks, which would all train on it",
            fix="Give example inputs with several different samples",
        )
    found = OwnModel(source=source, examples=examples)
    _check_sent(found)
    return found


def _is_typed_in(source: nn.Module | Callable[[], nn.Module]) -> bool:
    """Whether other processes would look in vain for the class of a module, or for a function, of this session."""
    homes = {type(m).__module__ for m in source.modules()} if isinstance(source, nn.Module) else {source.__module__}
    return "__main__" in homes and not Path(getattr(sys.modules["__main__"], "__file__", "")).is_file()


def _check_sent(model: OwnModel) -> None:
    """Refuse what the processes that play the ranks could not receive.

    Raises:
        UsageError: says what cannot be pickled.
    """
    try:
        if _is_typed_in(model.source):
            raise pickle.PicklingError(f"{type(model.source).__name__} was typed in, and stands in no file")
        pickle.dumps(model)
    except Exception as error:  # classes of users, and of torch.nn.utils, say in their own words that they refuse
        raise UsageError(
            "The model cannot be sent to the processes that play the ranks",
            got=reason(error),
            fix="Define its class in a module, or give a function of a module that builds it",
        ) from error


DEFAULT_TOKENS, DEFAULT_SAMPLES = 32, 4
"""Length of a sample and samples a rank: what is compared does not get righter with more."""


def is_plan(text: str) -> bool:
    """Whether PLAN or MODEL is a file; the description of a model may be longer than names can be."""
    try:
        return Path(text).suffix == ".json" or Path(text).is_file()
    except OSError:
        return False


def of_file(path: Path, model: str | None) -> tuple[Plan, VerifiedModel, Graph]:
    """A plan and the model that it is for, traced as the plan was: with or without a padding mask, in its dtype.

    Args:
        model: where the plan does not say it.

    Raises:
        PlanError: the plan is for another model.
    """
    plan = Plan.load(path)
    name = model or model_of(plan, path)
    source = resolve_model(name, sequence_length=sequence_of(plan, name))
    graphs = {
        masked: VerifiedModel(source, masked).trace(
            plan.precision, global_batch_size=plan.global_batch_size, opaque=plan.opaque, as_trained=True
        )
        for masked in (False, True)
    }
    for masked, graph in graphs.items():
        if graph.fingerprint == plan.model.fingerprint:
            return plan, VerifiedModel(source, masked), graph
    check_model(plan, graphs[False].name, graphs[False].fingerprint, place=str(path))
    raise InternalError("A plan is for a model that has another fingerprint")


def of_model(
    name: str,
    cluster: Cluster | None,
    *,
    pins: Sequence[str],
    global_batch_size: int | None,
    sequence: int | None,
    opaque: Sequence[str],
    progress: Progress | None = None,
) -> tuple[Plan, VerifiedModel, Graph]:
    """The best plan for the model traced with a padding mask, under the pins.

    Links count as free: a small model on slow links is best not split at all, which would verify nothing.
    """
    from autopar.planner.planner import Planner
    from autopar.planner.search import Limits, task_of
    from autopar.planner.space.pins import Pins

    if cluster is None:
        raise UsageError(
            f"No cluster to verify '{name}' on, and no plan file of that name",
            fix="Give a plan file, or write --cluster cpu:1x4",
        )
    free = with_free_links(cluster)
    opaque = [*opaque, *Pins.parse(pins).opaque]
    source = resolve_model(name, sequence_length=sequence)
    tokens = source.example_inputs.get("input_ids")
    if sequence is None and not is_factory(name) and tokens is not None and tokens.shape[1] > DEFAULT_TOKENS:
        source = resolve_model(name, sequence_length=DEFAULT_TOKENS)
    subject = VerifiedModel(source, masked=True)
    samples = global_batch_size or DEFAULT_SAMPLES * free.world_size
    graph = subject.trace(global_batch_size=samples, opaque=opaque)
    request = Request(cluster=free, global_batch_size=samples, opaque=opaque, pins=pins)
    plan = Planner(task_of(graph, request, progress)).search(limits=Limits(), progress=progress)
    return plan, subject, graph
