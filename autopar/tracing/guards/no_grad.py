"""Stretches of a model without gradient (``torch.no_grad``), kept in the graph.

A graph is one list of operators, and ``run_decompositions`` too forgets where gradients were off: what was computed there
would get one. So every tensor that enters such a stretch is cut off by ``detach``, which stays.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import fx
from torch.export.graph_signature import InputKind

from autopar.errors import TraceError

_REGION = "wrap_with_set_grad_enabled"


def cut_off(program: torch.export.ExportedProgram, place_of: Callable[[fx.Node], str]) -> None:
    """Puts ``detach`` behind what enters a stretch without gradient; changes ``program``.

    Args:
        place_of: the user's line of a node, for messages.

    Raises:
        TraceError: an activation with a gradient is written in place where gradients are off.
    """
    trained = {
        getattr(spec.arg, "name", "")
        for spec in program.graph_signature.input_specs
        if spec.kind == InputKind.PARAMETER
    }
    marker = _Marker(place_of)
    marker.parameters |= trained
    marker.walk(program.graph_module, trained, off=False)


def written_parameter(name: str, place: str = "") -> TraceError:
    """Forward writes to a parameter."""
    return TraceError(
        f"The parameter {name} is written to in forward",
        where=place,
        fix="Write to it after optimizer.step(), outside of the model, or make it a buffer",
    )


class _Marker:
    """One pass over a module and the regions inside."""

    def __init__(self, place_of: Callable[[fx.Node], str]) -> None:
        self.place_of, self.parameters = place_of, set[str]()

    def walk(self, module: fx.GraphModule, with_gradient: set[str], *, off: bool) -> None:
        """``with_gradient``: names of the placeholders of ``module`` that have one; grows by what depends on them."""
        for node in list(module.graph.nodes):
            if node.op == "output":
                continue
            operands = [n for n in node.all_input_nodes if n.name in with_gradient]
            if node.op == "call_function" and _writes(node):
                self._check(node, with_gradient, off)
            region = _region_of(node, module)
            if region is not None:
                inner, is_on = region
                places = [n for n in inner.graph.nodes if n.op == "placeholder"]
                arguments = [a for a in node.args if isinstance(a, fx.Node) and a.op != "get_attr"]
                entering = {p.name for p, a in zip(places, arguments, strict=False) if a.name in with_gradient}
                self.parameters |= {
                    p.name for p, a in zip(places, arguments, strict=False) if a.name in self.parameters
                }
                if not is_on and not off:
                    _detach(inner, places)
                self.walk(inner, entering, off=off or not is_on)
                if not is_on:
                    continue
            if operands and not off:
                with_gradient.add(node.name)

    def _check(self, node: fx.Node, with_gradient: set[str], off: bool) -> None:
        written, detached = _root(node.args[0])
        if written.op == "placeholder" and written.name in self.parameters:
            raise written_parameter(written.name, self.place_of(node))
        if written.name in with_gradient and (off or detached):
            raise TraceError(
                f"{node.target} writes in place to {written.name}, which has a gradient, where gradients are off",
                where=self.place_of(node) or node.name,
                fix="Write x = x.masked_fill(...) or the like, with gradients on, or detach a copy",
            )


def _writes(node: fx.Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable


def _root(argument: object) -> tuple[fx.Node, bool]:
    """Whose memory a tensor is, views and detach looked through; whether a detach was."""
    assert isinstance(argument, fx.Node)
    node, detached = argument, False
    while node.op == "call_function" and isinstance(node.target, torch._ops.OpOverload):
        schema = node.target._schema
        aliases = any(r.alias_info is not None for r in schema.returns) and bool(node.args)
        if not aliases or not isinstance(node.args[0], fx.Node):
            break
        detached = detached or node.target in (torch.ops.aten.detach.default, torch.ops.aten.detach_.default)
        node = node.args[0]
    return node, detached


def _region_of(node: fx.Node, module: fx.GraphModule) -> tuple[fx.GraphModule, bool] | None:
    """The stretch that a call runs, and whether gradients are on in it; None for any other call."""
    target = node.target
    if not isinstance(target, torch._ops.HigherOrderOperator) or str(target._name) != _REGION:
        return None
    head = node.args[1]
    assert isinstance(head, fx.Node)
    inner = getattr(module, str(head.target))
    assert isinstance(inner, fx.GraphModule)
    return inner, bool(node.args[0])


def _detach(inner: fx.GraphModule, places: list[fx.Node]) -> None:
    for place in _tensors(places):
        users = list(place.users)
        with inner.graph.inserting_after(places[-1]):
            made = inner.graph.call_function(torch.ops.aten.detach.default, (place,))
        made.meta = dict(place.meta)
        for user in users:
            user.replace_input_with(place, made)
    inner.recompile()


def _tensors(places: list[fx.Node]) -> Iterator[fx.Node]:
    return (p for p in places if isinstance(p.meta.get("val"), torch.Tensor) and p.meta["val"].is_floating_point())
