"""Effects of a forward pass besides its result: attributes that it sets, hooks on gradients, and writes in place.

A graph has none of these. Attributes and hooks on which the numbers of a model depend are refused or make a module opaque.

:func:`return_writes` rewrites calls that write in place. Which tensors share memory is read from the storages of the fake tensors of an
export, because the schemas of some operators do not say that they may return their argument. A write whose result has no other
reader becomes a call that returns it. Other writes are left to ``run_decompositions``, and those that it would get wrong are refused.
"""

from __future__ import annotations

import operator
import threading
import types
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor, fx
from torch.overrides import TorchFunctionMode

from autopar.errors import TraceError
from autopar.tracing.failures import source_of

_PLAIN = (bool, int, float, str, bytes, complex)
_CONTAINERS = (list, dict, set, tuple)
_DEPTH, _LONG = 3, 64
"""The largest nesting of containers, and the largest number of items in one, of which the state has the contents."""
_PRIVATE = frozenset(vars(torch.nn.Module()))
"""Attributes of every module, such as its parameters and hooks."""

State = Mapping[str, object]


def state_of(model: torch.nn.Module) -> State:
    """Return the numbers and strings among the attributes of all modules, and in containers among them, by the path of the attribute."""
    state: dict[str, object] = {}
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            if name in _PRIVATE:
                continue
            place = f"{path}.{name}" if path else name
            if isinstance(value, (*_PLAIN, *_CONTAINERS, types.SimpleNamespace)):
                state[place] = _plain(value, _DEPTH)
    return state


def _plain(value: object, depth: int) -> object:
    """Return a copy of the numbers and strings in ``value``. Of long or deeply nested containers it has the lengths only."""
    if isinstance(value, types.SimpleNamespace):
        value = vars(value)
    if isinstance(value, _CONTAINERS) and (len(value) > _LONG or not depth):
        return len(value)
    if isinstance(value, dict):
        return {str(key): _plain(item, depth - 1) for key, item in value.items()}
    if isinstance(value, _CONTAINERS):
        return [_plain(item, depth - 1) for item in value]
    return value if isinstance(value, _PLAIN) else None


def changed(before: State, after: State) -> tuple[str, ...]:
    """Return the names of attributes that are new in ``after`` or have another value."""
    return tuple(name for name in after if name not in before or before[name] != after[name])


@contextmanager
def gradients_in_forward_refused() -> Iterator[None]:
    """Enter a context in which code of this thread may neither hook the gradient of a tensor nor take gradients: its line gets an error."""
    owner = threading.get_ident()

    def refused(place: object, name: str, why: str) -> mock._patch[Any]:
        usual = getattr(place, name)

        def call(*args: Any, **options: Any) -> Any:
            if threading.get_ident() == owner:
                raise RuntimeError(why)
            return usual(*args, **options)

        return mock.patch.object(place, name, call)

    why = "a trace would lose how a gradient that forward takes itself depends on parameters"
    with (
        refused(torch.Tensor, "register_hook", "a trace would lose a hook on a tensor's gradient"),
        refused(torch.autograd, "grad", why),
        refused(torch.autograd, "backward", why),
    ):
        yield


def casts_that_change_nothing() -> AbstractContextManager[object]:
    """Return a context in which ``module.to(...)`` returns a module that needs no cast as it is, because fake parameters cannot be replaced."""
    usual = torch.nn.Module.to

    def to(self: torch.nn.Module, *args: Any, **kwargs: Any) -> torch.nn.Module:
        device, dtype, _, memory_format = torch._C._nn._parse_to(*args, **kwargs)
        tensors = (*self.parameters(), *self.buffers())
        fits = all(
            (dtype is None or not t.is_floating_point() or t.dtype == dtype) and (device is None or t.device == device)
            for t in tensors
        )
        return self if fits and memory_format is None else usual(self, *args, **kwargs)

    return mock.patch.object(torch.nn.Module, "to", to)


def masks_not_asked() -> AbstractContextManager[object]:
    """While tracing, torch's transformers take a mask as it is given: they ask its values whether it is causal, to hint at a faster kernel."""

    def hint(mask: Tensor | None, is_causal: bool | None = None, size: int | None = None) -> bool:
        return is_causal is True

    return mock.patch.object(torch.nn.modules.transformer, "_detect_is_causal_mask", hint)


def inference_as_no_grad() -> AbstractContextManager[object]:
    """Return a context in which ``torch.inference_mode`` acts as ``torch.no_grad``, because an export records only the latter."""
    return mock.patch.object(torch._C, "_InferenceMode", lambda on: torch.no_grad() if on else torch.enable_grad())


@contextmanager
def written_back(model: torch.nn.Module) -> Iterator[None]:
    """Enter a context in which a buffer that forward replaces (``self.mean = new``) is written in place, because export ignores replacements.

    Raises:
        TraceError: Forward removes a buffer, replaces it by one of another shape, or sets one that was None and that checkpoints keep.
    """
    before = [(path, module, dict(module._buffers)) for path, module in model.named_modules()]
    yield
    for path, module, buffers in before:
        for name, old in buffers.items():
            new = module._buffers.get(name)
            if new is old or (old is None and name in module._non_persistent_buffers_set):
                continue  # a cache that the first pass fills is computed in each step, as if it were a plain attribute
            if old is None or new is None or new.shape != old.shape:
                raise TraceError(
                    f"The buffer changes its shape in training, from {_shape(old)} to {_shape(new)}",
                    where=f"{path}.{name}" if path else name,
                    fix="Make it in __init__ with the shape that it has in training",
                )
            with torch.no_grad():
                old.copy_(new)
            module._buffers[name] = old


@contextmanager
def caches_emptied(model: torch.nn.Module) -> Iterator[None]:
    """Enter a context on leaving which those buffers are None again that are None now: an export leaves its own tensors in them."""
    empty = [(module, name) for module in model.modules() for name, buffer in module._buffers.items() if buffer is None]
    try:
        yield
    finally:
        for module, name in empty:
            module._buffers[name] = None


def _shape(buffer: torch.Tensor | None) -> str:
    return "None" if buffer is None else str(tuple(buffer.shape))


class ParametersKept(TorchFunctionMode):
    """Refuses changes of a parameter through ``.data`` or ``requires_grad``, which an export loses or fails at.

    Reading ``.data`` gives a detached tensor, because an export would take the data for a constant.
    """

    def __init__(self) -> None:
        super().__init__()
        self._data: list[torch.Tensor] = []  # detached tensors of parameters

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        name, attribute = getattr(func, "__name__", ""), getattr(func, "__self__", None)
        problem, is_parameter = "", bool(args) and isinstance(args[0], torch.nn.Parameter)
        if name.endswith("_") and not name.endswith("__") and any(args[0] is x for x in self._data if args):
            problem = f"Forward changes a parameter by .data.{name}"
            fix = "Use what the call returns where the parameter is read, or call it after optimizer.step()"
        elif name == "__set__" and attribute is torch.Tensor.data:
            problem = "Forward assigns to .data of a tensor, which a trace would lose"
            fix = "Write to a buffer by copy_(...) under torch.no_grad(), and to a parameter after optimizer.step()"
        elif name == "requires_grad_" or (name == "__set__" and attribute is torch.Tensor.requires_grad):
            wanted = (*args[1:], *(kwargs or {}).values(), True)[0]
            if is_parameter and args[0].requires_grad != wanted:
                problem = "Forward changes requires_grad of a parameter, which a trace would lose"
                fix = "Set it before training, or call that part by torch.func.functional_call with detached parameters"
        if problem:
            raise TraceError(problem, fix=fix)
        if attribute is not torch.Tensor.data or name != "__get__":
            return func(*args, **dict(kwargs or {}))
        detached = args[0].detach()
        if is_parameter:
            self._data.append(detached)
        return detached


# --- writes in place


def writes(node: fx.Node) -> bool:
    """Return whether a call of an operator changes one of its arguments."""
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable


def return_writes(program: torch.export.ExportedProgram) -> None:
    """Replace, in place, calls that write to a tensor which the program has computed by calls that return the new tensor.

    ``torch.tensor(0.0)`` contains such a write (``detach_``), and encoder-decoders shift labels by one (``x[:, 1:] = y``). A program with
    writes has to be decomposed, which traces it a second time. Writes to inputs, through views other than slices, that draw random
    numbers or that change the dtype are left to this.

    Raises:
        TraceError: the written tensor is read by another name that torch's decompositions do not know to share its memory.
    """
    for module in graph_modules(program):
        _return_in(module.graph)
        if module is not program.graph_module:  # a region without gradients is called by its generated code
            module.recompile()


def graph_modules(program: torch.export.ExportedProgram) -> list[fx.GraphModule]:
    """Return the graph module of a program and those of its regions."""
    return [module for module in program.graph_module.modules() if isinstance(module, fx.GraphModule)]


def _return_in(graph: fx.Graph) -> None:
    """Do the work of :func:`return_writes` in one graph, whose nodes keep their order."""
    order = {node: i for i, node in enumerate(graph.nodes)}
    sharing: dict[int, list[fx.Node]] = {}  # nodes by the memory of their tensor
    written: dict[int, list[int]] = {}  # positions of writes by the memory that they change
    for node, position in order.items():
        if (target := _written_to(node)) is not None and (memory := _memory(target)) is not None:
            written.setdefault(memory, []).append(position)
        is_copied_constant = {user.target for user in node.users} == {torch.ops.aten.lift_fresh_copy.default}
        if not is_copied_constant and (memory := _memory(node)) is not None:
            sharing.setdefault(memory, []).append(node)
    for node, position in list(order.items()):
        target = _written_to(node)
        if target is None or (memory := _memory(target)) is None:
            continue
        if node.target is torch.ops.aten.detach_.default and target.target is torch.ops.aten.lift_fresh_copy.default:
            node.replace_all_uses_with(target)  # a number in the code has no gradient to detach
            sharing[memory].remove(node)
            graph.erase_node(node)
            continue
        aliases, (base, *views) = sharing[memory], _views_to(target)
        read_later = [
            n
            for n in aliases
            if n is not base and (n.op != "call_function" or any(order[user] > position for user in n.users))
        ]
        _check_aliases(node, read_later, order)
        # Users of the written view can read the new view if they come no later than the next write and take no further view of it.
        next_write = min((p for p in written[memory] if p > position), default=len(order))
        reads_view_only = all(
            order[n] <= next_write and (_memory(n) != memory or _written_to(n) not in (None, node)) for n in node.users
        )
        is_aliased = any(order[n] < position for n in read_later) or (views and not reads_view_only)
        call = None if is_aliased else _returning(node)
        if call is None or base.op != "call_function" or any(u.op == "output" for u in (*base.users, *node.users)):
            continue
        later_users = [user for user in base.users if order[user] > position]
        with graph.inserting_before(node):
            new_view = new_base = graph.call_function(call, node.args, node.kwargs)
            new_base.meta, order[new_base] = dict(node.meta), position
            for view in reversed(views):
                new_base = _pasted(graph, view, new_base)
                order[new_base] = position
        for user in later_users:
            user.replace_input_with(base, new_base)
        node.replace_all_uses_with(new_view)
        aliases[:] = [*(n for n in aliases if n is not node), new_base]
        graph.erase_node(node)


_PASTES: dict[Any, Any] = {
    torch.ops.aten.slice.Tensor: torch.ops.aten.slice_scatter.default,
    torch.ops.aten.select.int: torch.ops.aten.select_scatter.default,
}
"""For each operator that takes a view of a tensor, the one that returns the tensor with other values in that view."""


def _views_to(target: fx.Node) -> list[fx.Node]:
    """Return the base tensor of ``target`` and the slices, each of the one before, through which ``target`` was taken from it."""
    chain = [target]
    while chain[0].target in _PASTES and isinstance(chain[0].args[0], fx.Node):
        chain.insert(0, chain[0].args[0])
    return chain


def _pasted(graph: fx.Graph, view: fx.Node, values: fx.Node) -> fx.Node:
    """Return the tensor that ``view`` was taken from, with ``values`` in the place of the view."""
    base: Any = view.args[0]
    if base.meta["val"].shape == view.meta["val"].shape:  # x[:, 0] first takes a slice of all rows
        return values
    pasted = graph.call_function(_PASTES[view.target], (base, values, *view.args[1:]), view.kwargs)
    pasted.meta = dict(base.meta) | {"stack_trace": values.meta.get("stack_trace")}
    return pasted


def _written_to(node: fx.Node) -> fx.Node | None:
    """Return the argument that a call writes to in place; None if it does not write."""
    target = node.args[0] if node.op == "call_function" and writes(node) and node.args else None
    return target if isinstance(target, fx.Node) else None


def _memory(node: fx.Node) -> int | None:
    """Return the identity of the storage of a node's tensor, which its views share; the fake tensor in ``node.meta`` keeps it valid."""
    value = node.meta.get("val")
    if (
        not isinstance(value, Tensor)
        or value.layout is not torch.strided
        or torch._C._functorch.is_batchedtensor(value)
    ):
        return None  # tensors inside of torch.vmap have no storage
    memory: int = value.untyped_storage()._cdata
    return memory


def _check_aliases(node: fx.Node, read_later: Sequence[fx.Node], order: Mapping[fx.Node, int]) -> None:
    """Check that torch's decompositions know that the nodes in ``read_later`` share the memory that ``node`` writes to.

    Composite operators, such as ``einsum`` of one tensor, may return their argument though their schema does not say so; decompositions
    then copy it. Decompositions do follow what a region without gradients returns.

    Raises:
        TraceError: a node shares the memory through such an operator.
    """
    written = root_of(node.args[0])[0]
    for other in read_later:
        first, second = sorted((written, root_of(other)[0]), key=lambda n: order[n])
        if first is not second and isinstance(second.target, torch._ops.OpOverload):
            raise TraceError(
                f"{node.target} writes in place to what {second.target} returns, "
                f"which is the memory of {first.name}, read later",
                where=source_of(node) or node.name,
                fix="Write x = x + y instead of x += y there, or clone before it",
            )


def _returning(node: fx.Node) -> Any:
    """Return the operator that returns what ``node`` writes in place; None if there is none, or if it gives another dtype."""
    target: Any = node.target
    written: Any = node.args[0]
    if target.namespace != "aten" or torch.Tag.nondeterministic_seeded in target.tags:
        return None
    packet = getattr(torch.ops.aten, str(target._schema.name)[len("aten::") : -1], None)
    call = getattr(packet, target._overloadname, None)
    if call is None:
        return None
    args: Any = fx.node.map_arg(node.args, lambda n: n.meta["val"])
    kwargs: Any = fx.node.map_arg(node.kwargs, lambda n: n.meta["val"])
    with torch.no_grad():
        value = call(*args, **kwargs)
    return call if value.dtype == written.meta["val"].dtype else None  # comparisons and logic return booleans


def root_of(argument: object) -> tuple[fx.Node, bool]:
    """Return the node whose memory ``argument`` is a view of, according to schemas, and whether a ``detach`` lies between them."""
    assert isinstance(argument, fx.Node)
    node, detached = argument, False
    while node.op == "call_function":
        if node.target is operator.getitem and isinstance(node.args[0], fx.Node):  # one of several views
            node = node.args[0]
            continue
        if not isinstance(node.target, torch._ops.OpOverload):
            break
        schema = node.target._schema
        aliases = any(r.alias_info is not None for r in schema.returns) and bool(node.args)
        if not aliases or not isinstance(node.args[0], fx.Node):
            break
        detached = detached or node.target in (torch.ops.aten.detach.default, torch.ops.aten.detach_.default)
        node = node.args[0]
    return node, detached
