"""Tracing: :func:`trace` turns a model and a batch into a :class:`~autopar.graph.graph.Graph` without allocating weights.

A trace exports a copy of the model on fake tensors, rewrites the exported program and converts its calls to operators. If a module
cannot be traced, the trace starts again with that module as an opaque region. A trace ends with checks that steps do not depend on
earlier ones and that no number in the graph counts samples (:mod:`autopar.tracing.repeated_steps`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx._lazy_graph_module import _use_lazy_graph_module

from autopar.errors import TraceError
from autopar.graph.elements import Evaluation, Outputs
from autopar.graph.graph import Graph, Op
from autopar.graph.operator_kinds import opaque_notes
from autopar.ops.opaque import notes_of as notes_of_modes
from autopar.pins.on_modules import pins_of
from autopar.tracing import repeated_steps, sample_counts, side_effects, value_branches
from autopar.tracing.batch import fake_batch, inputs_of, named_batch
from autopar.tracing.builder import Builder, Value
from autopar.tracing.convert import Converter, needs_decomposition
from autopar.tracing.failures import (
    EXPORTS,
    FAILURES,
    NO_VALUES,
    defined_at,
    explained,
    module_of_failure,
    quiet,
    user_line,
)
from autopar.tracing.finish import finish
from autopar.tracing.forms.losses import over_samples
from autopar.tracing.in_eval import evaluation_of, kept_in_training, put_in_eval
from autopar.tracing.model_with_loss import (
    LossFunction,
    ModelWithLoss,
    check_loss_function,
    check_model,
    fake_copy,
    with_backward_hooks,
)
from autopar.tracing.modes import Selections
from autopar.tracing.opaque_regions import KnownRegions, RegionError, Regions, around, outermost, paths_of
from autopar.tracing.outputs import Calls, calls_of, counts_samples, cut, kept, needed_nodes, with_counts
from autopar.tracing.program_ends import declare, detach_in_no_grad, loss_output, mutations_of, with_twice
from autopar.tracing.value_branches import Branches, GuardedClamps, limit_each_sample


def trace(  # noqa: PLR0913  what a graph depends on
    model: torch.nn.Module,
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    name: str = "",
    loss_fn: LossFunction | None = None,
    opaque: Sequence[str] = (),
    examples: Mapping[str, Any] | Sequence[Any] | None = None,
    exact: bool = False,
    repeats: bool = False,
    evaluates: bool = True,
) -> Graph:
    """Return the graph of the forward pass of ``model`` in training, from a batch to a scalar loss and the other outputs of the model.

    Args:
        model: may be on any device, meta included. It is not changed, and its weights are not copied.
        args: positional example inputs of ``model.forward``. Only their shapes and dtypes matter.
        kwargs: example inputs by name. Tensors that share the size of dim 0 are the batch. A batch of one is doubled, so that no
            operator takes its size for that of a broadcast.
        name: the name of the model; the name of its class if empty.
        loss_fn: ``loss_fn(output, batch)`` gives the scalar loss of a model that does not return it. Entries of ``kwargs`` that
            ``forward`` does not take are passed to it only.
        opaque: modules to run as they are written, by path, pattern or class name. Each becomes one operator. Modules that cannot be
            traced become opaque too, and a note of the graph says so.
        examples: example inputs as in ``args`` and ``kwargs``, if these have no values or fewer samples. Their values matter to a model
            that cannot be traced, and runs as a whole as it is written.
        exact: make a graph for batches of the example's size only. Its numbers may count samples.
        repeats: the model is known to do the same at every step and for every batch size, so that this is not checked.
        evaluates: find out what the model computes in ``eval()`` too, which a search does not ask and takes a fifth to a half longer.

    Returns:
        The graph. Batch sizes in its shapes are those of the example, or 2.

    Raises:
        TraceError: the export fails, there is no scalar loss, the batch size is not clear, a step depends on earlier ones, or a number in
            the graph depends on the batch size. The error names the line of the user's code.
        UsageError: a name in ``opaque`` matches no module inside of the model.
    """
    marks = pins_of(model)
    opaque = (*opaque, *(mark.removeprefix("opaque=") for mark in marks if mark.startswith("opaque=")))
    batch = named_batch(model, args, kwargs or {})
    given = {} if examples is None else examples
    values = named_batch(model, *(((), given) if isinstance(given, Mapping) else (tuple(given), {}))) or batch
    paths = paths_of(model, opaque)
    check_model(model)
    check_loss_function(loss_fn)
    hooked = dict.fromkeys(with_backward_hooks(model), "a hook on gradients, which a trace would lose")
    reasons = hooked | dict.fromkeys(paths, "it was named so")
    job = _Job(model=model, batch=batch, name=name, loss_fn=loss_fn, reasons=reasons, repeats=repeats, examples=values)
    graph, calls, job = _with_fallback(job)
    if not graph.spec(graph.loss).requires_grad:
        raise TraceError(
            "The loss depends on no parameter that is trained",
            where=type(model).__name__,
            fix="Return the loss that training minimises, and leave requires_grad on where it is to learn",
        )
    is_whole = "" in job.reasons  # the graph has one operator and numbers of its own only
    if not exact and not repeats and not is_whole and not sample_counts.are_same(calls, _calls(job, times=2)):
        sample_counts.check_numbers(graph, _larger(graph, job))
    notes = (*graph.notes, *notes_of_modes(model), *opaque_notes(graph, job.reasons))
    evaluation = _evaluation(graph, calls, job) if evaluates else None
    outputs = _counted(graph, job, exact=exact)
    return replace(graph, exact=exact, pins=marks, notes=notes, outputs=outputs, evaluation=evaluation)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Job:
    """The arguments of a trace.

    Attributes:
        batch: example inputs by name.
        reasons: says for each opaque module, by path, why it is opaque.
        repeats: steps and batch sizes are not checked.
        examples: example inputs by name, with values.
        in_eval: the model is traced in ``eval()``, but for modules of these classes; None: in training.
        known: what is known of opaque regions. It grows with each export and is shared by all of them.
    """

    model: torch.nn.Module
    batch: dict[str, Any]
    name: str
    loss_fn: LossFunction | None
    reasons: Mapping[str, str]
    repeats: bool
    examples: Mapping[str, Any]
    in_eval: tuple[type[torch.nn.Module], ...] | None = None
    known: KnownRegions = field(default_factory=KnownRegions)

    @property
    def opaque(self) -> tuple[str, ...]:
        """Paths of the opaque modules that lie in no other one."""
        return outermost(self.reasons)


class _UntraceableError(TraceError):
    """A trace has failed in the code of a module. :attr:`path` is the path of the module."""

    path = ""


def _with_fallback(job: _Job) -> tuple[Graph, Sequence[sample_counts.Call], _Job]:
    """Trace a model and make the smallest modules opaque that cannot be traced.

    Every failure costs an export. When a second module of a class fails, all modules of that class become opaque at once. The model
    itself, whose path is empty, becomes one region if nothing smaller can.

    Returns:
        The graph, the calls of a step and the job with the opaque modules that it took.

    Raises:
        TraceError: code fails that is in no module that can be opaque, or a module that the user has named cannot be opaque.
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
                if path not in causes:  # the user has named it
                    raise
                cause, path = causes[path], around(job.model, path)
            if path in job.opaque:  # its code does not run, so the failure is in the call of it
                path = around(job.model, path)
            if not path and "" not in job.reasons:
                causes |= {"": cause}
                job = replace(job, reasons={"": f"{cause.short} ({cause.fix})"})
                continue
            if not path or any(path == region or path.startswith(f"{region}.") for region in job.opaque):
                raise _without_region(cause, error) from error
            reason = f"{cause.short} ({cause.fix})"
            kind = type(job.model.get_submodule(path))
            paths = (path, *(_of_class(job.model, kind) if kind in failed else ()))
            # A class of torch, such as Sequential, fails by what it is given: others of that class may not fail.
            if not kind.__module__.startswith("torch."):
                failed.add(kind)
            causes = dict.fromkeys(paths, cause) | causes | {path: cause}
            job = replace(job, reasons=dict.fromkeys(paths, reason) | dict(job.reasons))


def _of_class(model: torch.nn.Module, kind: type) -> tuple[str, ...]:
    """Return the paths of the modules whose class is ``kind`` and that contain no other module of that class."""
    paths = [path for path, module in model.named_modules() if type(module) is kind]
    return tuple(p for p in paths if not any(q.startswith(f"{p}.") for q in paths))


def _without_region(cause: TraceError, error: TraceError) -> TraceError:
    """Return the error for a line that cannot be traced in a module that cannot be opaque either.

    Args:
        cause: says why the line cannot be traced.
        error: was raised last. If it says why the module cannot be opaque, the remedy quotes it.
    """
    if error is cause or not isinstance(error, RegionError):
        return cause
    tried = "as an opaque module it fails too" if error.path else "the whole model cannot run so"
    return cause.becoming(TraceError, fix=f"{cause.fix} ({tried}: {error.got.partition('; on fake tensors')[0]})")


def _counted(graph: Graph, job: _Job, *, exact: bool) -> Outputs | None:
    """Return the outputs of ``graph`` with their numbers at twice the batch size, if some of these may count samples."""
    outputs = graph.outputs
    if outputs is None or exact or not counts_samples(outputs):
        return outputs
    try:
        twice = _traced(job, times=2)[0].outputs
    except TraceError:  # the model runs at one batch size only, so that what its numbers count is not known
        twice = None
    if twice is None:
        return with_counts(outputs, replace(outputs, ops=()))
    return replace(with_counts(outputs, twice), structure=with_twice(outputs.structure, twice.structure))


def _traced(job: _Job, times: int = 1) -> tuple[Graph, Sequence[sample_counts.Call]]:
    """Trace a model at ``times`` the batch size of the example.

    Returns:
        The graph and the calls of a step. There are no calls unless ``times`` is 1 and steps are checked.

    Raises:
        TraceError: the model cannot be traced. It is an :class:`_UntraceableError` if the failure is in a module that may become opaque.
    """
    model = job.model
    with _faked(job, times) as (wrapper, mode, batch, batch_size, branches):
        program, program_calls = _export(wrapper, batch, model, batch_size, branches)
        if branches.refused is not None:  # the model caught the error and went on as no step would
            raise _within(explained(branches.refused, model), module_of_failure(branches.refused, wrapper.model))
        is_checked = times == 1 and not job.repeats
        with quiet():
            notes, calls = repeated_steps.check(wrapper, wrapper.model, mode, batch) if is_checked else ((), ())
        calls = calls if branches.refused is None else ()
    builder, env = Builder(), dict[str, Value]()
    converter = Converter(builder)
    inputs = inputs_of(batch, batch_size)
    parameters, buffers = declare(builder, env, program, model, inputs, batch)
    try:
        outputs = converter.run(program.graph_module, env, grad=True)
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
        mutations=mutations_of(program, outputs, env),
    )
    if job.loss_fn is not None:
        graph = _with_place(graph, defined_at(job.loss_fn))
    extra = kept(graph, builder, program_calls, wrapper.kept, env=env, declared=(*parameters, *buffers))
    return replace(graph, notes=(*graph.notes, *notes, *value_branches.notes_of(branches)), outputs=extra), calls


def _with_place(graph: Graph, place: str) -> Graph:
    """Return the graph with ``place`` as the source of operators of unknown source outside of modules: torch keeps no lines of loss functions."""

    def placed(op: Op) -> Op:
        return op if op.source or op.module else replace(op, source=place)

    return replace(graph, prelude=tuple(map(placed, graph.prelude)), ops=tuple(map(placed, graph.ops)))


@contextmanager
def _faked(
    job: _Job, times: int, *, tries_samples: bool = True
) -> Iterator[tuple[ModelWithLoss, FakeTensorMode, dict[str, Any], int, Branches]]:
    """Enter a context in which the model of ``job`` can be exported or run on fake tensors.

    It gives the model with its opaque regions, the mode of its fake tensors, a batch of ``times`` the example's size, that size, and the
    record of branches on values, which grows while the model runs.

    Args:
        tries_samples: whether it is tried if opaque regions keep samples independent.
    """
    mode = FakeTensorMode()
    batch, batch_size = fake_batch(job.batch, mode, times)
    wrapper = ModelWithLoss(fake_copy(job.model, mode), batch, job.loss_fn)
    regions = Regions(job.model, batch_size, job.known, tries_samples=tries_samples,
        examples=job.examples, gives_loss=job.loss_fn is None)  # fmt: skip
    if job.in_eval is not None:
        put_in_eval(wrapper.model, job.in_eval)
    regions.swap(wrapper.model, job.opaque)
    with (
        regions.autograd_functions(),
        side_effects.gradients_in_forward_refused(),
        side_effects.masks_not_asked(),
        value_branches.assume_checks_hold() as branches,
        GuardedClamps(batch_size, branches.clamps),
        Selections(),
    ):
        yield wrapper, mode, batch, batch_size, branches


def _larger(graph: Graph, job: _Job) -> Graph:
    """Return the graph of a trace at twice the batch size of ``graph``.

    Raises:
        CountError: the model cannot be traced at that size.
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


def _evaluation(graph: Graph, calls: Sequence[sample_counts.Call], job: _Job) -> Evaluation:
    """Return what ``eval()`` changes in the graph, whose step makes ``calls``."""
    in_eval = replace(job, in_eval=kept_in_training(graph), repeats=True)
    is_same = bool(calls) and calls == _calls(in_eval, times=1)
    return evaluation_of(graph, job.model, lambda: graph if is_same else _traced(in_eval)[0])


def _calls(job: _Job, times: int) -> Sequence[sample_counts.Call]:
    """Return the calls of a step at ``times`` the batch size of the example, without an export; none if the model does not run that way."""
    with _faked(job, times, tries_samples=times == 1) as (wrapper, mode, batch, _, branches), quiet():
        calls = repeated_steps.calls_of(wrapper, wrapper.model, mode, batch)
    return calls if branches.refused is None else ()


def _within(error: TraceError, path: str) -> TraceError:
    """Return ``error`` as an :class:`_UntraceableError` of the module at ``path``.

    An error in the model itself, whose path is empty, stays a plain :class:`TraceError` unless the model may run as a whole.
    """
    if isinstance(error, RegionError):
        return error
    if not path:
        if not any(problem in error.problem for problem in (EXPORTS, NO_VALUES)):
            return error
        error = error.becoming(
            TraceError, fix=f"{error.fix}. Or move the line into a separate module, which then runs as it is written"
        )
    untraceable = error.becoming(_UntraceableError)
    untraceable.path = path
    return untraceable


def _export(
    wrapper: ModelWithLoss, batch: dict[str, Any], model: torch.nn.Module, batch_size: int, branches: Branches
) -> tuple[torch.export.ExportedProgram, Calls]:
    """Export ``wrapper`` and rewrite the program so that it can be converted; ``branches`` grows.

    Returns:
        The program of the loss and of changed buffers, and the calls of a program that also gives the other outputs of the model.

    Raises:
        TraceError: the model cannot be exported. The error names the line of the user's code.
    """
    with (
        quiet(),
        side_effects.casts_that_change_nothing(),
        side_effects.inference_as_no_grad(),
        side_effects.ParametersKept(),
        side_effects.caches_emptied(wrapper),
        _use_lazy_graph_module(True),  # the graph is only read, so that its code need not be generated
    ):
        try:
            program: torch.export.ExportedProgram = torch.export.export(wrapper, (), batch, strict=False)
            limit_each_sample(program, batch_size, branches.clamps)
            detach_in_no_grad(program)
            side_effects.return_writes(program)
            if needs_decomposition(program, needed_nodes(program)):
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
