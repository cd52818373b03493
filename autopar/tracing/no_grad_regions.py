"""Regions of an exported program in which the user's code switches gradients off.

torch.export keeps such a region as a graph that a higher-order operator calls. A graph of autopar is a flat list of operators, and
``run_decompositions`` drops the regions too, so that operators in them would get gradients. :func:`detach_in_no_grad` therefore
passes every tensor that enters a region through a ``detach``, which stays.
"""

from __future__ import annotations

import torch
from torch import Tensor, fx
from torch.export.graph_signature import InputKind

from autopar.errors import TraceError
from autopar.tracing.failures import source_of
from autopar.tracing.side_effects import root_of, writes

_REGION = "wrap_with_set_grad_enabled"
"""The name of the higher-order operator by which torch.export calls a region with gradients on or off."""
_DROPOUTS = tuple(
    getattr(torch.ops.aten, name).default
    for name in ("dropout", "alpha_dropout", "feature_dropout", "feature_alpha_dropout")
)


def detach_in_no_grad(program: torch.export.ExportedProgram) -> None:
    """Detach, in place, every tensor that enters a region of ``program`` with gradients off; remove dropouts that drop nothing.

    Raises:
        TraceError: forward writes in place to a parameter, or to a tensor that has a gradient where gradients are off or through a
            detached view.
    """
    trained = {
        getattr(spec.arg, "name", "")
        for spec in program.graph_signature.input_specs
        if spec.kind == InputKind.PARAMETER
    }
    for module in program.graph_module.modules():
        for node in list(module.graph.nodes) if isinstance(module, fx.GraphModule) else ():
            # In eval mode or with p=0 a dropout returns its argument itself. torch's decomposition returns a copy.
            if node.target in _DROPOUTS and not (node.args[1] and node.args[2]):
                node.replace_all_uses_with(node.args[0])
                module.graph.erase_node(node)
    _detach_in(program.graph_module, set(trained), trained, off=False)


def written_parameter(name: str, place: str = "") -> TraceError:
    """Return the error for a forward that writes to the parameter ``name`` at the line ``place``."""
    return TraceError(
        f"The parameter {name} is written to in forward",
        where=place,
        fix="Write to it after optimizer.step(), outside of the model, or make it a buffer",
    )


def _detach_in(module: fx.GraphModule, with_gradient: set[str], parameters: set[str], *, off: bool) -> None:
    """Do the work of :func:`detach_in_no_grad` for the nodes of ``module`` and for the regions that it calls.

    Args:
        with_gradient: holds the names of the placeholders of ``module`` that have a gradient. Nodes that depend on them are added.
        parameters: holds the names of placeholders that are parameters. The placeholders of regions that receive them are added.
        off: says whether gradients are off in ``module``.
    """
    for node in list(module.graph.nodes):
        if node.op == "output":
            continue
        operands = [n for n in node.all_input_nodes if n.name in with_gradient]
        if node.op == "call_function" and writes(node):
            _check_write(node, with_gradient, parameters, off)
        region = region_of(node, module)
        if region is not None:
            inner, is_on = region
            placeholders = [n for n in inner.graph.nodes if n.op == "placeholder"]
            arguments = [a for a in node.args if isinstance(a, fx.Node) and a.op != "get_attr"]
            bound = [(p.name, argument.name) for p, argument in zip(placeholders, arguments, strict=False)]
            entering = {name for name, argument in bound if argument in with_gradient}
            parameters |= {name for name, argument in bound if argument in parameters}
            if not is_on and not off:
                _detach(inner, placeholders)
            _detach_in(inner, entering, parameters, off=off or not is_on)
            if not is_on:
                continue
        if operands and not off:
            with_gradient.add(node.name)


def _check_write(node: fx.Node, with_gradient: set[str], parameters: set[str], off: bool) -> None:
    """Raise the errors of :func:`detach_in_no_grad` for ``node``, which writes in place to its first argument."""
    written, detached = root_of(node.args[0])
    if written.op == "placeholder" and written.name in parameters:
        raise written_parameter(written.name, source_of(node))
    if written.name in with_gradient and (off or detached):
        raise TraceError(
            f"{node.target} writes in place to {written.name}, which has a gradient, where gradients are off",
            where=source_of(node) or node.name,
            fix="Write x = x.masked_fill(...) or the like, with gradients on, or detach a copy",
        )


def region_of(node: fx.Node, module: fx.GraphModule) -> tuple[fx.GraphModule, bool] | None:
    """Return the graph that a call of ``torch.set_grad_enabled`` runs and whether gradients are on in it; None for any other call.

    Args:
        node: is any node of ``module``, whose attributes hold the graphs that it calls.
    """
    target = node.target
    if not isinstance(target, torch._ops.HigherOrderOperator) or str(target._name) != _REGION:
        return None
    head = node.args[1]
    assert isinstance(head, fx.Node)
    inner = getattr(module, str(head.target))
    assert isinstance(inner, fx.GraphModule)
    return inner, bool(node.args[0])


def _detach(inner: fx.GraphModule, placeholders: list[fx.Node]) -> None:
    """Let all nodes of ``inner`` read detached copies of its floating-point placeholders; its outputs still return the placeholders."""
    for placeholder in placeholders:
        if not (isinstance(placeholder.meta.get("val"), Tensor) and placeholder.meta["val"].is_floating_point()):
            continue
        users = [user for user in placeholder.users if user.op != "output"]
        with inner.graph.inserting_after(placeholders[-1]):
            detached = inner.graph.call_function(torch.ops.aten.detach.default, (placeholder,))
        detached.meta = dict(placeholder.meta)
        for user in users:
            user.replace_input_with(placeholder, detached)
    inner.recompile()
