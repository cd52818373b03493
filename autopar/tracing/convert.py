"""From an exported program to operators: fx nodes one by one through the handlers."""

from __future__ import annotations

import operator
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

import torch
from torch import fx

from autopar.errors import TraceError, first_line
from autopar.graph.graph import Argument, Ref, TensorSpec
from autopar.graph.operator_kinds import draws_random
from autopar.tracing.builder import Builder, Call, Value
from autopar.tracing.constants import fold, hint
from autopar.tracing.failures import FAILURES, NO_VALUES, in_autocast, source_of
from autopar.tracing.forms.basic import COMPOSITES, HANDLERS, generic
from autopar.tracing.forms.layers import LAYERS, random_call, strided
from autopar.tracing.forms.losses import LOSSES
from autopar.tracing.opaque_operators import opaque_of

_ALL_HANDLERS = HANDLERS | LAYERS | LOSSES
_DROPPED = ("_assert", "sym_", "_assert_tensor_metadata", "_guards_fn")
WRAPPER = "model."
"""The traced module holds the user's model under this prefix."""


@dataclass(slots=True)
class Converter:
    """Walks an fx graph and adds to ``builder`` what it computes.

    Attributes:
        env: the value of each fx node by name.
        module: path of the module whose call is converted.
    """

    builder: Builder
    env: dict[str, Value] = field(default_factory=dict)
    module: str = ""

    def run(self, owner: fx.GraphModule, env: dict[str, Value], *, grad: bool) -> list[Value]:
        """Converts the calls of ``owner`` and returns the outputs.

        Raises:
            TraceError: a region that cannot be inlined.
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
        held = operator.attrgetter(str(node.target))(owner)
        if not isinstance(held, torch.Tensor):
            return str(node.target)
        ref = Ref(self.builder.unique(node.name))
        self.builder.specs[ref] = TensorSpec(shape=tuple(held.shape), dtype=held.dtype)
        self.builder.values[ref] = held.detach().cpu()
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
                    fix="Call the form that takes and returns a tensor",
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
            if call.target == "aten.as_strided.default":
                (source, *_) = node.all_input_nodes
                return strided(self.builder, call, source.meta["val"])
            return _apply(self.builder, call)
        except FAILURES as error:
            raise TraceError(
                f"The call of {call.target} cannot be traced",
                where=call.source or call.module or call.name,
                got=f"{type(error).__name__}: {first_line(error)}",
                fix=_REPLACE,
            ) from error

    def _region(self, node: fx.Node, name: str, owner: torch.nn.Module, env: dict[str, Value], grad: bool) -> Value:
        """Inlines a region that torch keeps as a graph of its own; ``name``: of the operator that runs it."""
        args = list(node.args)
        if name == "wrap_with_set_grad_enabled":
            if args[0] and not grad:
                raise TraceError(
                    "A torch.enable_grad inside of torch.no_grad cannot be traced",
                    where=next((place for n in _inner(owner, args[1]).graph.nodes if (place := source_of(n))), ""),
                    fix="End the no_grad block first",
                )
            grad, args = bool(args[0]) and grad, args[1:]
        elif name == "wrap_with_autocast":
            if args[2]:
                nodes = _inner(owner, args[4]).graph.nodes
                raise in_autocast(next((place for n in nodes if (place := source_of(n))), ""))
            args = args[4:]
        elif not (args and isinstance(args[0], fx.Node) and args[0].op == "get_attr"):
            raise TraceError(f"'{name}' cannot be traced", where=source_of(node), fix=_REPLACE)
        head, operands = args[0], args[1:]
        inner = _inner(owner, head)
        places = [n for n in inner.graph.nodes if n.op == "placeholder"]
        scope = {place.name: _argument(value, env) for place, value in zip(places, operands, strict=False)}
        return tuple(self.run(inner, scope, grad=grad))


_REPLACE = "Replace the call in the model by torch operators"


def _apply(builder: Builder, call: Call) -> Value:
    """Adds ``call`` in its one form, or folds it away."""
    if call.target == "autopar.opaque.default":
        return opaque_of(builder, call)  # what it computes is not known, so that nothing is folded or foreseen
    folded = fold(builder, call)
    if folded is not None:
        return folded
    handler = random_call if draws_random(call.target) else generic
    value = _ALL_HANDLERS.get(call.target, handler)(builder, call)
    hint(builder, call, value)
    return value


def _inner(owner: torch.nn.Module, head: object) -> fx.GraphModule:
    """The region that a call names."""
    assert isinstance(head, fx.Node)
    inner = operator.attrgetter(str(head.target))(owner)
    assert isinstance(inner, fx.GraphModule)
    return inner


def needs_decomposition(module: fx.GraphModule, needed: Collection[str]) -> bool:
    """True when the exported calls mutate tensors, or are composites without a form here that ``run_decompositions({})`` divides.

    Decomposing traces everything once more, which a model of many layers need not pay for.

    Args:
        needed: names of the calls that count, of those that ``module`` makes itself.
    """
    for inner in module.modules():
        if not isinstance(inner, fx.GraphModule):
            continue
        nodes = (n for n in inner.graph.nodes if inner is not module or n.name in needed)
        for target in {n.target for n in nodes if n.op == "call_function"}:
            if getattr(target, "__module__", "") == "torch._functorch.predispatch":  # of torch.vmap
                return True
            if not isinstance(target, torch._ops.OpOverload) or target.namespace != "aten":
                continue
            known = str(target) in _ALL_HANDLERS or str(target) in COMPOSITES or _is_dropped(target)
            if target._schema.is_mutable or (not known and _is_divided(target)):
                return True
    return False


def _is_divided(target: torch._ops.OpOverload) -> bool:
    """Of a composite whose result may be its argument; those that always make a new tensor are left as they are."""
    name = target.name()  # type: ignore[no-untyped-call]
    composite = torch._C._dispatch_has_kernel_for_dispatch_key(name, "CompositeImplicitAutograd")
    may_alias = any(argument.alias_info is not None for argument in target._schema.arguments)
    return composite and (may_alias or torch.Tag.maybe_aliasing_or_mutating in target.tags)


def _is_dropped(target: torch._ops.OpOverload) -> bool:
    return target._schema.name.split("::")[1].startswith(_DROPPED)


def _argument(value: object, env: Mapping[str, Value]) -> Argument:
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
    if isinstance(value, torch.Tensor):
        return (TensorSpec(shape=tuple(int(n) for n in value.shape), dtype=value.dtype),)
    if isinstance(value, list | tuple):
        return tuple(spec for item in value for spec in (_specs(item) or (None,)))
    return ()


def _specs_of(node: fx.Node) -> tuple[TensorSpec | None, ...]:
    """The outputs of a call.

    Raises:
        TraceError: a shape, or a Python number that the model uses, depends on the values of tensors.
    """
    value = node.meta.get("val")
    number = _is_number(node)
    try:
        specs = _specs(value)
    except (RuntimeError, TypeError):  # an unknown size: GuardOnDataDependentSymNode
        number = True
    if number:
        raise TraceError(
            f"{node.target} {NO_VALUES}",
            where=source_of(node),
            fix="Write it with torch.where(condition, x, y) or a mask, or keep the number in a tensor",
        )
    return specs


def _is_number(node: fx.Node) -> bool:
    """Whether a call makes a Python number that depends on the values of tensors."""
    return isinstance(node.meta.get("val"), torch.SymInt | torch.SymFloat | torch.SymBool)


def _is_asserted(node: fx.Node) -> bool:
    """Whether assertions alone look at a number, or a tensor whose size is one: ``assert lengths.max().item() <= 16``."""
    value = node.meta.get("val")
    is_of_unknown_size = isinstance(value, torch.Tensor) and any(isinstance(n, torch.SymInt) for n in value.shape)
    return (_is_number(node) or is_of_unknown_size) and all(
        _is_asserted(user)
        or (isinstance(user.target, torch._ops.OpOverload) and _is_dropped(user.target) and not _is_number(user))
        for user in node.users
    )


def module_of(node: fx.Node) -> str:
    """Path of the module that made the call, in the user's model."""
    stack = node.meta.get("nn_module_stack")
    if not stack:
        return ""
    path = str(list(stack.values())[-1][0])
    path = re.sub(r"^L\['self'\]\.?", "", path)
    return "" if path == WRAPPER[:-1] else path.removeprefix(WRAPPER)
