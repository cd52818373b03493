"""What a forward pass leaves behind or hides outside of its result: attributes it sets, hooks on gradients, writes in place.

A graph has none of them. Where a model's numbers depend on attributes or hooks, that is said instead of lost.

In place it goes by schemas, which do not say of every operator that it may return its argument. What shares memory is told by the
storages of an export's fake tensors: a write to what nothing else reads becomes a call that returns, other writes are left to
``run_decompositions``, and those that it would get wrong are refused.
"""

from __future__ import annotations

import operator
import threading
import types
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor, fx
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode

from autopar.errors import TraceError
from autopar.tracing.failures import source_of

_PLAIN = (bool, int, float, str, bytes, complex)
_CONTAINERS = (list, dict, set, tuple)
_DEPTH, _LONG = 3, 64
"""Of containers in containers, and of items, up to which contents are looked at."""
_PRIVATE = frozenset(vars(torch.nn.Module()))

State = Mapping[str, object]


def state_of(model: torch.nn.Module) -> State:
    """Numbers and texts among the attributes of all modules, by path; of containers what they hold of such."""
    found: dict[str, object] = {}
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            if name in _PRIVATE:
                continue
            place = f"{path}.{name}" if path else name
            if isinstance(value, (*_PLAIN, *_CONTAINERS, types.SimpleNamespace)):
                found[place] = _plain(value, _DEPTH)
    return found


def _plain(value: object, depth: int) -> object:
    """A copy of the numbers and texts in a container, and the lengths of long ones."""
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
    """Attributes that differ."""
    return tuple(name for name in after if name not in before or before[name] != after[name])


def check_model(model: torch.nn.Module) -> None:
    """Refuses what no trace can hold.

    Raises:
        TraceError: parameters without a shape, quantized or scripted modules, hooks on the gradients of parameters.
    """
    for path, module in model.named_modules():
        kind = f"{path or 'the model'} ({type(module).__name__})"
        if any(is_lazy(p) for p in (*module._parameters.values(), *module._buffers.values()) if p is not None):
            raise TraceError(
                "A lazy parameter has no shape yet",
                where=kind,
                fix="Run the model on one batch first, or give the sizes to its layers",
            )
        held = any(isinstance(value, torch.ScriptObject) for value in vars(module).values())
        if held or isinstance(module, torch.jit.ScriptModule):
            raise TraceError.unsupported(
                "A quantized or scripted module",
                where=kind,
                instead="Plan for the float model in Python, and quantize or script what was trained",
            )
    check_memory(model)
    for name, parameter in model.named_parameters():
        if parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None):
            raise TraceError.unsupported(
                "A hook on a parameter",
                where=name,
                instead="Remove it, and change gradients between train_step and optimizer.step",
            )


def check_memory(model: torch.nn.Module) -> None:
    """Refuses what one device would train through another name.

    Raises:
        TraceError: a parameter that learns begins where another one or a buffer does, and is not the same.
    """
    seen: dict[int, tuple[str, Tensor]] = {}
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if type(tensor) not in (torch.nn.Parameter, Tensor) or tensor.is_meta or tensor.layout is not torch.strided:
            continue
        first, other = seen.setdefault(tensor.data_ptr(), (name, tensor)) if tensor.data_ptr() else (name, tensor)
        if other is not tensor and (other.requires_grad or tensor.requires_grad):
            raise TraceError(
                f"{first} and {name} lie in the same memory, and are two tensors",
                where=type(model).__name__,
                fix="Tie them by b.weight = a.weight, without .data, or take a clone()",
            )


def with_backward_hooks(model: torch.nn.Module) -> tuple[str, ...]:
    """Modules whose hooks on gradients a trace would lose."""
    return tuple(
        path
        for path, module in model.named_modules()
        if path and (module._backward_hooks or module._backward_pre_hooks)
    )


@contextmanager
def own_gradients_refused() -> Iterator[None]:
    """While tracing, a hook on a tensor's gradient is an error of the line that sets it, a gradient taken in forward likewise."""
    owner = threading.get_ident()

    def refused(place: object, name: str, why: str) -> mock._patch[Any]:
        call = getattr(place, name)

        def taken(*args: Any, **options: Any) -> Any:
            if threading.get_ident() == owner:
                raise RuntimeError(why)
            return call(*args, **options)

        return mock.patch.object(place, name, taken)

    why = "a trace would lose how a gradient that forward takes itself depends on parameters"
    with (
        refused(torch.Tensor, "register_hook", "a trace would lose a hook on a tensor's gradient"),
        refused(torch.autograd, "grad", why),
        refused(torch.autograd, "backward", why),
    ):
        yield


@contextmanager
def casts_that_change_nothing() -> Iterator[None]:
    """Lets a forward pass call ``module.to(dtype)`` where the module has that dtype: fake parameters cannot be swapped."""
    usual = torch.nn.Module.to

    def to(self: torch.nn.Module, *args: Any, **kwargs: Any) -> torch.nn.Module:
        device, dtype, _, memory_format = torch._C._nn._parse_to(*args, **kwargs)
        tensors = (*self.parameters(), *self.buffers())
        fits = all(
            (dtype is None or not t.is_floating_point() or t.dtype == dtype) and (device is None or t.device == device)
            for t in tensors
        )
        return self if fits and memory_format is None else usual(self, *args, **kwargs)

    with mock.patch.object(torch.nn.Module, "to", to):
        yield


@contextmanager
def masks_not_asked() -> Iterator[None]:
    """While tracing, torch's transformers take a mask as it is given: they ask its values whether it is causal, to hint at a faster kernel."""

    def hint(mask: Tensor | None, is_causal: bool | None = None, size: int | None = None) -> bool:
        return is_causal is True

    with mock.patch.object(torch.nn.modules.transformer, "_detect_is_causal_mask", hint):
        yield


@contextmanager
def inference_as_no_grad() -> Iterator[None]:
    """While tracing, ``torch.inference_mode`` is ``torch.no_grad``: export records where gradients are off, and nothing of that."""

    def enter(self: Any) -> None:
        self._autopar_before = torch.is_grad_enabled()
        torch.set_grad_enabled(not self.mode)

    def leave(self: Any, *_: object) -> None:
        torch.set_grad_enabled(self._autopar_before)

    with (
        mock.patch.object(torch.inference_mode, "__enter__", enter),
        mock.patch.object(torch.inference_mode, "__exit__", leave),
    ):
        yield


class ParametersKept(TorchFunctionMode):
    """While tracing, what is done to a parameter through ``.data`` or ``requires_grad`` is an error: an export dies of it, or loses it.

    What is read through ``.data`` is detached: export would take it for a constant.
    """

    def __init__(self) -> None:
        super().__init__()
        self._data: list[torch.Tensor] = []

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        name, attribute = getattr(func, "__name__", ""), getattr(func, "__self__", None)
        if name.endswith("_") and not name.endswith("__") and any(args[0] is x for x in self._data if args):
            raise TraceError(
                f"Forward changes a parameter by .data.{name}",
                fix="Use what the call returns where the parameter is read, or call it after optimizer.step()",
            )
        if name == "__set__" and attribute is torch.Tensor.data:
            raise TraceError(
                "Forward assigns to .data of a tensor, which a trace would lose",
                fix="Write to a buffer by copy_(...) under torch.no_grad(), and to a parameter after optimizer.step()",
            )
        if name == "requires_grad_" or (name == "__set__" and attribute is torch.Tensor.requires_grad):
            wanted = (*args[1:], *(kwargs or {}).values(), True)[0]
            if isinstance(args[0], torch.nn.Parameter) and args[0].requires_grad != wanted:
                raise TraceError(
                    "Forward changes requires_grad of a parameter, which a trace would lose",
                    fix="Set it before training, or call that part by torch.func.functional_call with detached parameters",
                )
        if attribute is not torch.Tensor.data or name != "__get__":
            return func(*args, **dict(kwargs or {}))
        found = args[0].detach()
        if isinstance(args[0], torch.nn.Parameter):
            self._data.append(found)
        return found


# --- writes in place


def writes(node: fx.Node) -> bool:
    """Whether a call changes one of its arguments."""
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable


def return_writes(program: torch.export.ExportedProgram) -> None:
    """Calls that write in place to what a call before them has made return it instead; changes ``program``.

    ``torch.tensor(0.0)`` has such a write (``detach_``), and encoder-decoders shift their labels by some (``x[:, 1:] = y``). A
    program with writes is decomposed, which traces it once more. Left to that are writes to inputs and through other views than
    slices, those that draw random numbers and those that change the dtype.

    Raises:
        TraceError: what a write changes is read by another name that torch's decompositions do not know of.
    """
    for module in program.graph_module.modules():
        if isinstance(module, fx.GraphModule):
            _return_in(module.graph)
            if module is not program.graph_module:  # a region without gradient, which is called as it is compiled
                module.recompile()


def _return_in(graph: fx.Graph) -> None:
    order = {node: i for i, node in enumerate(graph.nodes)}
    sharing: dict[int, list[fx.Node]] = {}
    written: dict[int, list[int]] = {}
    for node, place in order.items():
        if (target := _written_to(node)) is not None and (memory := _memory(target)) is not None:
            written.setdefault(memory, []).append(place)
        lifted = {user.target for user in node.users} == {torch.ops.aten.lift_fresh_copy.default}  # a constant, copied
        if not lifted and (memory := _memory(node)) is not None:
            sharing.setdefault(memory, []).append(node)
    # What is read of the part that a write returns, by no name that the next write would change, reads that part alone.
    for node, place in list(order.items()):
        made = _written_to(node)
        if made is None or (memory := _memory(made)) is None:
            continue
        if node.target is torch.ops.aten.detach_.default and made.target is torch.ops.aten.lift_fresh_copy.default:
            node.replace_all_uses_with(made)  # a number in the code has no gradient to take off
            sharing[memory].remove(node)
            graph.erase_node(node)
            continue
        others, (whole, *views) = sharing[memory], _parts(made)
        read = [
            n
            for n in others
            if n is not whole and (n.op != "call_function" or any(order[user] > place for user in n.users))
        ]
        _check_names(node, read, order)
        until = min((p for p in written[memory] if p > place), default=len(order))
        reads = all(
            order[n] <= until and (_memory(n) != memory or _written_to(n) not in (None, node)) for n in node.users
        )
        call = None if any(order[n] < place for n in read) or (views and not reads) else _returning(node)
        if call is None or whole.op != "call_function" or any(u.op == "output" for u in (*whole.users, *node.users)):
            continue
        later = [user for user in whole.users if order[user] > place]
        with graph.inserting_before(node):
            part = result = graph.call_function(call, node.args, node.kwargs)
            result.meta, order[result] = dict(node.meta), place
            for view in reversed(views):
                result = _pasted(graph, view, result)
                order[result] = place
        for user in later:
            user.replace_input_with(whole, result)
        node.replace_all_uses_with(part)
        others[:] = [*(n for n in others if n is not node), result]
        graph.erase_node(node)


_PASTES: dict[Any, Any] = {
    torch.ops.aten.slice.Tensor: torch.ops.aten.slice_scatter.default,
    torch.ops.aten.select.int: torch.ops.aten.select_scatter.default,
}
"""What puts a part of a tensor back, by what takes it."""


def _parts(made: fx.Node) -> list[fx.Node]:
    """The parts of parts through which ``made`` is reached, the whole first; that alone where it is no such part."""
    found = [made]
    while found[0].target in _PASTES and isinstance(found[0].args[0], fx.Node):
        found.insert(0, found[0].args[0])
    return found


def _pasted(graph: fx.Graph, view: fx.Node, part: fx.Node) -> fx.Node:
    """What ``view`` was taken from, with ``part`` in its place."""
    whole: Any = view.args[0]
    if whole.meta["val"].shape == view.meta["val"].shape:  # x[:, 0] takes all rows first
        return part
    pasted = graph.call_function(_PASTES[view.target], (whole, part, *view.args[1:]), view.kwargs)
    pasted.meta = dict(whole.meta) | {"stack_trace": part.meta.get("stack_trace")}
    return pasted


def _written_to(node: fx.Node) -> fx.Node | None:
    """What a call writes to in place, by the name that it is given; None of one that does not."""
    made = node.args[0] if node.op == "call_function" and writes(node) and node.args else None
    return made if isinstance(made, fx.Node) else None


def _memory(node: fx.Node) -> int | None:
    """Which memory a tensor has, the same for its views; that of fake tensors is held by the nodes' ``meta``."""
    value = node.meta.get("val")
    if (
        not isinstance(value, Tensor)
        or value.layout is not torch.strided
        or torch._C._functorch.is_batchedtensor(value)
    ):
        return None  # what torch.vmap computes with has no memory of its own
    memory: int = value.untyped_storage()._cdata
    return memory


def _check_names(node: fx.Node, read: Sequence[fx.Node], order: Mapping[fx.Node, int]) -> None:
    """Composites (``einsum`` of one tensor) may return their argument without a word in their schema; decompositions copy it.

    What a region without gradient returns they follow.
    """
    written = root_of(node.args[0])[0]
    for other in read:
        one, two = sorted((written, root_of(other)[0]), key=lambda n: order[n])
        if one is not two and isinstance(two.target, torch._ops.OpOverload):
            raise TraceError(
                f"{node.target} writes in place to what {two.target} returns, which is the memory of {one.name}, read later",
                where=source_of(node) or node.name,
                fix="Write x = x + y instead of x += y there, or clone before it",
            )


def _returning(node: fx.Node) -> Any:
    """The operator that returns what ``node`` writes to what a call has made; None where there is none."""
    target: Any = node.target
    made: Any = node.args[0]
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
    return call if value.dtype == made.meta["val"].dtype else None  # comparisons and logic return booleans


def root_of(argument: object) -> tuple[fx.Node, bool]:
    """Whose memory a tensor is, views and detach looked through; whether a detach was."""
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
