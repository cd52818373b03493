"""The graph under construction: its operators in order, the specs of its tensors and the values of its constants.

The value of a constant is stored compactly: a dim along which all values are equal has size 1. For example, the value of a
causal mask of shape ``[B, 1, S, S]`` is stored as a tensor of shape ``[1, 1, S, S]``.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from autopar.graph.elements import collect_refs, unused
from autopar.graph.graph import Argument, Op, Ref, TensorSpec, map_refs
from autopar.ops.kernels import resolve

if TYPE_CHECKING:
    from autopar.tracing.constants import Lazy

Value: TypeAlias = "Argument"
"""The result of a call: a tensor, a tuple of tensors for several outputs, or None for an output that must not be read."""

FOLD_LIMIT = 2**26
"""Number of elements above which a constant is never evaluated during tracing."""

LAZY_SIZE = 2**22
"""Number of elements above which an elementwise operator on constants is evaluated only on demand."""

SKIPPED_KWARGS = ("device", "pin_memory", "layout", "non_blocking")
"""Keyword arguments that a graph does not record, because the plan decides where its tensors are placed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One traced call whose arguments are values of the graph under construction.

    Attributes:
        name: The preferred name of the operator that the call becomes.
        target: The name of the overload as torch prints it, such as ``aten.add.Tensor``.
        outputs: One spec for each output, or None for an output that is not a tensor.
        module: The path of the module that made the call.
        source: The line of the user's code, as ``file.py:12``.
        grad: Whether gradients are recorded at this place of the program.
    """

    name: str
    target: str
    overload: torch._ops.OpOverload
    args: tuple[Argument, ...]
    kwargs: dict[str, Argument]
    outputs: tuple[TensorSpec | None, ...]
    module: str
    source: str
    grad: bool

    @property
    def spec(self) -> TensorSpec:
        """The spec of the first output, which must be a tensor."""
        spec = self.outputs[0]
        assert spec is not None, self.target
        return spec

    @property
    def operands(self) -> list[Ref]:
        """All tensor arguments, in the order of :attr:`autopar.graph.graph.Op.operands`."""
        refs: list[Ref] = []
        collect_refs((*self.args, *self.kwargs.values()), refs)
        return refs

    def bound(self) -> dict[str, Any]:
        """Return all arguments by their names in the operator's schema, in schema order and with defaults filled in.

        The schema says of which type each is; a tensor is a :class:`~autopar.graph.graph.Ref`.
        """
        result: dict[str, Any] = {}
        for position, argument in enumerate(self.overload._schema.arguments):
            if position < len(self.args):
                result[argument.name] = self.args[position]
            elif argument.name in self.kwargs:
                result[argument.name] = self.kwargs[argument.name]
            else:
                default = argument.default_value if argument.has_default_value() else None
                result[argument.name] = tuple(default) if isinstance(default, list) else default
        return result


@dataclass(slots=True)
class Builder:
    """The operators of a graph under construction, in topological order.

    Attributes:
        specs: The spec of each tensor.
        producers: The operator that produces each value, by the name of the value.
        values: The compact value of each constant.
        hints: The compact value of each model buffer and of each tensor that model buffers and constants determine. These values
            only serve to recognise attention masks. A graph never contains them, because a model on meta has none.
        lazies: The unevaluated constants, which are too large to store.
        masks: For each attention mask with a known value, whether it is causal and whether it allows everything.
        parameters: The names of the model's parameters.
        notes: Sentences about the trace for the user.
        names: All names in use.
        salts: The number of dropouts so far. Each dropout takes it as the salt of its random numbers.
    """

    ops: list[Op] = field(default_factory=list)
    specs: dict[Ref, TensorSpec] = field(default_factory=dict)
    producers: dict[str, Op] = field(default_factory=dict)
    values: dict[Ref, torch.Tensor] = field(default_factory=dict)
    hints: dict[Ref, torch.Tensor] = field(default_factory=dict)
    lazies: dict[Ref, Lazy] = field(default_factory=dict)
    masks: dict[Ref, tuple[bool, bool]] = field(default_factory=dict)
    parameters: set[str] = field(default_factory=set)
    notes: list[str] = field(default_factory=list)
    names: set[str] = field(default_factory=set)
    salts: int = 0

    def unique(self, hint: str) -> str:
        """Reserve and return an unused Python identifier that resembles ``hint``."""
        base = re.sub(r"\W", "_", hint)
        return unused(f"_{base}" if base[:1].isdigit() else base or "value", self.names)

    def leaf(self, name: str, spec: TensorSpec) -> Ref:
        """Register an input, a parameter or a buffer and return a reference to it."""
        ref = Ref(name)
        self.names.add(name)
        self.specs[ref] = spec
        return ref

    def emit(
        self,
        call: Call,
        target: str,
        args: tuple[Argument, ...],
        *outputs: TensorSpec,
        kwargs: Mapping[str, Argument] | None = None,
        name: str | None = None,
        detached: Collection[int] = (),
    ) -> Ref:
        """Append an operator that inherits the module and the source line of ``call``.

        Its floating-point outputs require a gradient if ``call.grad`` is set and an operand requires one.

        Args:
            call: The traced call that the operator implements.
            target: The target of the operator.
            args: Its positional arguments.
            outputs: The shapes and dtypes of its outputs. By default they are those of ``call``.
            kwargs: Its keyword arguments.
            name: The preferred name. By default it is the name of ``call``.
            detached: The indices of outputs that require no gradient.

        Returns:
            A reference to the first output.
        """
        op = Op(
            name=self.unique(name or call.name),
            target=target,
            args=args,
            kwargs=tuple(sorted((kwargs or {}).items())),
            outputs=(),
            module=call.module,
            source=call.source,
        )
        flows = call.grad and any(self.specs[ref].requires_grad for ref in op.operands)
        known = [spec for spec in outputs or call.outputs if spec is not None]
        specs = tuple(
            replace(s, requires_grad=flows and i not in detached and (s.dtype.is_floating_point or s.dtype.is_complex))
            for i, s in enumerate(known)
        )
        return self.append(replace(op, outputs=specs))

    def make(self, call: Call, target: str, *args: Argument, name: str | None = None, **kwargs: Argument) -> Ref:
        """Append an operator with one output as :meth:`emit` does; torch determines its shape and dtype on the meta device."""

        def on_meta(ref: Ref) -> Any:
            return torch.empty(self.specs[ref].shape, dtype=self.specs[ref].dtype, device="meta")

        with torch._C.DisableTorchFunction():  # an active torch function mode of the caller could change dtypes
            result = resolve(target)(*(map_refs(arg, on_meta) for arg in args), **kwargs)
        spec = TensorSpec.of(result)
        return self.emit(call, target, args, spec, kwargs=kwargs, name=name)

    def append(self, op: Op) -> Ref:
        """Append a complete operator, register its outputs and return a reference to the first one."""
        self.ops.append(op)
        self.producers[op.name] = op
        for i, spec in enumerate(op.outputs):
            self.specs[Ref(op.name, i)] = spec
        return Ref(op.name)

    def constant(self, call: Call, value: torch.Tensor | Lazy, spec: TensorSpec | None = None) -> Ref:
        """Register a constant under a name like that of ``call``, and return a reference to it.

        Args:
            call: The traced call that the constant replaces.
            value: The value, or the unevaluated value. A dim along which all values are equal may have size 1.
            spec: The full shape and the dtype. By default they are those of the output of ``call``.
        """
        spec = spec or call.spec
        ref = Ref(self.unique(call.name))
        self.specs[ref] = TensorSpec(shape=spec.shape, dtype=spec.dtype)
        if isinstance(value, torch.Tensor):
            self.values[ref] = compact(value)
        else:
            self.lazies[ref] = value
        return ref

    def known(self, ref: Argument) -> torch.Tensor | None:
        """Return the compact value of a constant or of a tensor that model buffers determine; None for any other argument."""
        if not isinstance(ref, Ref):
            return None
        value = self.values.get(ref)
        return value if value is not None else self.hints.get(ref)

    def shape(self, ref: Argument) -> tuple[int, ...]:
        """Return the shape of a tensor; the argument must be a reference."""
        assert isinstance(ref, Ref), ref
        return self.specs[ref].shape


def broadcast(*shapes: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape of the result of an elementwise operator on tensors of these shapes.

    >>> broadcast((4, 1), (3,))
    (4, 3)
    """
    return tuple(torch.broadcast_shapes(*shapes))  # type: ignore[no-untyped-call]


def compact(value: torch.Tensor) -> torch.Tensor:
    """Return ``value`` with size 1 in each dim along which all of its values are equal."""
    for dim, size in enumerate(value.shape):
        if size <= 1:
            continue
        first = value.narrow(dim, 0, 1)
        # The comparison with the second slice is cheap and rejects most values.
        if value.stride(dim) == 0 or all(_is_same(first, part) for part in (value.narrow(dim, 1, 1), value)):
            value = first
    return value


def _is_same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Return whether two tensors are equal after broadcasting, where NaN equals NaN."""
    a, b = torch.broadcast_tensors(a, b)  # type: ignore[no-untyped-call]  # torch 2.11's isclose does not broadcast
    return bool(torch.isclose(a, b, rtol=0.0, atol=0.0, equal_nan=True).all())
