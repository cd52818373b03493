"""Opaque regions: code that is not traced and runs as the user wrote it, one operator ``autopar.opaque`` in the graph.

A module becomes opaque because the user names it or because it cannot be traced. A custom autograd function becomes opaque if its
backward is not what autograd derives from its forward, because an export keeps the forward only. :class:`Regions` puts the operator
in their place while a model is exported. What a region does, and whether it keeps samples independent, is found by running it
(:mod:`autopar.tracing.opaque_probe`).
"""

from __future__ import annotations

import fnmatch
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeAlias
from unittest import mock

import torch
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import CheckpointFunction

from autopar.errors import AutoparError, TraceError, UsageError
from autopar.graph.graph import TensorSpec
from autopar.ops.kernels import FUNCTION, MODULE, Region
from autopar.ops.opaque import load_function, of_function, stateless, without_dropout
from autopar.tracing import opaque_probe, opaque_trials
from autopar.tracing.batch import arguments
from autopar.tracing.failures import FAILURES
from autopar.tracing.modes import apart_from_trace
from autopar.tracing.opaque_probe import Examined
from autopar.tracing.opaque_trials import Samples
from autopar.tracing.side_effects import changed, state_of

_LITERALS = (bool, int, float, str, torch.dtype, torch.device)
"""Types of the arguments and results of a region, besides tensors and None, that its description can hold."""

_State: TypeAlias = tuple[Mapping[str, torch.Tensor], Mapping[str, torch.Tensor]]
"""The parameters and the buffers of a module by name; empty for an autograd function."""


class RegionError(TraceError):
    """A module cannot be an opaque region. :attr:`path` is its path in the model."""

    path = ""


def paths_of(model: torch.nn.Module, names: Sequence[str]) -> dict[str, None]:
    """Return the paths of the modules that ``names`` match, in order, as the keys of a dict.

    Args:
        names: paths, patterns such as ``encoder.*.router``, or names of classes.

    Raises:
        UsageError: a name matches no module. The model itself does not count.
    """
    paths: dict[str, None] = {}
    modules = {path: module for path, module in model.named_modules() if path}
    for name in names:
        matches = [p for p, m in modules.items() if fnmatch.fnmatchcase(p, name) or type(m).__name__ == name]
        if not matches:
            classes = ", ".join(sorted({type(m).__name__ for m in modules.values()})[:8])
            raise UsageError(
                f"No module of {type(model).__name__} matches opaque='{name}'",
                fix=f"Take a name of model.named_modules(), a pattern, or one of the classes {classes}",
            )
        paths |= dict.fromkeys(matches)
    return paths


def outermost(paths: Collection[str]) -> tuple[str, ...]:
    """Return the paths that lie inside none of the others; all lie inside the empty one, the model itself."""
    if "" in paths:
        return ("",)
    return tuple(p for p in paths if not any(p.startswith(f"{other}.") for other in paths))


@dataclass(slots=True)
class KnownRegions:
    """What is known of the regions of a model, shared by the exports of its trace.

    Attributes:
        regions: the result of examining each module and autograd function, by all that it was called with. None: an autograd function
            that need not be opaque.
        samples: results of :func:`autopar.tracing.opaque_trials.samples_apart`, shared by layers that are equal.
    """

    regions: dict[Any, Examined | None] = field(default_factory=dict)
    samples: dict[object, Samples] = field(default_factory=dict)


@dataclass(slots=True)
class Regions:
    """The regions of one export, or of one pass without an export.

    Attributes:
        model: the user's model, which holds the values of parameters and buffers.
        batch_size: the number of samples in the traced batch.
        known: what is known of regions. It grows.
        modes: the function modes in which the caller has started the trace, such as one for float64. Regions are run in them.
        examples: the example inputs by name, with values, for a model that becomes a region as a whole.
        gives_loss: whether the model itself returns the loss, and not a ``loss_fn``.
        tries_samples: whether it is tried if regions keep samples independent. A pass that needs only the shapes of outputs runs them once.
    """

    model: torch.nn.Module
    batch_size: int
    known: KnownRegions
    examples: Mapping[str, Any] = field(default_factory=dict)
    gives_loss: bool = True
    modes: list[TorchFunctionMode] = field(default_factory=_get_current_function_mode_stack)
    tries_samples: bool = True

    def swap(self, copied: torch.nn.Module, paths: Sequence[str]) -> None:
        """Replace the forward of the modules at ``paths`` in ``copied``, the copy to export, by a call of the operator."""
        for path in paths:
            module = copied.get_submodule(path)
            # looked up before the export, in which attributes of a model that shares modules are stand-ins of its modules
            module.forward = partial(self._call_module, path, module, self.model.get_submodule(path))

    def _call_module(
        self, path: str, module: torch.nn.Module, original: torch.nn.Module, *args: Any, **kwargs: Any
    ) -> Any:
        """Return what the module at ``path`` returns in the export: results of the operator.

        Args:
            module: the copy to export.
            original: the user's module.

        Raises:
            RegionError: the module cannot be a region.
        """
        try:
            state = dict(module.named_parameters()), dict(module.named_buffers())
            draft, inputs = _draft(MODULE, path, args, kwargs, state)
            draft = replace(draft, is_loss=not path and self.gives_loss)
            values = () if path else self._examples_for(original, kwargs)
            examined = self._known_or_examined(path, draft, inputs, partial(self._examine_module, original, values))
            assert examined is not None
            region, output = examined
        except (opaque_trials.Unclear, *FAILURES) as error:
            raise _refused(path, original, error) from error
        result = _emit(region, inputs, state, output)
        if not region.is_loss or region.splits is None:
            return result
        return pytree.tree_map_only(torch.Tensor, partial(_mean_loss, region, inputs), result)

    def _examples_for(self, model: torch.nn.Module, kwargs: dict[str, Any]) -> tuple[torch.Tensor | None, ...]:
        """Return the values of the tensors among the arguments of a call of the whole model; None for those without values."""
        names = arguments(model.forward, self.examples)[0]
        given = ([self.examples[name] for name in names], {key: self.examples[key] for key in kwargs})
        leaves = [leaf for leaf in pytree.tree_leaves(given) if isinstance(leaf, torch.Tensor)]
        return tuple(None if leaf.is_meta else leaf for leaf in leaves)

    @contextmanager
    def autograd_functions(self) -> Iterator[None]:
        """Enter a context in which custom autograd functions of this thread become regions; checkpointed functions are called directly."""
        owner = threading.get_ident()
        usual = torch.autograd.Function.__dict__["apply"]

        def region_or(
            original: Callable[..., Any], cls: type[torch.autograd.Function], *args: Any, **kwargs: Any
        ) -> Any:
            if threading.get_ident() != owner:
                return original(*args, **kwargs)
            examined, inputs = self._examined_function(cls, args, kwargs)
            return original(*args, **kwargs) if examined is None else _emit(examined[0], inputs, ({}, {}), examined[1])

        def apply(cls: type[torch.autograd.Function], *args: Any, **kwargs: Any) -> Any:
            if cls is CheckpointFunction and threading.get_ident() == owner:  # the plan says what is recomputed
                return args[0](*args[2:])
            original = usual.__get__(None, cls)
            return region_or(original, cls, *args, **kwargs) if _is_of_user(cls) else original(*args, **kwargs)

        def forward(cls: type[torch.autograd.Function], original: Callable[..., Any]) -> Callable[..., Any]:
            contexts = int(cls.setup_context is torch.autograd.Function.setup_context)  # arguments before the inputs

            def call(*args: Any, **kwargs: Any) -> Any:
                if torch.is_grad_enabled():  # user code calls forward directly; apply would have switched gradients off
                    return original(*args, **kwargs)
                return region_or(partial(original, *args[:contexts]), cls, *args[contexts:], **kwargs)

            return call

        # Code that has bound ``op = MyFunction.apply`` before calls torch's apply, which calls ``MyFunction.forward``.
        functions = filter(_is_of_user, _subclasses(torch.autograd.Function))
        forwards = [(cls, staticmethod(forward(cls, cls.forward))) for cls in functions]
        with ExitStack() as stack:
            stack.enter_context(mock.patch.object(torch.autograd.Function, "apply", classmethod(apply)))
            for cls, patched in forwards:
                stack.enter_context(mock.patch.object(cls, "forward", patched))
            yield

    def _examined_function(
        self, cls: type[torch.autograd.Function], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Examined | None, list[torch.Tensor]]:
        """Return the region of a call of ``cls``, or None if its backward is the usual one, and the tensors among the arguments.

        Raises:
            TraceError: the function cannot be a region, or ranks could not import it.
        """
        name = f"{cls.__module__}:{cls.__qualname__}"
        try:
            draft, inputs = _draft(FUNCTION, name, args, kwargs, ({}, {}))
            examined = self._known_or_examined(cls, draft, inputs, partial(self._examine_function, cls))
        except opaque_trials.Unclear as error:
            raise TraceError(
                "The autograd function cannot run as it is written",
                where=f"{cls.__module__}.{cls.__qualname__}",
                got=str(error),
                fix="Make the module that calls it opaque (opaque=...), or write it with differentiable operators",
            ) from error
        if examined is not None:
            _check_import(cls, name)
        return examined, inputs

    def _known_or_examined(
        self,
        code: object,
        draft: Region,
        inputs: Sequence[torch.Tensor],
        examine: Callable[[Region, tuple[TensorSpec, ...]], Examined | None],
    ) -> Examined | None:
        """Return what is known of a call at this batch size; else what ``examine`` returns.

        Args:
            code: identifies the code: the path of a module or the class of an autograd function.
            draft: describes the call.
            inputs: its tensors.
        """
        regions, call = self.known.regions, (code, draft.tree, repr(draft.constants))
        specs = tuple(TensorSpec(shape=tuple(int(n) for n in t.shape), dtype=t.dtype) for t in inputs)
        key = (call, specs, self.batch_size, self.tries_samples)
        if not self.tries_samples and any(known[0] == call and regions[known] is None for known in regions):
            return None  # a backward that is the usual one for the batch of the trace is so for a larger one
        if key not in regions:
            regions[key] = apart_from_trace(partial(examine, draft, specs), self.modes)
        return regions[key]

    def _examine_function(
        self, cls: type[torch.autograd.Function], draft: Region, inputs: tuple[TensorSpec, ...]
    ) -> Examined | None:
        """Return the complete region of a custom autograd function; None if its backward is the usual one."""
        subject = opaque_trials.Subject(region=draft, call=of_function(cls), inputs=inputs, parameters=(), buffers=())
        if opaque_trials.has_usual_backward(cls, subject):
            return None
        return opaque_probe.examine(subject, self.batch_size, self.known.samples, tries_samples=self.tries_samples)

    def _examine_module(
        self,
        original: torch.nn.Module,
        examples: tuple[torch.Tensor | None, ...],
        draft: Region,
        inputs: tuple[TensorSpec, ...],
    ) -> Examined:
        """Return the complete region of a module of the user's model. This must not run in the modes of the trace."""
        torch.default_generator.manual_seed(0)
        call = stateless(original, self.model)
        without_dropout(call.module)  # random numbers would differ between a batch and its halves
        before = state_of(call.module)
        # A region that is not run needs no copies of values, which may be those of nearly all of a large model.
        value = _value if opaque_probe.may_run(tuple(original.parameters())) else torch.Tensor.detach
        subject = opaque_trials.Subject(
            region=draft,
            call=call,
            inputs=inputs,
            examples=tuple(None if value is None else value.detach().cpu() for value in examples),
            parameters=tuple(value(p).requires_grad_(p.requires_grad) for p in original.parameters()),
            buffers=tuple(map(value, original.buffers())),
        )
        examined = opaque_probe.examine(subject, self.batch_size, self.known.samples, tries_samples=self.tries_samples)
        attributes = changed(before, state_of(call.module))
        if attributes:
            raise opaque_trials.Unclear(f"it sets {', '.join(attributes[:3])}, which every rank would do by itself")
        return examined


def around(model: torch.nn.Module, path: str) -> str:
    """Return the path of the module that calls the one at ``path``: the nearest around it with a forward. Empty: it is the model itself."""
    while path:
        path = path.rpartition(".")[0]
        if path and type(model.get_submodule(path)).forward is not torch.nn.Module.forward:
            return path
    return ""


def _draft(
    kind: str, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], state: _State
) -> tuple[Region, list[torch.Tensor]]:
    """Return a region that describes a call but not yet what it does, and the tensors among the arguments.

    Raises:
        Unclear: an argument cannot be part of the description.
    """
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
        kind=kind, name=name, tree=text, constants=constants, parameters=tuple(state[0]), buffers=tuple(state[1]),
        outputs=(), splits=None, why="", is_linear_backward=False,
    )  # fmt: skip
    return region, [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]


def _emit(region: Region, inputs: list[torch.Tensor], state: _State, output: Any) -> Any:
    """Call the operator in the export and return its results in the structure of ``output``.

    ``output`` is an example of what the region returns.

    Raises:
        Unclear: the region returns something else than tensors and literals.
    """
    parameters, buffers = (list(part.values()) for part in state)
    results = iter(torch.ops.autopar.opaque(region.dumps(), inputs, parameters, buffers))
    leaves, tree = pytree.tree_flatten(output)
    for leaf in leaves:
        if leaf is not None and not isinstance(leaf, (torch.Tensor, *_LITERALS)):
            raise opaque_trials.Unclear(f"it returns a {type(leaf).__name__}")
    return pytree.tree_unflatten([next(results) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves], tree)


def _mean_loss(region: Region, inputs: Sequence[torch.Tensor], losses: torch.Tensor) -> torch.Tensor:
    """Return the loss of the batch from the losses of its samples, which are those of the batches that ranks run.

    A rank whose samples have no weight has no finite loss, which does not count.
    """
    if region.weight is None:
        return losses.mean()
    weights = opaque_probe.weights_of(region.weight, inputs).to(losses.dtype)
    return torch.where(weights > 0, losses * weights, torch.zeros_like(losses)).sum() / weights.sum()


def _subclasses(cls: type[Any]) -> Iterator[type[Any]]:
    for subclass in cls.__subclasses__():
        yield subclass
        yield from _subclasses(subclass)


def _is_of_user(cls: type[torch.autograd.Function]) -> bool:
    return cls.__module__.split(".")[0] not in ("torch", "autopar", "spmd_types")


def _value(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy of a tensor of the user's model; for one on meta random values, which are positive as scales and variances must be."""
    if tensor.device.type != "meta":
        return tensor.detach().cpu().clone()
    if tensor.is_floating_point():
        return torch.rand(tensor.shape, dtype=torch.float32).mul(0.5).add(0.1).to(tensor.dtype)
    return torch.zeros(tensor.shape, dtype=tensor.dtype)


def _refused(path: str, module: torch.nn.Module, error: BaseException) -> RegionError:
    """Return the error for a module that cannot be a region because of ``error``."""
    kind = "" if isinstance(error, opaque_trials.Unclear) else f"{type(error).__name__}: "
    refused = RegionError(
        "The module cannot run as it is written (opaque)",
        where=f"{path or 'the whole model'} ({type(module).__name__})",
        got=error.short if isinstance(error, AutoparError) else f"{kind}{error}",
        fix="Name a module around it with opaque=, or change it so that it can be traced",
    )
    refused.path = path
    return refused


def _check_import(cls: type[torch.autograd.Function], name: str) -> None:
    """Check that ranks can import ``cls`` by ``name``, ``package.module:Class``.

    Raises:
        TraceError: they cannot.
    """
    if "<" in name or load_function(name) is not cls:
        raise TraceError(
            f"The autograd function cannot be imported as {name}",
            where=f"{cls.__module__}.{cls.__qualname__}",
            fix="Define the class at the top of a module",
        )
