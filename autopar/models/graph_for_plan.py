"""Traces a model to the graph that plans of one precision and global batch are for, and caches graphs on disk.

Tracing a large model takes ten times as long as searching a plan for it, and searches are repeated with other pins and clusters. Graphs of
families and of Hugging Face model types are cached. The name of a cached file is a hash of all that the graph depends on: the description
of the model, the versions of torch and transformers, the source files of the model type, and the sources of autopar. A factory or a local
folder may have changed in ways that cannot be seen, and is traced every time.
"""

from __future__ import annotations

import hashlib
import os
import pickle
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.utils import _pytree as pytree

from autopar.errors import RuleError, TraceError, UsageError, shown
from autopar.graph.graph import Graph
from autopar.ops.opaque import deep_copy
from autopar.plan.plan import PRECISIONS, Precision
from autopar.rules.missing import complete
from autopar.rules.sample_order import by_sample
from autopar.tracing.batch import size_of
from autopar.tracing.failures import EXPORTS, FAILURES, not_copied
from autopar.tracing.model_with_loss import LossFunction, check_memory
from autopar.tracing.sample_counts import CountError
from autopar.tracing.trace import trace
from autopar.util.files import sources

Inputs = Mapping[str, Any] | Sequence[Any] | torch.Tensor


def samples_of(example_inputs: Inputs | None) -> int | None:
    """Return the number of samples in example inputs (see :func:`autopar.tracing.batch.size_of`); None if there are no inputs."""
    return None if example_inputs is None else size_of(plain(example_inputs))


def plain(inputs: Inputs) -> dict[str, Any] | list[Any]:
    """Return the inputs as a dict or list, as pytrees take other mappings (a ``BatchEncoding``) for a single value.

    A tensor becomes a list of one input, as iterating over it would yield its rows.
    """
    if isinstance(inputs, torch.Tensor):
        return [inputs]
    is_named = isinstance(inputs, Mapping) and all(isinstance(name, str) for name in inputs)
    if isinstance(inputs, str) or not (is_named or isinstance(inputs, Sequence)):
        raise UsageError(
            f"The example inputs are {shown(inputs)}",
            fix="Give a batch: a dict of tensors by the names of forward's parameters, a list of them in order, or one tensor",
        )
    return dict(inputs) if isinstance(inputs, Mapping) else list(inputs)


def _mapped(change: Callable[[torch.Tensor], torch.Tensor], inputs: Inputs) -> dict[str, Any] | list[Any]:
    """Return the inputs with ``change`` applied to every tensor."""
    result: dict[str, Any] | list[Any] = pytree.tree_map_only(torch.Tensor, change, plain(inputs))
    return result


def _with_samples(inputs: Inputs, samples: int | None) -> dict[str, Any] | list[Any]:
    """Return the inputs cut to two samples, or on meta with ``samples`` samples; a graph must not depend on the size of the example."""
    size = samples_of(inputs)

    def cut(value: torch.Tensor) -> torch.Tensor:
        if not (value.dim() > 0 and value.shape[0] == size):
            return value
        if samples is None:
            return value[:2]
        return torch.empty((samples, *value.shape[1:]), dtype=value.dtype, device="meta")

    return _mapped(cut, inputs)


def trace_model(  # noqa: PLR0913  what a graph depends on
    model: torch.nn.Module,
    example_inputs: Inputs | None,
    precision: Precision,
    *,
    global_batch_size: int | None = None,
    name: str = "",
    loss_fn: LossFunction | None = None,
    opaque: Sequence[str] = (),
    evaluates: bool = True,
    samples_apart: Callable[[Graph], object],
) -> Graph:
    """Return the graph that plans of this model, precision and global batch are for. ``model`` is not changed.

    Args:
        example_inputs: a batch; None makes one from the config of a Hugging Face model.
        precision: the precision of the plan; the model is traced in its ``compute`` dtype.
        global_batch_size: samples of a step. Without it the samples of a batch must be independent.
        name: the name of the model in plans.
        loss_fn: computes the loss from the model's output and the batch.
        opaque: modules that are not traced.
        evaluates: whether its program shall evaluate too; see :func:`autopar.tracing.trace.trace`.
        samples_apart: see :func:`for_batch`.

    Raises:
        UsageError: there are no example inputs and none can be made; the model is not a module, is parallel already, or has complex
            parameters; or autocast is enabled.
        TraceError: the model cannot be traced.
    """
    _check_plain(model)
    if example_inputs is None:
        from autopar.models.resolve import example_batch_for

        example_inputs = example_batch_for(model)
    batch = example_inputs
    dtype = getattr(torch, precision.compute)
    is_cast = any(p.is_floating_point() and p.dtype != dtype for p in model.parameters())
    if is_cast:
        model = on_meta(model, dtype)

    def trace_at(samples: int | None) -> Graph:
        inputs = _with_samples(batch, samples)
        if is_cast or precision.compute != "float32":
            inputs = _mapped(lambda value: value.to(dtype) if value.is_floating_point() else value, inputs)
        args, kwargs = ((), inputs) if isinstance(inputs, dict) else (tuple(inputs), {})
        is_exact, examples = samples is not None, plain(batch)
        return trace(model, args, kwargs, name=name, loss_fn=loss_fn, opaque=opaque, examples=examples, exact=is_exact,
                     evaluates=evaluates)  # fmt: skip

    def ordered_at(samples: int | None) -> Graph:
        graph = trace_at(samples)
        complete(graph)
        ordered, changes = by_sample(graph)
        if samples is None and changes and not _are_alike(changes, partial(trace_at, 2 * graph.batch_size)):
            return graph  # by chance, sizes of the model are those of the batch
        return ordered

    return ordered_at(None) if global_batch_size is None else for_batch(ordered_at, global_batch_size, samples_apart)


def _are_alike(changes: tuple[object, ...], larger: Callable[[], Graph]) -> bool:
    """Return whether a trace at a larger batch size has the same changes of the order of rows; False if there is no such trace."""
    try:
        graph = larger()
        complete(graph)
    except (TraceError, RuleError):
        return False
    return by_sample(graph)[1] == changes


def for_batch(
    trace_at: Callable[[int | None], Graph], global_batch_size: int, samples_apart: Callable[[Graph], object]
) -> Graph:
    """Trace a model, whether its samples are independent or not.

    Args:
        trace_at: traces the model exactly at a number of samples, or for any number if it is None.
        global_batch_size: the number of samples at which the model is traced again if samples depend on each other, as shapes like [B, B]
            and numbers like B - 1 then hold for one batch size only.
        samples_apart: raises :class:`~autopar.errors.RuleError` if samples of the graph depend on each other. The planner looks for a
            typing of axis ``batch`` (:func:`autopar.planner.sharding.input_axes.samples_apart`); a given plan has that typing already.

    Raises:
        TraceError: ``trace_at`` fails.
        RuleError: samples depend on each other, and the global batch is one sample.
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
        if "aten.select.int" in error.where:
            note += " (write a loop over samples as torch.vmap(function)(x), which leaves them apart)"
        if any(f"aten.{kind}" in error.where for kind in ("lstm", "gru", "rnn", "scaled_dot_product_attention")):
            note += " (dim 0 of the inputs is that of samples: give them samples first, and transpose in forward)"
        return replace(graph, mixing=error.where, notes=(*graph.notes, note))
    return graph


def _at_any_size(trace_at: Callable[[int | None], Graph], global_batch_size: int) -> Graph:
    """Return a trace at two samples, or at the global batch if operators fail on so few (a loss over the ten largest values, say).

    Raises:
        TraceError: neither batch size can be traced; the error is that of two samples.
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
    """Check that the model is one for a single device, and that the caller has not enabled autocast, which a trace would record.

    Raises:
        UsageError: names the violated condition.
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
    sharded = next((name for name, p in model.named_parameters() if isinstance(p, DTensor)), None)
    if wrapped is not None or sharded is not None:
        raise UsageError(
            f"The parameter {sharded} is a DTensor already"
            if wrapped is None
            else f"The model is wrapped in {type(wrapped).__name__}",
            fix="Pass the model before it is made parallel (DistributedDataParallel, fully_shard, parallelize_module ...)",
        )
    complex_parameter = next(((name, p.dtype) for name, p in model.named_parameters() if p.is_complex()), None)
    if complex_parameter is not None:
        raise UsageError.unsupported(
            f"A parameter of dtype {str(complex_parameter[1]).removeprefix('torch.')}",
            where=complex_parameter[0],
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
    """Return a copy of the model with its parameters on meta, so that they take no memory; floating-point parameters have ``dtype``.

    Buffers are cast too if they have the dtype of some parameter, except those in float32: statistics and positions are in single
    precision on purpose.

    Raises:
        TraceError: parameters share memory, or the model cannot be copied.
    """
    check_memory(model)
    memo: dict[int, Any] = {}
    parameter_dtypes = {p.dtype for p in model.parameters() if p.is_floating_point()} - {torch.float32}
    for parameter in model.parameters():
        new_dtype = dtype if parameter.is_floating_point() else parameter.dtype
        empty = torch.empty_like(parameter, dtype=new_dtype, device="meta")
        memo[id(parameter)] = torch.nn.Parameter(empty, requires_grad=parameter.requires_grad)
    for buffer in model.buffers():
        if buffer.dtype in parameter_dtypes and buffer.dtype != dtype:
            memo[id(buffer)] = buffer.detach().to(dtype)
    for module in model.modules():
        for value in vars(module).values():
            if isinstance(value, torch.Tensor) and not value.is_leaf:  # computed from parameters, as by weight_norm
                memo[id(value)] = value.detach().to(dtype if value.dtype in parameter_dtypes else value.dtype)
    try:
        return deep_copy(model, memo)
    except FAILURES as error:
        raise not_copied(error, model) from error


MAX_FILES = 64
"""The number of graphs in the cache; the least recently used ones are removed. A graph takes about a megabyte."""


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
    """Return the graph that plans of a MODEL description are for, from the cache if it is there.

    Args:
        model: the description; see :mod:`autopar.models.resolve`.
        sequence: tokens of a sample; None for the length of the model.
        precision: the name of a precision.
        opaque: modules that are not traced.
        global_batch_size: samples of a step.
        samples_apart: see :func:`for_batch`.
        cache_dir: graphs are cached in its folder ``graphs``.
        advance: called with (what, done, total) before the model is traced.

    Raises:
        UsageError: the precision is unknown, or ``resolve_model`` refuses the description.
        TraceError: the model cannot be traced.
    """
    if precision not in PRECISIONS:
        raise UsageError.unknown("precision", precision, PRECISIONS)
    recipe, folder = PRECISIONS[precision], cache_dir / "graphs"
    options = f"{sequence} tokens, {recipe.compute}, opaque {list(opaque)}"
    names = (_file_name(model, options), _file_name(model, f"{options}, global batch {global_batch_size}"))
    files = [folder / name for name in names] if _is_cacheable(model) else []
    for file in files:
        if (cached := _load(file)) is not None:
            return cached
    from autopar.models.resolve import resolve_model

    advance("tracing the model", 0, 0)
    source = resolve_model(model, sequence_length=sequence)
    graph = trace_model(source.model, source.example_inputs, recipe, name=source.name, opaque=opaque,
                        global_batch_size=global_batch_size, evaluates=False, samples_apart=samples_apart)  # fmt: skip
    if files:
        _save(graph, files[graph.exact])
    return graph


def _is_cacheable(model: str) -> bool:
    """Return whether a description determines the model: it is a family or a model type, not a factory or a folder."""
    from autopar.models.resolve import is_factory

    kind, _, rest = model.partition(":")
    return not is_factory(model) and not (kind == "hf" and Path(rest.partition("?")[0]).exists())


def _file_name(model: str, options: str) -> str:
    """Return the name of the file in which the graph of a model is cached."""
    parts = [model, options, sources(), version("torch"), *_transformers_state(model)]
    return f"{hashlib.sha256(repr(parts).encode()).hexdigest()[:32]}.pickle"


def _transformers_state(model: str) -> list[str]:
    """Return the version of transformers, and the names, sizes and times of the model type's files; empty if it is not installed."""
    from autopar.models.specs import FAMILIES

    kind, _, rest = model.partition(":")
    name = FAMILIES[kind][0] if kind in FAMILIES else rest.partition("?")[0].replace("-", "_")
    package = find_spec("transformers")
    if package is None or package.origin is None:
        return []
    stats = [(file.name, file.stat()) for file in sorted(Path(package.origin).parent.glob(f"models/{name}/*.py"))]
    return [version("transformers"), *(f"{n} {s.st_size} {s.st_mtime_ns}" for n, s in stats)]


def _load(file: Path) -> Graph | None:
    """Return the graph in a file; None if there is no file or it cannot be read."""
    try:
        graph = pickle.loads(file.read_bytes())
        os.utime(file)  # marks the file as used
    except (OSError, pickle.UnpicklingError, EOFError, AttributeError, ImportError, TypeError, ValueError):
        return None
    return graph if isinstance(graph, Graph) else None


def _save(graph: Graph, file: Path) -> None:
    """Write a graph to the cache, and remove the least recently used ones; a cache that cannot be written is ignored."""
    with suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=file.parent, suffix=".new", delete=False) as new:
            new.write(pickle.dumps(graph))
        Path(new.name).replace(file)
        by_use = sorted(file.parent.glob("*.pickle"), key=lambda path: path.stat().st_mtime_ns)
        for old in by_use[:-MAX_FILES]:
            old.unlink(missing_ok=True)
