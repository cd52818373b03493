"""Opaque regions: what is not traced but runs as the user wrote it, one operator ``autopar.opaque`` in the graph.

A module becomes one because the user names it or because it cannot be traced; an autograd function because an export
keeps its forward alone: its own backward would be lost without a word wherever it is not what autograd makes of the
forward. What such a region does to samples is found by running it (:mod:`autopar.tracing.opaque_probe`).
"""

from __future__ import annotations

import fnmatch
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import CheckpointFunction

from autopar.errors import AutoparError, TraceError, UsageError
from autopar.graph.graph import Graph, Ref, TensorSpec
from autopar.ops.kernels import FUNCTION, MODULE, Region, region_of
from autopar.ops.opaque import load_function, of_function, stateless
from autopar.tracing import opaque_probe, opaque_trials
from autopar.tracing.builder import Builder, Call, Value
from autopar.tracing.failures import FAILURES
from autopar.tracing.opaque_trials import Samples
from autopar.tracing.side_effects import changed, state_of
from autopar.util.formatting import some

TARGET = "autopar.opaque"
_LITERALS = (bool, int, float, str, torch.dtype, torch.device)


class RegionError(TraceError):
    """A module cannot be an opaque region; ``path`` is its name in the model."""

    path = ""


def paths_of(model: torch.nn.Module, names: Sequence[str]) -> dict[str, None]:
    """Paths of the modules that names (paths, patterns such as ``encoder.*.router``, or class names) stand for.

    Raises:
        UsageError: a name fits no module; or fits the whole model.
    """
    found: dict[str, None] = {}
    modules = {path: module for path, module in model.named_modules() if path}
    for name in names:
        mine = [p for p, m in modules.items() if fnmatch.fnmatchcase(p, name) or type(m).__name__ == name]
        if not mine:
            close = ", ".join(sorted({type(m).__name__ for m in modules.values()})[:8])
            raise UsageError(
                f"No module of {type(model).__name__} matches opaque='{name}'",
                fix=f"Take a name of model.named_modules(), a pattern, or one of the classes {close}",
            )
        found |= dict.fromkeys(mine)
    return found


def outermost(paths: Collection[str]) -> tuple[str, ...]:
    """Without those that lie in another one."""
    return tuple(p for p in paths if not any(p.startswith(f"{other}.") for other in paths))


@dataclass(slots=True)
class Found:
    """What was found about the regions of a model, kept over the exports that its trace takes.

    Attributes:
        regions: the region of each module and autograd function, with an example of its output, by what it was called with; None
            where it is traced.
        alike: what was found about samples, by all that a run of the region gave.
    """

    regions: dict[Any, tuple[Region, Any] | None] = field(default_factory=dict)
    alike: dict[object, Samples] = field(default_factory=dict)


@dataclass(slots=True)
class Regions:
    """Makes regions of one export.

    Attributes:
        model: the user's, for the values of parameters and buffers.
        batch_size: samples in the traced batch.
        found: what is known of regions; grows.
        modes: what the caller of the trace had entered: a model in float64 runs under them.
        known_at: a batch size that divides this one, of which regions are taken as they were found: only shapes count. None: no
            such pass.
    """

    model: torch.nn.Module
    batch_size: int
    found: Found
    modes: list[TorchFunctionMode] = field(default_factory=_get_current_function_mode_stack)
    known_at: int | None = None

    def swap(self, copied: torch.nn.Module, paths: Sequence[str]) -> None:
        """Gives modules of ``copied``, made for tracing, a forward of one operator."""
        for path in paths:
            module = copied.get_submodule(path)
            module.forward = partial(self._module, path, module)

    def _module(self, path: str, module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        original = self.model.get_submodule(path)
        try:
            state = dict(module.named_parameters()), dict(module.named_buffers())
            draft, inputs = _draft(MODULE, path, args, kwargs, tuple(state[0]), tuple(state[1]))
            found = self._looked_up(path, draft, inputs, partial(self._of_module, original))
            assert found is not None
            region, output = found
        except (opaque_trials.Unclear, *FAILURES) as error:
            raise _refused(path, original, error) from error
        return _emit(region, inputs, state, output)

    @contextmanager
    def autograd_functions(self) -> Iterator[None]:
        """While tracing, functions with a backward of their own become regions; what is checkpointed is called."""
        owner = threading.get_ident()
        usual = torch.autograd.Function.__dict__["apply"]

        def instead(cls: type[torch.autograd.Function], work: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() != owner:
                return work(*args, **kwargs)
            found, inputs = self._function(cls, args, kwargs)
            return work(*args, **kwargs) if found is None else _emit(found[0], inputs, ({}, {}), found[1])

        def apply(cls: type[torch.autograd.Function], *args: Any, **kwargs: Any) -> Any:
            if cls is CheckpointFunction and threading.get_ident() == owner:  # the plan says what is recomputed
                return args[0](*args[2:])
            work = usual.__get__(None, cls)
            return instead(cls, work, *args, **kwargs) if _is_of_user(cls) else work(*args, **kwargs)

        def forward(cls: type[torch.autograd.Function], work: Callable[..., Any]) -> Callable[..., Any]:
            before = int(cls.setup_context is torch.autograd.Function.setup_context)  # the context

            def call(*args: Any, **kwargs: Any) -> Any:
                if torch.is_grad_enabled():  # called by itself, as any function: of apply's it is not
                    return work(*args, **kwargs)
                return instead(cls, partial(work, *args[:before]), *args[before:], **kwargs)

            return call

        # An ``op = MyFunction.apply`` that was written before has torch's own apply, which calls ``MyFunction.forward``.
        functions = filter(_is_of_user, _subclasses(torch.autograd.Function))
        forwards = [(cls, staticmethod(forward(cls, cls.forward))) for cls in functions]
        with ExitStack() as stack:
            stack.enter_context(mock.patch.object(torch.autograd.Function, "apply", classmethod(apply)))
            for cls, patched in forwards:
                stack.enter_context(mock.patch.object(cls, "forward", patched))
            yield

    def _function(
        self, cls: type[torch.autograd.Function], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Region, Any] | None, list[torch.Tensor]]:
        """The region of a call, or None where its backward is the usual one; and the call's tensors."""
        name = f"{cls.__module__}:{cls.__qualname__}"
        try:
            draft, inputs = _draft(FUNCTION, name, args, kwargs)
            found = self._looked_up(cls, draft, inputs, partial(self._of_function, cls))
        except opaque_trials.Unclear as error:
            raise TraceError(
                "The autograd function cannot run as it is written",
                where=f"{cls.__module__}.{cls.__qualname__}",
                got=str(error),
                fix="Make the module that calls it opaque (opaque=...), or write it with differentiable operators",
            ) from error
        if found is not None:
            _check_import(cls, name)
        return found, inputs

    def _looked_up(
        self,
        code: object,
        draft: Region,
        inputs: Sequence[torch.Tensor],
        examine: Callable[[Region, tuple[TensorSpec, ...]], tuple[Region, Any] | None],
    ) -> tuple[Region, Any] | None:
        """What is known of a call at this batch size or, where only shapes count, at the size that divides it; else what ``examine`` finds."""
        found, call = self.found.regions, (code, draft.tree, repr(draft.constants))
        specs = tuple(TensorSpec(shape=tuple(int(n) for n in t.shape), dtype=t.dtype) for t in inputs)
        key = (*call, specs, self.batch_size)
        if key not in found and self.known_at is not None:
            times = self.batch_size // self.known_at
            for (*other, fewer, samples), one in found.items():
                if tuple(other) == call and samples == self.known_at and _are_more(fewer, specs, times):
                    if one is None:
                        return None
                    if not opaque_probe.numbers_of(one[1]):  # they may count samples
                        return _of_more(one[0], self.known_at, times), one[1]
        if key not in found:
            found[key] = opaque_probe.apart_from_trace(partial(examine, draft, specs), self.modes)
        return found[key]

    def _of_function(
        self, cls: type[torch.autograd.Function], draft: Region, inputs: tuple[TensorSpec, ...]
    ) -> tuple[Region, Any] | None:
        """What the user's function does; None where its backward is the usual one."""
        subject = opaque_trials.Subject(region=draft, call=of_function(cls), inputs=inputs, parameters=(), buffers=())
        if opaque_trials.has_usual_backward(cls, subject):
            return None
        return opaque_probe.examine(subject, self.batch_size, self.found.alike)

    def _of_module(
        self, original: torch.nn.Module, draft: Region, inputs: tuple[TensorSpec, ...]
    ) -> tuple[Region, Any]:
        """What the user's module does; nothing of this may run under the tracer's modes."""
        torch.default_generator.manual_seed(0)
        call = stateless(original, self.model)
        _drop_nothing(call.module)
        before = state_of(call.module)
        # What does not run needs no values, which may be all of a large model.
        value = _value if opaque_probe.runs(tuple(original.parameters())) else torch.Tensor.detach
        subject = opaque_trials.Subject(
            region=draft,
            call=call,
            inputs=inputs,
            parameters=tuple(value(p).requires_grad_(p.requires_grad) for p in original.parameters()),
            buffers=tuple(map(value, original.buffers())),
        )
        found = opaque_probe.examine(subject, self.batch_size, self.found.alike)
        left = changed(before, state_of(call.module))
        if left:
            raise opaque_trials.Unclear(f"it sets {', '.join(left[:3])}, which every rank would do by itself")
        return found


def _are_more(fewer: Sequence[TensorSpec], specs: Sequence[TensorSpec], times: int) -> bool:
    """Whether some dims are so many times as large, and all others alike."""
    return len(fewer) == len(specs) and all(
        a.dtype == b.dtype
        and len(a.shape) == len(b.shape)
        and all(n in (m, m * times) for m, n in zip(a.shape, b.shape, strict=True))
        for a, b in zip(fewer, specs, strict=True)
    )


def _of_more(region: Region, samples: int, times: int) -> Region:
    """The region with the results of so many times as many samples; of one that mixes them, those whose first dim has their number."""
    dims = [0 if shape[:1] == (samples,) else None for shape, _, _ in region.outputs]
    outputs = tuple(
        (tuple(n * times if d == dim else n for d, n in enumerate(shape)), dtype, flows)
        for (shape, dtype, flows), dim in zip(region.outputs, region.splits[1] if region.splits else dims, strict=True)
    )
    return replace(region, outputs=outputs)


def around(model: torch.nn.Module, path: str) -> str:
    """The module that calls ``path``: the nearest one around it that has a forward; empty: the model itself."""
    while path:
        path = path.rpartition(".")[0]
        if path and type(model.get_submodule(path)).forward is not torch.nn.Module.forward:
            return path
    return ""


def _draft(
    kind: str,
    name: str,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    parameters: tuple[str, ...] = (),
    buffers: tuple[str, ...] = (),
) -> tuple[Region, list[torch.Tensor]]:
    """A region by how it is called."""
    leaves, tree = pytree.tree_flatten((args, kwargs))
    constants = tuple((i, leaf) for i, leaf in enumerate(leaves) if not isinstance(leaf, torch.Tensor))
    for _, value in constants:
        if value is not None and not isinstance(value, _LITERALS):
            raise opaque_trials.Unclear(f"it is called with a {type(value).__name__}, not tensors and numbers alone")
    try:
        text = pytree.treespec_dumps(tree)
    except (NotImplementedError, TypeError, ValueError) as error:
        raise opaque_trials.Unclear(f"its arguments cannot be written down: {error}") from error
    region = Region(
        kind=kind, name=name, tree=text, constants=constants, parameters=parameters, buffers=buffers, outputs=(),
        splits=None, why="", is_linear_backward=False,
    )  # fmt: skip
    return region, [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]


def _emit(
    region: Region,
    inputs: list[torch.Tensor],
    state: tuple[Mapping[str, torch.Tensor], Mapping[str, torch.Tensor]],
    output: Any,
) -> Any:
    """The operator in the export, its results in the structure of ``output``."""
    parameters, buffers = (list(part.values()) for part in state)
    made = iter(torch.ops.autopar.opaque(region.dumps(), inputs, parameters, buffers))
    leaves, tree = pytree.tree_flatten(output)
    for leaf in leaves:
        if leaf is not None and not isinstance(leaf, (torch.Tensor, *_LITERALS)):
            raise opaque_trials.Unclear(f"it returns a {type(leaf).__name__}")
    return pytree.tree_unflatten([next(made) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves], tree)


def _subclasses(cls: type[Any]) -> Iterator[type[Any]]:
    for one in cls.__subclasses__():
        yield one
        yield from _subclasses(one)


def _is_of_user(cls: type[torch.autograd.Function]) -> bool:
    return cls.__module__.split(".")[0] not in ("torch", "autopar", "spmd_types")


def _value(tensor: torch.Tensor) -> torch.Tensor:
    """A value of the user's model; a random one on meta, positive, as scales and variances must be."""
    if tensor.device.type != "meta":
        return tensor.detach().cpu().clone()
    if tensor.is_floating_point():
        return torch.rand(tensor.shape, dtype=torch.float32).mul(0.5).add(0.1).to(tensor.dtype)
    return torch.zeros(tensor.shape, dtype=tensor.dtype)


def _drop_nothing(module: torch.nn.Module) -> None:
    """Of a copy: random numbers differ between a batch and its halves."""
    for inner in module.modules():
        if isinstance(inner, torch.nn.modules.dropout._DropoutNd):
            inner.p = 0.0
        for name, value in vars(inner).items():
            if isinstance(value, float) and ("dropout" in name or "pdrop" in name):
                setattr(inner, name, 0.0)


def _refused(path: str, module: torch.nn.Module, error: BaseException) -> RegionError:
    kind = "" if isinstance(error, opaque_trials.Unclear) else f"{type(error).__name__}: "
    found = RegionError(
        "The module cannot run as it is written (opaque)",
        where=f"{path} ({type(module).__name__})",
        got=error.short if isinstance(error, AutoparError) else f"{kind}{error}",
        fix="Name a module around it with opaque=, or change it so that it can be traced",
    )
    found.path = path
    return found


def _check_import(cls: type[torch.autograd.Function], name: str) -> None:
    """Ranks find the function by its name."""
    if "<" in name or load_function(name) is not cls:
        raise TraceError(
            f"The autograd function cannot be imported as {name}",
            where=f"{cls.__module__}.{cls.__qualname__}",
            fix="Define the class at the top of a module",
        )


# --- in the graph ---------------------------------------------------------------------------------


def opaque_of(builder: Builder, call: Call) -> Value:
    """``autopar.opaque``: gradients flow where the region was seen to pass them on."""
    args = tuple(call.bound().values())
    region = region_of(str(args[0]))
    made = builder.emit(call, TARGET, args)
    builder.stop_gradient(made, *(i for i, (_, _, flows) in enumerate(region.outputs) if not flows))
    return tuple(Ref(made.name, i) for i in range(len(region.outputs)))


def notes_of(graph: Graph, reasons: Mapping[str, str]) -> tuple[str, ...]:
    """A sentence for the regions of one reason: which they are, why, and what that means."""
    regions = {
        r.name: r for op in (*graph.prelude, *graph.ops) if op.target == TARGET for r in (region_of(str(op.args[0])),)
    }
    groups: dict[tuple[str, str], list[str]] = {}
    for name, region in regions.items():
        why = reasons.get(
            name, "an export would drop its own backward, which is not what autograd makes of its forward"
        )
        groups.setdefault((why, region.why), []).append(name)
    notes = []
    for (why, mixed), names in groups.items():
        notes.append(f"{_NOTE}{some(names)}; {why}" + (f"{_MIXED}{mixed}" if mixed else ""))
    return tuple(notes)


_NOTE = "opaque, whole on every rank of tp and cp and of a cost that is known roughly: "
_MIXED = "; its samples are not known to be apart: "


def reason_of(notes: Sequence[str], name: str) -> str:
    """Why a region of that name is one, as :func:`notes_of` said it; empty where no note names it."""
    for note in notes:
        names, _, why = note.removeprefix(_NOTE).partition("; ")
        if note.startswith(_NOTE) and name in names.split(" and ")[0].split(", "):
            return why.partition(_MIXED)[0]
    return ""
