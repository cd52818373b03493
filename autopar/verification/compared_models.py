"""The models that are compared with their batches and graphs: a model of the command line or of a plan file, or a user's module."""

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

from autopar.errors import UsageError, reason
from autopar.graph.graph import Graph
from autopar.hardware.cluster import Cluster
from autopar.hardware.describe import with_free_links
from autopar.models.graph_for_plan import plain, samples_of, trace_model
from autopar.models.inputs import order_of_samples
from autopar.models.resolve import ModelSource, is_factory, model_of, random_example_for, resolve_model, sequence_of
from autopar.ops.opaque import deep_copy, without_dropout
from autopar.plan.check import check_model
from autopar.plan.plan import FP32, Plan, Precision
from autopar.request import Request
from autopar.tracing.batch import named_batch

if TYPE_CHECKING:
    from autopar.planner.search import Progress


_NOISE = 0.02
"""Standard deviation of the noise that is added to each parameter."""


def with_noise(model: torch.nn.Module) -> torch.nn.Module:
    """Return the same model with noise added to each parameter in place, the same noise each time."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator) * _NOISE
            parameter.add_(noise.to(parameter.dtype))
    return model


@dataclass(frozen=True)
class VerifiedModel:
    """A model of the command line, whose batches hold only the inputs that were traced. Every process makes the same one.

    Attributes:
        source: the resolved model.
        masked: whether the padding mask is one of the inputs. Labels after the end of a sample are ignored in either case.
    """

    source: ModelSource
    masked: bool

    def build(self, *, drops: bool = False) -> torch.nn.Module:
        """Return the model on CPU. No parameter is left at zero or one, where a wrong sum or factor would not show."""
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
        """Return the graph on such batches.

        Args:
            precision: the precision of the plans that the graph is for.
            global_batch_size: the size at which a model is traced whose samples depend on each other; without it they must be independent.
            opaque: modules that are not traced.
            as_trained: whether to keep dropout, as plans for training do. By default a model that draws random numbers is traced without
                dropout, since processes draw different ones.
        """
        from autopar.graph.operator_kinds import draws_random
        from autopar.planner.sharding.input_axes import samples_apart

        batch = self.make_batch(self.source.batch_size, seed=0)
        options: dict[str, Any] = {"name": self.source.name, "opaque": opaque, "global_batch_size": global_batch_size}
        traced = partial(trace_model, example_inputs=batch, precision=precision, samples_apart=samples_apart)
        graph = traced(self.source.model, **options)
        if as_trained or not any(draws_random(op.target) or op.target == "autopar.dropout" for op in graph.ops):
            return graph
        model = copy.deepcopy(self.source.model)
        without_dropout(model)
        return traced(model, **options)


EXAMPLES = 8
"""Samples that are made for a model whose config describes its inputs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UserModel:
    """A user's module, or a function that builds it; picklable if the class or the function can be imported.

    Attributes:
        source: the module or function; a module is copied and stays as it is.
        examples: inputs by name, on CPU.
    """

    source: nn.Module | Callable[[], nn.Module]
    examples: Mapping[str, Any]

    def __reduce__(self) -> tuple[Any, ...]:
        file = io.BytesIO()
        _Parametrized(file).dump((self.source, self.examples))
        return _received, (file.getvalue(),)

    def build(self, *, drops: bool = False) -> nn.Module:
        """Return the model on CPU in float32, without dropout unless ``drops``; no parameter is left at zero or one."""
        model = deep_copy(build_module(self.source)).float().cpu().train()
        if not drops:
            without_dropout(model)
        return with_noise(model)

    def make_batch(self, batch_size: int, *, seed: int) -> dict[str, Any]:
        """Return samples of the examples, each about equally often, in an order that depends on the seed alone."""
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
        """Return how a module is put together again; NotImplemented: in the usual way."""
        if not isinstance(value, nn.Module) or not parametrize.is_parametrized(value):
            return NotImplemented
        kind = parametrize.type_before_parametrizations(value)
        # weight_norm has such a hook, a function in a function
        state = vars(value) | {"_load_state_dict_pre_hooks": OrderedDict()}
        return kind.__new__, (kind,), state, None, None, _set


def _set(module: Any, state: dict[str, Any]) -> None:
    """Give a module what it holds, and the properties that compute its parametrized tensors."""
    module.__setstate__(state)
    parametrize._inject_new_class(module)
    for name in module.parametrizations:
        parametrize._inject_property(module, name)


def _received(sent: bytes) -> UserModel:
    source, examples = pickle.loads(sent)
    return UserModel(source=source, examples=examples)


def build_module(source: nn.Module | Callable[[], nn.Module]) -> nn.Module:
    """Return the module itself, or what the function makes, which is the same each time.

    Raises:
        UsageError: it is neither, or the function returns no module.
    """
    if isinstance(source, nn.Module):
        return source
    problem = f"A {type(source).__name__} is no model"
    expected = "a torch.nn.Module, or a function without arguments that returns one"
    fix = "Give the model that trains on one device"
    if callable(source):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model: object = source()
        if isinstance(model, nn.Module):
            return model
        problem = f"The function {getattr(source, '__name__', source)} returns a {type(model).__name__}"
        expected, fix = "a torch.nn.Module", "Return the model that trains on one device"
    raise UsageError(problem, expected=expected, fix=fix)


def user_model(
    source: nn.Module | Callable[[], nn.Module], model: nn.Module, plan: Plan, example_inputs: Any
) -> UserModel:
    """Return a model that can be compared under a plan.

    Args:
        source: a module, or a function that builds it.
        model: the result of :func:`build_module` for it.
        plan: the plan that it is compared under.
        example_inputs: a batch by name or in order; without it one is made from the config of a Hugging Face model.

    Raises:
        UsageError: the model is on the meta device; one sample is given for several data ranks; or other processes cannot import the class
            of the model.
    """
    if any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers())):
        raise UsageError(
            "A model on the meta device has no weights to train with",
            fix="Build it on the CPU, or give a function that builds it there",
        )
    inputs = plain(random_example_for(model, batch_size=EXAMPLES) if example_inputs is None else example_inputs)
    named = named_batch(model, (), inputs) if isinstance(inputs, dict) else named_batch(model, tuple(inputs), {})
    examples = pytree.tree_map_only(Tensor, lambda value: value.detach().cpu(), named)
    if plan.mesh.data > 1 and samples_of(examples) == 1:
        raise UsageError(
            f"One example is too few for {plan.mesh.data} data ranks, which would all train on it",
            fix="Give example inputs with several different samples",
        )
    user_model = UserModel(source=source, examples=examples)
    _check_sent(user_model)
    return user_model


def _is_typed_in(source: nn.Module | Callable[[], nn.Module]) -> bool:
    """Return whether a module's class, or a function, was defined in an interactive session, where other processes cannot import it."""
    modules = {type(m).__module__ for m in source.modules()} if isinstance(source, nn.Module) else {source.__module__}
    return "__main__" in modules and not Path(getattr(sys.modules["__main__"], "__file__", "")).is_file()


def _check_sent(model: UserModel) -> None:
    """Check that the model can be sent to the processes that run as ranks.

    Raises:
        UsageError: the model cannot be pickled; the error says why.
    """
    try:
        if _is_typed_in(model.source):
            raise pickle.PicklingError(f"{type(model.source).__name__} was typed in, and stands in no file")
        pickle.dumps(model)
    except Exception as error:  # classes of users and of torch.nn.utils refuse to be pickled by errors of any class
        raise UsageError(
            "The model cannot be sent to the processes that play the ranks",
            got=reason(error),
            fix="Define its class in a module, or give a function of a module that builds it",
        ) from error


DEFAULT_TOKENS, DEFAULT_SAMPLES = 32, 4
"""Length of a sample in tokens, and samples of a rank; more would not make a comparison more certain."""


def is_plan(text: str) -> bool:
    """Return whether the argument PLAN or MODEL is a file. The description of a model may be longer than file names can be."""
    try:
        return Path(text).suffix == ".json" or Path(text).is_file()
    except OSError:
        return False


def of_file(path: Path, model: str | None) -> tuple[Plan, VerifiedModel, Graph]:
    """Return a plan, the model that it is for, and the graph, traced as for the plan: with or without a padding mask, in its dtype.

    Args:
        path: the plan file.
        model: the model, where the plan does not name it.

    Raises:
        PlanError: the plan is for another model.
    """
    plan = Plan.load(path)
    name = model or model_of(plan, path)
    source = resolve_model(name, sequence_length=sequence_of(plan, name))
    for masked in (True, False):
        subject = VerifiedModel(source, masked)
        graph = subject.trace(
            plan.precision, global_batch_size=plan.global_batch_size, opaque=plan.opaque, as_trained=True
        )
        if graph.fingerprint == plan.model.fingerprint:
            break
    check_model(plan, graph.name, graph.fingerprint, place=str(path))
    return plan, subject, graph


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
    """Return the best plan under the pins for a model traced with a padding mask, the model, and its graph.

    Communication is free in this search. With the true links a small model would often not be split at all, which would verify nothing.

    Raises:
        UsageError: no cluster is given.
    """
    from autopar.planner.planner import Planner
    from autopar.planner.search import Limits, task_of
    from autopar.planner.space.pins import Pins

    if cluster is None:
        raise UsageError(
            f"No cluster to verify '{name}' on, and no plan file of that name",
            fix="Give a plan file, or write --cluster cpu:1x4",
        )
    free_links_cluster = with_free_links(cluster)
    opaque = [*opaque, *Pins.parse(pins).opaque]
    source = resolve_model(name, sequence_length=sequence)
    tokens = source.example_inputs.get("input_ids")
    if sequence is None and not is_factory(name) and tokens is not None and tokens.shape[1] > DEFAULT_TOKENS:
        source = resolve_model(name, sequence_length=DEFAULT_TOKENS)
    subject = VerifiedModel(source, masked=True)
    samples = global_batch_size or DEFAULT_SAMPLES * free_links_cluster.world_size
    graph = subject.trace(global_batch_size=samples, opaque=opaque)
    request = Request(cluster=free_links_cluster, global_batch_size=samples, opaque=opaque, pins=pins)
    plan = Planner(task_of(graph, request, progress)).search(limits=Limits(), progress=progress)
    return plan, subject, graph
