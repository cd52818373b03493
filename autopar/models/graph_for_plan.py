"""From a model and a batch to the graph that plans of a precision and a global batch are for, and graphs kept in the cache directory.

To trace a large model takes ten times as long as to search a plan for it, and a search is repeated with other pins and
clusters. Kept are graphs of families and of Hugging Face model types: what they depend on is in their name, which is a hash
of the description, the versions of torch and transformers, the model type's files and autopar's own sources. A factory or a
folder may have changed in any way and is traced each time.
"""

from __future__ import annotations

import hashlib
import os
import pickle
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.utils import _pytree as pytree

from autopar.errors import RuleError, TraceError, UsageError
from autopar.graph.graph import Graph
from autopar.ops.opaque import deep_copy
from autopar.plan.plan import PRECISIONS, Plan, Precision
from autopar.rules.missing import complete
from autopar.tracing.batch import size_of
from autopar.tracing.failures import EXPORTS, FAILURES, not_copied
from autopar.tracing.repeated_steps import CountError
from autopar.tracing.side_effects import check_memory
from autopar.tracing.trace import LossFunction, trace
from autopar.util.files import sources

Inputs = Mapping[str, Any] | Sequence[Any] | torch.Tensor


def samples_of(example_inputs: Inputs | None) -> int | None:
    """Samples in example inputs, as :func:`autopar.tracing.batch.size_of` counts them; None where there are no inputs."""
    return None if example_inputs is None else size_of(_plain(example_inputs))


def _plain(inputs: Inputs) -> dict[str, Any] | list[Any]:
    """The same as a dict or list: what else maps names to values (a ``BatchEncoding``) is one value to pytrees.

    A tensor is the only input: its rows would be taken for several ones.
    """
    if isinstance(inputs, torch.Tensor):
        return [inputs]
    if not isinstance(inputs, Mapping | Sequence) or isinstance(inputs, str):
        raise UsageError(
            f"The example inputs are a {type(inputs).__name__}",
            fix="Give a batch: a dict of tensors by the names of forward's parameters, a list of them in order, or one tensor",
        )
    return dict(inputs) if isinstance(inputs, Mapping) else list(inputs)


def _mapped(change: Callable[[torch.Tensor], torch.Tensor], inputs: Inputs) -> dict[str, Any] | list[Any]:
    """The inputs with every tensor changed."""
    found: dict[str, Any] | list[Any] = pytree.tree_map_only(torch.Tensor, change, _plain(inputs))
    return found


def _with_samples(inputs: Inputs, samples: int | None) -> dict[str, Any] | list[Any]:
    """Two samples of a batch (graphs, and so plans, do not depend on the size of the example), or so many, on meta."""
    size = samples_of(inputs)

    def cut(value: torch.Tensor) -> torch.Tensor:
        if not (value.dim() > 0 and value.shape[0] == size):
            return value
        if samples is None:
            return value[:2]
        return torch.empty((samples, *value.shape[1:]), dtype=value.dtype, device="meta")

    return _mapped(cut, inputs)


def trace_model(
    model: torch.nn.Module,
    example_inputs: Inputs | None,
    precision: Precision,
    *,
    global_batch_size: int | None = None,
    name: str = "",
    loss_fn: LossFunction | None = None,
    opaque: Sequence[str] = (),
    samples_apart: Callable[[Graph], object],
) -> Graph:
    """The graph that plans of this model, precision and global batch are for; ``model`` itself stays as it is.

    Without a global batch its samples must be apart.

    Args:
        samples_apart: see :func:`for_batch`.

    Raises:
        UsageError: no example inputs, and none can be made; the model is none, is parallel already, or has complex parameters;
            autocast is on.
        TraceError: the model cannot be traced.
    """
    _check_plain(model)
    if example_inputs is None:
        from autopar.models.resolve import example_batch_for

        example_inputs = example_batch_for(model)
    given = example_inputs
    dtype = getattr(torch, precision.compute)
    is_cast = any(p.is_floating_point() and p.dtype != dtype for p in model.parameters())
    if is_cast:
        model = on_meta(model, dtype)

    def trace_at(samples: int | None) -> Graph:
        inputs = _with_samples(given, samples)
        if is_cast or precision.compute != "float32":
            inputs = _mapped(lambda value: value.to(dtype) if value.is_floating_point() else value, inputs)
        options: dict[str, Any] = {"name": name, "loss_fn": loss_fn, "opaque": opaque, "exact": samples is not None}
        if isinstance(inputs, Mapping):
            return trace(model, (), inputs, **options)
        return trace(model, tuple(inputs), {}, **options)

    return trace_at(None) if global_batch_size is None else for_batch(trace_at, global_batch_size, samples_apart)


def for_batch(
    trace_at: Callable[[int | None], Graph], global_batch_size: int, samples_apart: Callable[[Graph], object]
) -> Graph:
    """A traced model, whether its samples are apart or not.

    Args:
        trace_at: traces it: at the given number of samples, exactly, or at any (None).
        global_batch_size: at which it is traced again where samples meet, because shapes such as [B, B] and numbers
            such as B - 1 hold for one batch size alone.
        samples_apart: raises :class:`~autopar.errors.RuleError` where they are not. The planner asks its typing of axis ``batch``
            (:func:`autopar.planner.sharding.input_axes.samples_apart`), who has a plan asks that.

    Raises:
        TraceError: of ``trace_at``.
    """
    try:
        graph = _at_any_size(trace_at, global_batch_size)
        complete(graph)
        samples_apart(graph)
    except (CountError, RuleError):
        if global_batch_size == 1:
            raise
    else:
        return graph
    graph = trace_at(global_batch_size)
    complete(graph)
    try:
        samples_apart(graph)
    except RuleError as error:
        note = (
            f"samples meet in {error.where}: each data rank takes all its samples in one micro-batch, and where they "
            "meet they are gathered from all data ranks"
        )
        return replace(graph, mixing=error.where, notes=(*graph.notes, note))
    return graph


def _at_any_size(trace_at: Callable[[int | None], Graph], global_batch_size: int) -> Graph:
    """A trace at two samples; at the global batch where operators do not run on as few (the ten largest losses, say).

    Raises:
        TraceError: of the first one, where no batch can be traced.
    """
    try:
        return trace_at(None)
    except TraceError as error:
        if global_batch_size <= 2 or EXPORTS not in error.problem:
            raise
        try:
            return trace_at(global_batch_size)
        except TraceError:
            raise error from None


def _check_plain(model: torch.nn.Module) -> None:
    """Refuses what is no model of one device, and a caller's autocast, which a trace would take for a part of the model.

    Raises:
        UsageError: says which of them it is.
    """
    if not isinstance(model, torch.nn.Module):
        raise UsageError(
            f"The model is the class {model.__qualname__}, not an instance of it"
            if isinstance(model, type)
            else f"The model is a {type(model).__qualname__}, not a torch.nn.Module",
            fix="Pass the model that trains on one device",
        )
    from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel  # slow to import
    from torch.distributed.tensor import DTensor

    parallel = (DataParallel, DistributedDataParallel, FSDPModule, FullyShardedDataParallel)
    wrapped = next((m for m in model.modules() if isinstance(m, parallel)), None)
    split = next((name for name, p in model.named_parameters() if isinstance(p, DTensor)), None)
    if wrapped is not None or split is not None:
        raise UsageError(
            f"The parameter {split} is a DTensor already"
            if wrapped is None
            else f"The model is wrapped in {type(wrapped).__name__}",
            fix="Pass the model before it is made parallel (DistributedDataParallel, fully_shard, parallelize_module ...)",
        )
    numbers = next(((name, p.dtype) for name, p in model.named_parameters() if p.is_complex()), None)
    if numbers is not None:
        raise UsageError.unsupported(
            f"A parameter of dtype {str(numbers[1]).removeprefix('torch.')}",
            where=numbers[0],
            instead="Keep a real parameter whose last dim is 2, and use torch.view_as_complex(parameter) in forward",
        )
    device = next((kind for kind in ("cpu", "cuda") if torch.is_autocast_enabled(kind)), None)
    if device is not None:
        dtype = str(torch.get_autocast_dtype(device)).removeprefix("torch.")
        raise UsageError(
            f"The model cannot be traced inside torch.autocast({device!r}, dtype={dtype})",
            fix='Leave autocast out, and choose the precision of the plan: precision="bf16"',
        )


def on_meta(model: torch.nn.Module, dtype: torch.dtype) -> torch.nn.Module:
    """A copy on meta whose floating parameters have ``dtype``, and the buffers that had theirs; no memory is taken for parameters.

    Buffers in single precision stay so whatever parameters had: statistics and positions are kept in it on purpose.

    Raises:
        TraceError: parameters share memory, or the model cannot be copied.
    """
    check_memory(model)
    memo: dict[int, Any] = {}
    own = {p.dtype for p in model.parameters() if p.is_floating_point()} - {torch.float32}
    for parameter in model.parameters():
        kind = dtype if parameter.is_floating_point() else parameter.dtype
        empty = torch.empty_like(parameter, dtype=kind, device="meta")
        memo[id(parameter)] = torch.nn.Parameter(empty, requires_grad=parameter.requires_grad)
    for buffer in model.buffers():
        if buffer.dtype in own and buffer.dtype != dtype:
            memo[id(buffer)] = buffer.detach().to(dtype)
    for module in model.modules():
        for value in vars(module).values():
            if isinstance(value, torch.Tensor) and not value.is_leaf:  # made of parameters: a normed weight
                memo[id(value)] = value.detach().to(dtype if value.dtype in own else value.dtype)
    try:
        return deep_copy(model, memo)
    except FAILURES as error:
        raise not_copied(error, model) from error


def is_factory(model: str) -> bool:
    """Whether MODEL is ``package.module:factory``, which decides its own sequence length.

    >>> is_factory("my.models:net"), is_factory("hf:gpt2")
    (True, False)
    """
    from autopar.models.specs import FAMILIES  # transformers' names are slow to import

    return model.partition(":")[0] not in ("hf", *FAMILIES)


def model_of(plan: Plan, file: Path) -> str:
    """The MODEL that a plan was made from, where its name says it.

    Raises:
        UsageError: the plan was made in Python for a model without such a name.
    """
    if ":" not in plan.model.name:
        raise UsageError(
            f"The plan's model '{plan.model.name}' is no MODEL of the command line",
            where=str(file),
            fix="Say which model with --model",
        )
    return plan.model.name


def sequence_of(plan: Plan, model: str) -> int | None:
    """The length of the sequences of a plan's model; None for a factory and for a model that does not take tokens."""
    tokens = plan.model.tokens_per_sample
    return None if is_factory(model) or tokens < 2 else tokens


MAX_FILES = 64
"""Graphs that are kept, those that were used last; one takes about a megabyte."""


def traced(
    model: str,
    *,
    sequence: int | None,
    precision: str,
    opaque: Sequence[str],
    global_batch_size: int,
    samples_apart: Callable[[Graph], object],
    cache_dir: Path,
    advance: Callable[[str, int, int], None] = lambda what, done, total: None,
) -> Graph:
    """The graph that plans of a MODEL are for.

    Args:
        samples_apart: see :func:`autopar.models.graph_for_plan.for_batch`.
        cache_dir: whose folder ``graphs`` keeps them.

    Raises:
        UsageError: an unknown precision; whatever else ``resolve_model`` refuses.
        TraceError: the model cannot be traced.
    """
    if precision not in PRECISIONS:
        raise UsageError.unknown("precision", precision, PRECISIONS)
    recipe, folder = PRECISIONS[precision], cache_dir / "graphs"
    files = [folder / _name(f"{own}, {sequence} tokens, {recipe.compute}, opaque {list(opaque)}")
             for own in (model, f"{model} at {global_batch_size}")] if _is_told(model) else []  # fmt: skip
    for file in files:
        if (kept := _load(file)) is not None:
            return kept
    from autopar.models.resolve import resolve_model

    advance("tracing the model", 0, 0)
    found = resolve_model(model, sequence_length=sequence)
    graph = trace_model(found.model, found.example_inputs, recipe, name=found.name, opaque=opaque,
                        global_batch_size=global_batch_size, samples_apart=samples_apart)  # fmt: skip
    if files:
        _keep(graph, files[graph.exact])
    return graph


def _is_told(model: str) -> bool:
    """Whether a description says all about a model."""
    from autopar.models.specs import FAMILIES

    kind, _, rest = model.partition(":")
    return kind in FAMILIES or (kind == "hf" and not Path(rest.partition("?")[0]).exists())


def _name(described: str) -> str:
    parts = [described, sources(), version("torch"), *_of_transformers(described)]
    return f"{hashlib.sha256(repr(parts).encode()).hexdigest()[:32]}.pickle"


def _of_transformers(described: str) -> list[str]:
    """The version of transformers and the files of a model type, where it is one."""
    kind, _, rest = described.partition(":")
    if kind != "hf":
        return []
    with suppress(PackageNotFoundError):
        package = find_spec("transformers")
        root = Path(package.origin).parent if package is not None and package.origin else Path()
        name = rest.partition("?")[0].partition(",")[0].replace("-", "_")
        files = sorted((root / "models" / name).glob("*.py"))
        stats = [(file.name, file.stat()) for file in files]
        return [version("transformers"), *(f"{n} {s.st_size} {s.st_mtime_ns}" for n, s in stats)]
    return []


def _load(file: Path) -> Graph | None:
    """What is kept there; nothing where it is not, or cannot be read."""
    try:
        found = pickle.loads(file.read_bytes())
        os.utime(file)
    except (OSError, pickle.UnpicklingError, EOFError, AttributeError, ImportError, TypeError, ValueError):
        return None
    return found if isinstance(found, Graph) else None


def _keep(graph: Graph, file: Path) -> None:
    """A cache that cannot be written is none."""
    with suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=file.parent, suffix=".new", delete=False) as new:
            new.write(pickle.dumps(graph))
        Path(new.name).replace(file)
        kept = sorted(file.parent.glob("*.pickle"), key=lambda path: path.stat().st_mtime_ns)
        for old in kept[:-MAX_FILES]:
            old.unlink(missing_ok=True)
