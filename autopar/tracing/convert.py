"""Conversion of an exported program to the operators of a graph.

A :class:`Converter` visits the fx nodes in order. It folds each call into a constant or passes it to the handler of its target.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from autopar.errors import TraceError, first_line
from autopar.graph.graph import Argument, Ref, TensorSpec
from autopar.graph.operator_kinds import OPAQUE, draws_random
from autopar.ops.kernels import region_of
from autopar.tracing.builder import FOLD_LIMIT, Builder, Call, Value
from autopar.tracing.constants import fold, hint
from autopar.tracing.failures import FAILURES, NO_VALUES, in_autocast, source_of
from autopar.tracing.forms.basic import COMPOSITES, HANDLERS, generic, view_to
from autopar.tracing.forms.layers import LAYERS, random_call
from autopar.tracing.forms.losses import LOSSES
from autopar.tracing.side_effects import graph_modules

_ALL_HANDLERS = HANDLERS | LAYERS | LOSSES
_DROPPED = ("_assert", "sym_", "_guards_fn")
"""Prefixes of the names of operators that a graph does not contain: they check values or compute with sizes."""
WRAPPER = "model."
"""Prefix of all names of the user's model in an exported program, because the exported module wraps the model."""


@dataclass(slots=True)
class Converter:
    """Adds the operators of an exported program to ``builder``.

    Attributes:
        module: The path of the module whose call is being converted. After an error it tells where the error occurred.
    """

    builder: Builder
    module: str = ""

    def run(self, owner: fx.GraphModule, env: dict[str, Value], *, grad: bool) -> list[Value]:
        """Convert the calls of a graph module in order and return the values of its outputs.

        Args:
            owner: The module of the program, or of a region in it.
            env: The values of its placeholders by name. The values of all other nodes are added.
            grad: Whether gradients are recorded where the module is called.

        Raises:
            TraceError: A call cannot be converted.
        """
        for node in owner.graph.nodes:
            if node.op == "call_function":
                self.module = module_of(node)
                env[node.name] = self._call(node, owner, env, grad)
            elif node.op == "get_attr":
                env[node.name] = self._attribute(node, owner)
            elif node.op == "output":
                outputs = node.args[0]
                assert isinstance(outputs, list | tuple)
                return [_argument(item, env) for item in outputs]
        return []

    def _attribute(self, node: fx.Node, owner: torch.nn.Module) -> Value:
        """Return the constant that a ``get_attr`` node reads; the name of the attribute if it is a region."""
        attribute = operator.attrgetter(str(node.target))(owner)
        if not isinstance(attribute, torch.Tensor):
            return str(node.target)
        ref = Ref(self.builder.unique(node.name))
        self.builder.specs[ref] = TensorSpec.of(attribute)
        self.builder.values[ref] = attribute.detach().cpu()
        return ref

    def _call(self, node: fx.Node, owner: torch.nn.Module, env: dict[str, Value], grad: bool) -> Value:
        target = node.target
        if _is_asserted(node):
            return None
        if target is operator.getitem:
            values, index = _argument(node.args[0], env), node.args[1]
            if not isinstance(values, tuple):
                raise TraceError(
                    f"{getattr(node.args[0], 'target', '')} returns a list of one tensor, which cannot be traced",
                    where=source_of(node),
                    fix="Write it with operators that return a tensor",
                )
            assert isinstance(index, int)
            return values[index]
        if isinstance(target, torch._ops.HigherOrderOperator):
            return self._region(node, str(target._name), owner, env, grad)
        if not isinstance(target, torch._ops.OpOverload):
            raise TraceError(
                f"'{target}' is not a torch operator, so it cannot be traced", where=source_of(node), fix=_REPLACE
            )
        if _is_dropped(target):
            return None
        specs = _specs_of(node)
        call = Call(
            name=node.name,
            target=str(target),
            overload=target,
            args=tuple(_argument(arg, env) for arg in node.args),
            kwargs={key: _argument(value, env) for key, value in node.kwargs.items()},
            outputs=specs,
            module=module_of(node),
            source=source_of(node),
            grad=grad,
        )
        if not call.outputs:
            return None
        try:
            if call.target in _STRIDED:
                (source, *_) = node.all_input_nodes
                return _STRIDED[call.target](self.builder, call, source.meta["val"])
            return _apply(self.builder, call)
        except FAILURES as error:
            raise TraceError(
                f"The call of {call.target} cannot be traced",
                where=call.source or call.module or call.name,
                got=f"{type(error).__name__}: {first_line(error)}",
                fix=_REPLACE,
            ) from error

    def _region(self, node: fx.Node, name: str, owner: torch.nn.Module, env: dict[str, Value], grad: bool) -> Value:
        """Inline a region that the program calls as a separate graph module through the higher-order operator ``name``."""
        position = {"wrap_with_set_grad_enabled": 1, "wrap_with_autocast": 4}.get(name, 0)
        head, *operands = node.args[position:] or (None,)
        if not (isinstance(head, fx.Node) and head.op == "get_attr"):
            raise TraceError(f"'{name}' cannot be traced", where=source_of(node), fix=_REPLACE)
        inner = operator.attrgetter(str(head.target))(owner)
        assert isinstance(inner, fx.GraphModule)
        place = next((source for n in inner.graph.nodes if (source := source_of(n))), "")
        if name == "wrap_with_set_grad_enabled":
            if node.args[0] and not grad:
                raise TraceError(
                    "A torch.enable_grad inside of torch.no_grad cannot be traced",
                    where=place,
                    fix="End the no_grad block first",
                )
            grad = bool(node.args[0])
        elif name == "wrap_with_autocast" and node.args[2]:
            raise in_autocast(place)
        placeholders = [n.name for n in inner.graph.nodes if n.op == "placeholder"]
        scope = {key: _argument(value, env) for key, value in zip(placeholders, operands, strict=False)}
        return tuple(self.run(inner, scope, grad=grad))


_REPLACE = "Replace the call in the model by torch operators"


def _apply(builder: Builder, call: Call) -> Value:
    """Fold ``call`` into a constant or add it to the graph in its canonical form, and return its value."""
    if call.target == "autopar.opaque.default":
        return _opaque(builder, call)  # never folded, because it runs code of the user
    folded = fold(builder, call)
    if folded is not None:
        return folded
    handler = random_call if draws_random(call.target) else generic
    value = _ALL_HANDLERS.get(call.target, handler)(builder, call)
    hint(builder, call, value)
    return value


def _opaque(builder: Builder, call: Call) -> Value:
    """Add the operator of a region to the graph and return its results. Gradients flow to those of which the examined region gave them.

    Args:
        call: is one of ``torch.ops.autopar.opaque``.
    """
    args = tuple(call.bound().values())
    region = region_of(str(args[0]))
    detached = [i for i, (_, _, flows) in enumerate(region.outputs) if not flows]
    result = builder.emit(call, OPAQUE, args, detached=detached)
    return tuple(Ref(result.name, i) for i in range(len(region.outputs)))


def _strided(builder: Builder, call: Call, traced: torch.Tensor) -> Value:
    """Return ``x.as_strided(...)`` as an index of constant positions; ``traced`` is x."""
    read = _elements(call, traced)
    source, samples = call.operands[0], traced.shape[0]
    numbers = torch.arange(traced.numel())
    of_each = numbers[:: traced.numel() // samples].view(-1, *(1,) * (read.dim() - 1))
    if len(read) == samples and torch.equal(read, read[:1] + of_each):
        rows, read = view_to(builder, call, source, (samples, traced.numel() // samples)), read[0]
    else:
        rows = view_to(builder, call, source, (traced.numel(),))
    positions = builder.constant(call, read, TensorSpec.of(read))
    return builder.emit(call, "aten.index.Tensor", (rows, (*(None,) * (len(builder.shape(rows)) - 1), positions)))


def _strided_scatter(builder: Builder, call: Call, traced: torch.Tensor) -> Value:
    """Return ``x.as_strided_scatter(y, ...)``, as ``fill_diagonal_`` is traced, as a choice of x or y; ``traced`` is x.

    The gradient that torch gives to x is wrong: it reaches the elements that are replaced, and no other.
    """
    written = _elements(call, traced).flatten()
    chosen = torch.full((traced.numel(),), -1)  # the element of y for each element of x
    chosen[written] = torch.arange(len(written))
    target, source = call.operands
    places, is_written = chosen.clamp(min=0).view(traced.shape), (chosen >= 0).view(traced.shape)
    number = builder.values.get(source)
    if number is not None and number.numel() == 1:
        spread = builder.constant(call, number.reshape((1,) * traced.dim()), call.spec)
    else:
        flat = view_to(builder, call, source, (len(written),))
        index = builder.constant(call, places, TensorSpec.of(places))
        spread = builder.emit(call, "aten.index.Tensor", (flat, (index,)))
    mask = builder.constant(call, is_written, TensorSpec.of(is_written))
    return builder.emit(call, "aten.where.self", (mask, spread, target))


_STRIDED = {"aten.as_strided.default": _strided, "aten.as_strided_scatter.default": _strided_scatter}
"""The functions for operators that address memory by strides: in a program, a tensor may lie in memory in another way."""


def _elements(call: Call, traced: torch.Tensor) -> torch.Tensor:
    """Return the number of the element of x at each place that the strides of ``call`` address.

    Args:
        traced: x as it lay in memory where it was traced.

    Raises:
        TraceError: a place is not x's, or there are too many.
    """
    given: dict[str, Any] = call.bound()
    size, stride, start = (given[key] for key in ("size", "stride", "storage_offset"))
    first = traced.storage_offset() if start is None else start
    layouts = ((size, stride, first), (traced.shape, traced.stride(), traced.storage_offset()))
    length = 1 + max(at + sum((n - 1) * step for n, step in zip(*dims, strict=True)) for *dims, at in layouts)
    problem = f"A call of as_strided over {length} elements is not supported"
    if length <= FOLD_LIMIT and call.spec.numel:
        elements = torch.full((length,), -1)  # the element of x at each place of the memory
        elements.as_strided(*layouts[1]).copy_(torch.arange(traced.numel()).view(traced.shape))
        read = elements.as_strided(size, stride, first)
        if (read >= 0).all():
            return read
        problem = "A call of as_strided reads memory that is not the tensor's"
    raise TraceError(problem, where=call.source or call.name, fix="Use unfold, or slices, in its place")


def needs_decomposition(program: torch.export.ExportedProgram, needed: Collection[str]) -> bool:
    """Return whether a program must be decomposed by ``run_decompositions({})`` before it is converted.

    This is so if it calls an operator that mutates a tensor, a composite operator without a handler that may return its argument,
    or ``torch.vmap``. A decomposition traces the program again, which takes long for a model of many layers.

    Args:
        program: The exported program.
        needed: The names of the nodes of its graph to examine. Regions are always examined completely.
    """
    for inner in graph_modules(program):
        nodes = (n for n in inner.graph.nodes if inner is not program.graph_module or n.name in needed)
        for target in {n.target for n in nodes if n.op == "call_function"}:
            if getattr(target, "__module__", "") == "torch._functorch.predispatch":  # torch.vmap
                return True
            if not isinstance(target, torch._ops.OpOverload) or target.namespace != "aten":
                continue
            is_handled = str(target) in _ALL_HANDLERS or str(target) in COMPOSITES or _is_dropped(target)
            if target._schema.is_mutable or (not is_handled and _is_decomposed(target)):
                return True
    return False


def _is_decomposed(target: torch._ops.OpOverload) -> bool:
    """Return whether ``run_decompositions({})`` decomposes an operator: a composite one whose result may alias its argument.

    Composite operators that always return a new tensor are preserved.
    """
    name = target.name()  # type: ignore[no-untyped-call]
    composite = torch._C._dispatch_has_kernel_for_dispatch_key(name, "CompositeImplicitAutograd")
    may_alias = any(argument.alias_info is not None for argument in target._schema.arguments)
    return composite and (may_alias or torch.Tag.maybe_aliasing_or_mutating in target.tags)


def _is_dropped(target: torch._ops.OpOverload) -> bool:
    """Return whether a graph does not contain an operator, because it only checks values or computes with sizes."""
    return target._schema.name.split("::")[1].startswith(_DROPPED)


def _argument(value: object, env: Mapping[str, Value]) -> Argument:
    """Return an argument of a node with the values of other nodes in place of the nodes.

    Raises:
        TraceError: It is neither a tensor nor a literal.
    """
    if isinstance(value, fx.Node):
        return env[value.name]
    if isinstance(value, list | tuple):
        return tuple(_argument(item, env) for item in value)
    if value is None or isinstance(
        value, bool | int | float | complex | str | torch.dtype | torch.device | torch.memory_format | torch.layout
    ):
        return value
    raise TraceError(f"The argument {value!r} of a call is neither a tensor nor a literal", fix=_REPLACE)


def _specs(value: object) -> tuple[TensorSpec | None, ...]:
    """Return the specs of the outputs of a call with the fake result ``value``, with None for an output that is not a tensor."""
    if isinstance(value, torch.Tensor):
        return (TensorSpec(shape=tuple(int(n) for n in value.shape), dtype=value.dtype),)
    if isinstance(value, list | tuple):
        return tuple(spec for item in value for spec in (_specs(item) or (None,)))
    return ()


def _specs_of(node: fx.Node) -> tuple[TensorSpec | None, ...]:
    """Return the specs of the outputs of a call, with None for an output that is not a tensor.

    Raises:
        TraceError: A shape, or a Python number that the model uses, depends on the values of tensors.
    """
    depends_on_values = _is_number(node)
    try:
        specs = _specs(node.meta.get("val"))
    except (RuntimeError, TypeError):  # int() of a size that depends on values raises GuardOnDataDependentSymNode
        depends_on_values = True
    if depends_on_values:
        raise TraceError(
            f"{node.target} {NO_VALUES}",
            where=source_of(node),
            fix="Write it with torch.where(condition, x, y) or a mask, or keep the number in a tensor",
        )
    return specs


def _is_number(node: fx.Node) -> bool:
    """Return whether a call returns a Python number, which depends on the values of tensors; what is asserted of it may tell it."""
    return isinstance(node.meta.get("val"), torch.SymInt | torch.SymFloat | torch.SymBool | int | float)


def _is_asserted(node: fx.Node) -> bool:
    """Return whether only assertions read the result of a call and the result is, or has a size that is, a number that depends on values.

    An example is the result of ``lengths.max().item()`` in ``assert lengths.max().item() <= 16``.
    """
    value = node.meta.get("val")
    is_of_unknown_size = isinstance(value, torch.Tensor) and any(isinstance(n, torch.SymInt) for n in value.shape)
    return (_is_number(node) or is_of_unknown_size) and all(
        _is_asserted(user)
        or (isinstance(user.target, torch._ops.OpOverload) and _is_dropped(user.target) and not _is_number(user))
        for user in node.users
    )


def module_of(node: fx.Node) -> str:
    """Return the path in the user's model of the module that made a call; empty for the model itself or if it is not known."""
    stack = node.meta.get("nn_module_stack")
    if not stack:
        return ""
    path = str(list(stack.values())[-1][0])
    path = re.sub(r"^L\['self'\]\.?", "", path)
    return "" if path == WRAPPER[:-1] else path.removeprefix(WRAPPER)
