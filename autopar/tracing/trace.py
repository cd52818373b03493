"""Tracing: a model and a batch become a :class:`Graph`; no weight is allocated."""

from __future__ import annotations

import inspect
import io
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx._lazy_graph_module import _use_lazy_graph_module
from torch.utils import _pytree as pytree

from autopar.errors import TraceError
from autopar.graph.elements import Outputs
from autopar.graph.graph import Graph
from autopar.ops.opaque import as_trained, deep_copy
from autopar.ops.opaque import notes_of as notes_of_modes
from autopar.pins.on_modules import pins_of
from autopar.tracing import repeated_steps, sample_counts
from autopar.tracing import side_effects as memory
from autopar.tracing import value_branches as checks
from autopar.tracing.batch import arguments, fake_batch, inputs_of, named_batch
from autopar.tracing.builder import Builder
from autopar.tracing.convert import Converter, needs_decomposition, source_of
from autopar.tracing.failures import (
    EXPORTS,
    FAILURES,
    NO_AUTOCAST,
    NO_VALUES,
    explained,
    module_of_failure,
    not_copied,
    user_line,
)
from autopar.tracing.finish import finish
from autopar.tracing.forms.experts import swap_experts
from autopar.tracing.forms.layers import swap_norms
from autopar.tracing.forms.losses import over_samples
from autopar.tracing.modes import Selections, cut_off, for_products
from autopar.tracing.opaque_regions import Found, RegionError, Regions, around, notes_of, outermost, paths_of
from autopar.tracing.outputs import Calls, calls_of, counts_samples, cut, kept, needed_nodes, with_counts
from autopar.tracing.program_ends import Kept, declare, loss_output, mutations_of, with_twice, written_back
from autopar.tracing.value_branches import GuardedClamps, limit_each_sample

LossFunction = Callable[[Any, dict[str, Any]], torch.Tensor]


def trace(
    model: torch.nn.Module,
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    name: str = "",
    loss_fn: LossFunction | None = None,
    opaque: Sequence[str] = (),
    exact: bool = False,
    repeats: bool = False,
) -> Graph:
    """The forward pass of ``model`` in training, from a batch to a scalar loss, cleaned up; beside it what else ``model`` returns.

    Args:
        model: on any device, meta included; not changed, its weights never copied.
        args: positional example inputs of ``model.forward``; only shapes and dtypes matter.
        kwargs: example inputs by name. Tensors that share the size of dim 0 are the batch; a batch
            of one is doubled, so that no operator takes its size for a broadcast.
        name: of the model; its class name when empty.
        loss_fn: ``loss_fn(output, batch)`` gives the scalar loss, where the model does not. Entries
            of ``kwargs`` that ``forward`` does not take are for it alone.
        opaque: modules that are not looked into, by path, pattern or class: each is one operator that runs as it
            is written. Modules that cannot be traced become so by themselves, and a note says it.
        exact: the graph is for batches of the example's size alone: numbers may count samples, and none is doubled.
        repeats: the model is known to do the same at every step and for every batch size, so that neither is tried.

    Returns:
        The graph; batch sizes in its shapes are those of the example (or 2).

    Raises:
        TraceError: export fails, there is no scalar loss, the batch size cannot be told, or the loss
            is scaled by a number that depends on it; the place is the line of the user's code.
    """
    marks = pins_of(model)
    opaque = (*opaque, *(mark.removeprefix("opaque=") for mark in marks if mark.startswith("opaque=")))
    batch = named_batch(model, args, kwargs or {})
    paths = paths_of(model, opaque)
    memory.check_model(model)
    _check_loss(loss_fn)
    hooked = dict.fromkeys(memory.with_backward_hooks(model), "a hook on gradients, which a trace would lose")
    reasons = hooked | dict.fromkeys(paths, "it was named so")
    paths = outermost((*paths, *hooked))
    job = _Job(model=model, batch=batch, name=name, loss_fn=loss_fn, opaque=paths, reasons=reasons, repeats=repeats)
    graph, calls, job = _with_fallback(job)
    if not graph.spec(graph.loss).requires_grad:
        raise TraceError(
            "The loss depends on no parameter that is trained",
            where=type(model).__name__,
            fix="Return the loss that training minimises, and leave requires_grad on where it is to learn",
        )
    if not exact and not repeats and not sample_counts.are_same(calls, _calls(job, times=2)):
        sample_counts.check_numbers(graph, _larger(graph, job))
    notes = (*graph.notes, *notes_of_modes(model), *notes_of(graph, job.reasons))
    return replace(graph, exact=exact, pins=marks, notes=notes, outputs=_counted(graph, job, exact=exact))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Job:
    """What is traced; ``reasons``: why each opaque module is one; ``repeats``: no steps are tried; ``found``: of regions, grows."""

    model: torch.nn.Module
    batch: dict[str, Any]
    name: str
    loss_fn: LossFunction | None
    opaque: tuple[str, ...]
    reasons: Mapping[str, str]
    repeats: bool = False
    found: Found = field(default_factory=Found)


class _UntraceableError(TraceError):
    """A trace that failed inside of a module; ``path`` is its name."""

    path = ""


def _with_fallback(job: _Job) -> tuple[Graph, Sequence[sample_counts.Call], _Job]:
    """A trace, and the calls of a step, in which modules that cannot be traced are opaque, the smallest ones that will do.

    Every failure costs an export: where a second module of a class fails, all others of that class are taken to fail too.

    Raises:
        TraceError: the first failure, where no module around it can be opaque either.
    """
    causes: dict[str, TraceError] = {}
    failed: set[type] = set()
    while True:
        try:
            return *_traced(job), job
        except (_UntraceableError, RegionError) as error:
            cause: TraceError = error
            path = error.path
            if isinstance(error, RegionError):
                if path not in causes:  # the user named it
                    raise
                cause, path = causes[path], around(job.model, path)
            if path in job.opaque:  # what fails is not inside of it but done to it
                path = around(job.model, path)
            if not path or any(path == known or path.startswith(f"{known}.") for known in job.opaque):
                raise _without_region(cause, error) from error
            reason = f"{cause.short} ({cause.fix})"
            kind = type(job.model.get_submodule(path))
            paths = (path, *(_of_class(job.model, kind) if kind in failed else ()))
            if not kind.__module__.startswith("torch."):  # which run whatever they are given
                failed.add(kind)
            causes = dict.fromkeys(paths, cause) | causes | {path: cause}
            reasons = dict.fromkeys(paths, reason) | dict(job.reasons)
            job = replace(job, opaque=outermost(dict.fromkeys((*job.opaque, *paths))), reasons=reasons)


def _of_class(model: torch.nn.Module, kind: type) -> tuple[str, ...]:
    """Paths of the modules of exactly that class that hold no other one."""
    paths = [path for path, module in model.named_modules() if type(module) is kind]
    return tuple(p for p in paths if not any(q.startswith(f"{p}.") for q in paths))


def _without_region(cause: TraceError, error: TraceError) -> TraceError:
    """Why a line cannot be traced, and why the module around it cannot run as it is written either."""
    if error is cause or not isinstance(error, RegionError):
        return cause
    return cause.becoming(
        TraceError, fix=f"{cause.fix} (as an opaque module it fails too: {error.got.partition('; on fake tensors')[0]})"
    )


def _counted(graph: Graph, job: _Job, *, exact: bool) -> Outputs | None:
    """The outputs of a traced model, with the numbers in them at twice the batch size, where some may count samples."""
    outputs = graph.outputs
    if outputs is None or exact or not counts_samples(outputs):
        return outputs
    try:
        twice = _traced(job, times=2)[0].outputs
    except TraceError:  # of one batch size alone: what its numbers count nobody can tell
        twice = None
    if twice is None:
        return with_counts(outputs, replace(outputs, ops=()))
    return replace(with_counts(outputs, twice), structure=with_twice(outputs.structure, twice.structure))


def _traced(job: _Job, times: int = 1) -> tuple[Graph, Sequence[sample_counts.Call]]:
    """One trace, at ``times`` the batch size of the example; the calls of a step only at once that size."""
    model = job.model
    with _faked(job, times) as (wrapper, mode, batch, batch_size, held):
        program, kept_calls = _export(wrapper, batch, model, batch_size, held)
        if held.refused is not None:  # caught by the model, which went on as no step would
            raise _within(explained(held.refused, model), module_of_failure(held.refused, wrapper.model))
        once = times == 1 and not job.repeats
        with _quiet():
            notes, calls = repeated_steps.check(wrapper, wrapper.model, mode, batch) if once else ((), ())
        calls = calls if held.refused is None else ()
    builder = Builder()
    converter = Converter(builder)
    inputs = inputs_of(batch, batch_size)
    parameters, buffers = declare(builder, converter.env, program, model, inputs, batch)
    try:
        outputs = converter.run(program.graph_module, converter.env, grad=True)
    except TraceError as error:
        raise _within(error, converter.module) from error
    loss = over_samples(builder, loss_output(outputs, builder), inputs, batch_size)
    graph = finish(
        builder,
        name=job.name or type(model).__name__,
        batch_size=batch_size,
        inputs=inputs,
        parameters=parameters,
        buffers=buffers,
        loss=loss,
        mutations=mutations_of(program, outputs, converter.env),
    )
    found = kept(graph, builder, kept_calls, wrapper.kept, env=converter.env, declared=(*parameters, *buffers))
    return replace(graph, notes=(*graph.notes, *notes, *checks.notes_of(held)), outputs=found), calls


@contextmanager
def _faked(
    job: _Job, times: int, *, tried: bool = True
) -> Iterator[tuple[_Training, FakeTensorMode, dict[str, Any], int, checks.Held]]:
    """The model on fake tensors with opaque modules in it, their mode, and a batch of ``times`` the example's size; what checks it passes by.

    Args:
        tried: opaque modules are tried at this size; else they are taken as they were found at the example's.
    """
    mode = FakeTensorMode()
    batch, batch_size = fake_batch(job.batch, mode, times)
    wrapper = _Training(_fake_model(job.model, mode), batch, job.loss_fn)
    regions = Regions(job.model, batch_size, job.found, known_at=None if tried else batch_size // times)
    regions.swap(wrapper.model, job.opaque)
    with (
        regions.autograd_functions(),
        memory.own_gradients_refused(),
        checks.taken_to_hold() as held,
        GuardedClamps(batch_size, held.clamps),
        Selections(),
    ):
        yield wrapper, mode, batch, batch_size, held


def _larger(graph: Graph, job: _Job) -> Graph:
    """The trace at twice the batch size.

    Raises:
        CountError: there is none.
    """
    try:
        return _traced(job, times=2)[0]
    except TraceError as error:
        raise sample_counts.CountError(
            f"The model runs with {graph.batch_size} samples, but not with {2 * graph.batch_size}",
            where=error.where,
            got=error.got or error.problem,
            fix="Take sizes from the inputs: x.shape[0]",
        ) from error


def _calls(job: _Job, times: int) -> Sequence[sample_counts.Call]:
    """The calls of a step at ``times`` the batch size of the example; see :mod:`autopar.tracing.repeated_steps`."""
    with _faked(job, times, tried=False) as (wrapper, mode, batch, _, held), _quiet():
        found = repeated_steps.calls_of(wrapper, wrapper.model, mode, batch)
    return found if held.refused is None else ()


def _within(error: TraceError, path: str) -> TraceError:
    """The same error, known to come from a module; the model itself is none that could run as it is written."""
    if isinstance(error, RegionError):
        return error
    if not path:
        if not any(problem in error.problem for problem in (EXPORTS, NO_VALUES)):
            return error
        return error.becoming(
            TraceError, fix=f"{error.fix}. Or move the line into a separate module, which then runs as it is written"
        )
    found = error.becoming(_UntraceableError)
    found.path = path
    return found


# --- the model ------------------------------------------------------------------------------------


class _Training(torch.nn.Module):
    """The user's model with its loss picked out and put before the other tensors that it returns; every input by name."""

    def __init__(self, model: torch.nn.Module, batch: dict[str, Any], loss_fn: LossFunction | None) -> None:
        super().__init__()
        self.model = model
        self.loss_fn = loss_fn.__call__ if isinstance(loss_fn, torch.nn.Module) else loss_fn  # no part of the model
        self.kept = Kept()
        self.positional, self.passed = arguments(model.forward, batch)
        unused = [k for k in batch if k not in self.passed and k not in self.positional]
        if unused and loss_fn is None:
            raise TraceError(
                f"Forward does not take the example input {', '.join(unused)}",
                where=type(model).__name__,
                fix="Remove it, or give loss_fn=... that reads it",
            )

    def forward(self, **batch: Any) -> tuple[torch.Tensor, ...]:
        with written_back(self.model), for_products(self.model):
            output = self.model(*(batch[k] for k in self.positional), **{k: batch[k] for k in self.passed})
            returned = output if self.loss_fn is None else self._call_loss_fn(output, batch)
        loss = pick_loss(returned, type(self.model).__name__)
        return (loss, *self.kept.take(output, loss))

    def _call_loss_fn(self, output: Any, batch: dict[str, Any]) -> Any:
        """What ``loss_fn`` returns; errors that pass through here are explained as its own."""
        assert self.loss_fn is not None
        return self.loss_fn(output, batch)


def _check_loss(loss_fn: LossFunction | None) -> None:
    """Refuses a ``loss_fn`` that would learn, or that does not take what it is given.

    Raises:
        TraceError: says which.
    """
    if loss_fn is None:
        return
    call: Callable[..., Any] = loss_fn
    if isinstance(loss_fn, torch.nn.Module):
        call = loss_fn.forward
        trained = [name for name, parameter in loss_fn.named_parameters() if parameter.requires_grad]
        if trained:
            raise TraceError(
                f"The loss_fn has parameters ({', '.join(trained[:3])}), which no plan trains",
                where=type(loss_fn).__name__,
                fix="Make it a part of the model, whose forward returns the loss, or freeze it: loss_fn.requires_grad_(False)",
            )
    try:
        inspect.signature(call).bind(None, None)
    except TypeError as error:
        raise TraceError(
            "The loss_fn does not take (output, batch)", got=str(error), fix="Give loss_fn=lambda output, batch: ..."
        ) from None
    except ValueError:  # a builtin, which does not say
        return


def pick_loss(output: Any, place: str) -> torch.Tensor:
    """The entry or attribute ``loss`` of what a model returns, or else its first floating scalar.

    Raises:
        TraceError: there is none, or a dict has several and none of them is called so.
    """
    named = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    leaves = [named] if isinstance(named, torch.Tensor) else pytree.tree_leaves(output)
    scalars = [v for v in leaves if isinstance(v, torch.Tensor) and v.dim() == 0 and v.is_floating_point()]
    if isinstance(output, Mapping) and not isinstance(named, torch.Tensor):
        learned = {key: v for key, v in output.items() if any(v is one and one.requires_grad for one in scalars)}
        if len(learned) > 1:
            raise TraceError(
                f"The model returns several losses ({', '.join(map(str, learned))}), and none is called loss",
                where=place,
                fix="Say how they make one: return their sum as loss, or give "
                f"loss_fn=lambda output, batch: {' + '.join(f'output[{key!r}]' for key in learned)}",
            )
    if scalars:
        return scalars[0]
    shapes = [
        str(tuple(leaf.shape)) + ("" if leaf.is_floating_point() else f" in {str(leaf.dtype).removeprefix('torch.')}")
        for leaf in leaves
        if isinstance(leaf, torch.Tensor)
    ]
    raise TraceError(
        "The model returns no scalar loss",
        where=place,
        got=f"outputs of shape {', '.join(shapes)}" if shapes else f"a {type(output).__name__} without tensors",
        fix="Add labels to the example inputs, return the loss, or give loss_fn=lambda output, batch: ...",
    )


def _fake_model(model: torch.nn.Module, mode: FakeTensorMode) -> torch.nn.Module:
    """A copy in the modes of training whose tensors are fake: no memory, ties kept."""
    memo: dict[int, Any] = {}

    def fake(tensor: torch.Tensor) -> torch.Tensor:
        with mode:
            return torch.empty(tuple(tensor.shape), dtype=tensor.dtype, device="cpu")

    for parameter in model.parameters():
        memo[id(parameter)] = torch.nn.Parameter(fake(parameter), requires_grad=parameter.requires_grad)
    for buffer in model.buffers():
        memo[id(buffer)] = fake(buffer)
    for module in model.modules():
        for value in vars(module).values():
            if isinstance(value, torch.Tensor) and id(value) not in memo:
                memo[id(value)] = fake(value) if value.device.type == "meta" else value.detach().cpu()
    try:
        copied = as_trained(deep_copy(model, memo), model)
    except FAILURES as error:
        raise not_copied(error, model) from error
    swap_experts(copied)
    swap_norms(copied)
    return copied


# --- export ---------------------------------------------------------------------------------------


def _export(
    wrapper: _Training, batch: dict[str, Any], model: torch.nn.Module, batch_size: int, held: checks.Held
) -> tuple[torch.export.ExportedProgram, Calls]:
    """The program of the loss alone, and the calls of one that gives all that the model returns; ``held`` grows."""
    with (
        _quiet(),
        memory.casts_that_change_nothing(),
        memory.inference_as_no_grad(),
        memory.ParametersKept(),
        _use_lazy_graph_module(True),  # the program is read, and its code neither written nor compiled
    ):
        try:
            program: torch.export.ExportedProgram = torch.export.export(wrapper, (), batch, strict=False)
            limit_each_sample(program, batch_size, held.clamps)
            cut_off(program, source_of)
            memory.return_writes(program, source_of)
            if needs_decomposition(program.graph_module, needed_nodes(program)):
                program = program.run_decompositions({})
            calls = calls_of(program)
            cut(program)
            return program, calls
        except TraceError as error:
            if error.where or type(error) is not TraceError:
                raise
            raise error.becoming(TraceError, where=user_line(error, model)[0]) from error
        except FAILURES as error:
            raise _within(explained(error, model), module_of_failure(error, wrapper.model)) from error


@contextmanager
def _quiet() -> Iterator[None]:
    """Keeps export's warnings, logs and prints (it writes half-made graphs to stderr) off the terminal."""
    names = (
        "torch.export",
        "torch.fx",
        "torch._dynamo",
        "torch.fx.experimental",
        "torch._subclasses.fake_tensor",
        "transformers",
    )
    levels = {logger: logger.level for logger in map(logging.getLogger, names)}
    for logger in levels:
        logger.setLevel(logging.CRITICAL)
    try:
        with warnings.catch_warnings(), redirect_stderr(io.StringIO()), redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            warnings.filterwarnings("error", f".*{NO_AUTOCAST}", UserWarning)  # it would be on where the plan runs
            yield
    finally:
        for logger, level in levels.items():
            logger.setLevel(level)
