"""Building a graph: operators appended in order, specs, and the values of what is constant.

A constant is kept compact: a dim along which all values are equal has size 1 (a causal mask of
shape ``[B, 1, S, S]`` is an ``[1, 1, S, S]`` tensor of values).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from autopar.graph.elements import collect_refs
from autopar.graph.graph import Argument, Op, Ref, TensorSpec, map_refs
from autopar.ops.kernels import resolve

if TYPE_CHECKING:
    from autopar.tracing.constants import Lazy

Value: TypeAlias = "Argument"
"""What a call gives: a tensor, a tuple of tensors (list outputs), or None for an output that nobody may read."""

FOLD_LIMIT = 2**26
"""Elements beyond which a constant is not evaluated while tracing."""

LAZY_SIZE = 2**22
"""Elements beyond which an elementwise operator on constants is evaluated only if something needs it."""

SKIPPED_KWARGS = ("device", "pin_memory", "layout", "non_blocking")


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One traced call, its arguments already values of the graph under construction."""

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
        spec = self.outputs[0]
        assert spec is not None, self.target
        return spec

    @property
    def operands(self) -> list[Ref]:
        """Every tensor argument, as those of an :class:`~autopar.graph.graph.Op`."""
        found: list[Ref] = []
        collect_refs((*self.args, *self.kwargs.values()), found)
        return found

    def bound(self) -> dict[str, Argument]:
        """Arguments by the names of the operator's schema, defaults filled in."""
        result: dict[str, Argument] = {}
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
    """Operators under construction, in topological order.

    Attributes:
        values: constants, compact.
        lazies: constants too large to hold.
        hints: values of model buffers and of what they determine, for recognising masks alone.
        masks: for each known attention mask whether it is causal, and whether it hides nothing.
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
        """A name that nothing has yet, an identifier."""
        base = re.sub(r"\W", "_", hint)
        base = f"_{base}" if base[:1].isdigit() else base or "value"
        name, k = base, 0
        while name in self.names:
            k += 1
            name = f"{base}_{k}"
        self.names.add(name)
        return name

    def leaf(self, name: str, spec: TensorSpec) -> Ref:
        """Registers an input, parameter or buffer."""
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
    ) -> Ref:
        """Appends an operator at the place of ``call``; gradients flow where an operand has one.

        Args:
            outputs: shapes and dtypes; those of ``call`` when none is given.
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
        specs = tuple(
            replace(spec, requires_grad=flows and (spec.dtype.is_floating_point or spec.dtype.is_complex))
            for spec in outputs or call.outputs
            if spec is not None
        )
        return self.append(replace(op, outputs=specs))

    def make(self, call: Call, target: str, *args: Argument, name: str | None = None, **kwargs: Argument) -> Ref:
        """As :meth:`emit`, of an operator that makes one tensor, in the shape and dtype that torch gives it on meta."""

        def on_meta(ref: Ref) -> Any:
            return torch.empty(self.specs[ref].shape, dtype=self.specs[ref].dtype, device="meta")

        with torch._C.DisableTorchFunction():  # a caller's mode may change dtypes
            made = resolve(target)(*(map_refs(arg, on_meta) for arg in args), **kwargs)
        spec = TensorSpec(shape=tuple(made.shape), dtype=made.dtype)
        return self.emit(call, target, args, spec, kwargs=kwargs, name=name)

    def stop_gradient(self, ref: Ref, *outputs: int) -> None:
        """Of the operator ``ref``, the last one appended, these outputs have no gradient."""
        op = self.ops.pop()
        assert op.name == ref.name
        specs = (replace(s, requires_grad=s.requires_grad and i not in outputs) for i, s in enumerate(op.outputs))
        self.append(replace(op, outputs=tuple(specs)))

    def append(self, op: Op) -> Ref:
        """Appends a finished operator."""
        self.ops.append(op)
        self.producers[op.name] = op
        for i, spec in enumerate(op.outputs):
            self.specs[Ref(op.name, i)] = spec
        return Ref(op.name)

    def constant(self, call: Call, value: torch.Tensor | Lazy, spec: TensorSpec | None = None) -> Ref:
        """A value known now, or evaluated when it is needed; ``value`` may have size 1 where it is equal along a dim."""
        spec = spec or call.spec
        ref = Ref(self.unique(call.name))
        self.specs[ref] = TensorSpec(shape=spec.shape, dtype=spec.dtype)
        if isinstance(value, torch.Tensor):
            self.values[ref] = compact(value)
        else:
            self.lazies[ref] = value
        return ref

    def known(self, ref: Argument) -> torch.Tensor | None:
        """The compact value of a constant, or of what a model buffer determines."""
        if not isinstance(ref, Ref):
            return None
        value = self.values.get(ref)
        return value if value is not None else self.hints.get(ref)

    def shape(self, ref: Argument) -> tuple[int, ...]:
        assert isinstance(ref, Ref), ref
        return self.specs[ref].shape


def broadcast(*shapes: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of an elementwise operator on these shapes.

    >>> broadcast((4, 1), (3,))
    (4, 3)
    """
    return tuple(torch.broadcast_shapes(*shapes))  # type: ignore[no-untyped-call]


def compact(value: torch.Tensor) -> torch.Tensor:
    """``value`` with size 1 in each dim along which it is equal."""
    for dim, size in enumerate(value.shape):
        if size <= 1:
            continue
        first = value.narrow(dim, 0, 1)
        if value.stride(dim) == 0 or all(_is_same(first, part) for part in (value.narrow(dim, 1, 1), value)):
            value = first
    return value


def _is_same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal after broadcasting, NaN equal to NaN."""
    a, b = torch.broadcast_tensors(a, b)  # type: ignore[no-untyped-call]  # isclose of torch 2.11 takes equal shapes alone
    return bool(torch.isclose(a, b, rtol=0.0, atol=0.0, equal_nan=True).all())
