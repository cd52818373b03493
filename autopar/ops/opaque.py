"""Regions that run as the user wrote them: called by emitted code, next to :mod:`autopar.ops.collectives`.

A region is a module of the user's model, or a ``torch.autograd.Function``, that stands in the graph as one operator
``autopar.opaque``. What it computes is not known, so that it may branch on values and count in Python; it runs on
this rank's samples with this rank's parameters and its own backward.

A model in ``train()`` may hold modules in ``eval()``: batch norms that are frozen, encoders without dropout. They stay so. A model
that is in ``eval()`` itself, as ``from_pretrained`` returns it, trains whole.
"""

from __future__ import annotations

import copy
import importlib
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar, cast

import spmd_types
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from autopar.errors import AutoparError, InternalError, RuntimeMismatchError
from autopar.ops.kernels import MODULE, Region, region_of
from autopar.ops.seeded import Salt, seeded
from autopar.util.formatting import some

Copied = TypeVar("Copied", bound=nn.Module)


def deep_copy(module: Copied, memo: dict[int, Any] | None = None) -> Copied:
    """``copy.deepcopy``, whose functions that remember a part of ``module`` remember that of the copy.

    Python copies no functions: a hook or an activation that was written as ``lambda x: x * self.scale`` would read the
    parameters of ``module``, and a hook that keeps what it sees would keep it there.
    """
    memo = {} if memo is None else memo
    made: list[tuple[types.FunctionType, tuple[types.CellType, ...]]] = []
    for function in {id(f): f for inner in module.modules() for f in _functions(vars(inner))}.values():
        cells = tuple(types.CellType() for _ in function.__closure__ or ())
        copied = types.FunctionType(
            function.__code__, function.__globals__, function.__name__, function.__defaults__, cells
        )
        copied.__kwdefaults__, copied.__qualname__ = function.__kwdefaults__, function.__qualname__
        copied.__dict__.update(function.__dict__)
        memo[id(function)] = copied
        made.append((function, cells))
    result = copy.deepcopy(module, memo)
    for function, cells in made:
        for old, new in zip(function.__closure__ or (), cells, strict=True):
            try:
                kept = old.cell_contents
            except ValueError:  # a name that is bound to nothing yet
                continue
            new.cell_contents = _copied(kept, memo)
    return result


def _copied(kept: object, memo: Mapping[int, Any]) -> object:
    """What stands for ``kept`` in the copy: itself, unless it is a part of what was copied, or a method of one."""
    if isinstance(kept, types.MethodType) and id(kept.__self__) in memo:
        return types.MethodType(kept.__func__, memo[id(kept.__self__)])
    return memo.get(id(kept), kept)


def _functions(value: object) -> Iterator[types.FunctionType]:
    """Functions with a closure, in containers, partial calls and the closures of others."""
    waiting, seen = [value], set[int]()
    while waiting:
        found = waiting.pop()
        if id(found) in seen:
            continue
        seen.add(id(found))
        if isinstance(found, partial):
            waiting += [found.func, *found.args, *found.keywords.values()]
        elif isinstance(found, Mapping):
            waiting += found.values()
        elif isinstance(found, list | tuple | set):
            waiting += found
        elif isinstance(found, types.FunctionType) and found.__closure__:
            yield found
            waiting += [cell.cell_contents for cell in found.__closure__ if cell != types.CellType()]


def trained_copy(
    module: nn.Module, model: nn.Module, empty: Callable[[Tensor], Tensor], constant: Callable[[Tensor], Tensor]
) -> nn.Module:
    """A copy of ``model`` or of a module in it, in the modes that a step of training has.

    Args:
        empty: gives the tensor that stands for a parameter or a buffer.
        constant: gives the tensor that stands for one that is neither, but an attribute of a module.
    """
    memo: dict[int, Any] = {}
    for parameter in module.parameters():
        memo[id(parameter)] = nn.Parameter(empty(parameter), parameter.requires_grad)
    for buffer in module.buffers():
        memo[id(buffer)] = empty(buffer)
    for inner in module.modules():
        for value in vars(inner).values():
            if isinstance(value, Tensor) and id(value) not in memo:
                memo[id(value)] = constant(value)
    copied = deep_copy(module, memo)
    return copied if model.training else copied.train()


def notes_of(model: nn.Module) -> tuple[str, ...]:
    """Which modules stay in ``eval()``, the outermost ones, in a sentence."""
    found: list[str] = []
    for path, module in model.named_modules() if model.training else ():
        if not module.training and not any(path.startswith(f"{outer}.") for outer in found):
            found.append(path)
    return (f"modules in eval() stay so while the others train: {some(found)}",) if found else ()


def modes(module: nn.Module) -> tuple[bool, ...]:
    """Of a module and those in it; for :func:`restore`."""
    return tuple(inner.training for inner in module.modules())


def restore(module: nn.Module, known: tuple[bool, ...]) -> None:
    """Back to what :func:`modes` gave."""
    for inner, training in zip(module.modules(), known, strict=True):
        inner.training = training


@torch.library.custom_op("autopar::opaque", mutates_args=())
def _exported(
    region: str, inputs: Sequence[Tensor], parameters: Sequence[Tensor], buffers: Sequence[Tensor]
) -> list[Tensor]:
    """What stands in an exported graph for a region."""
    raise RuntimeError("an opaque region runs in a program, not in an exported graph")


@_exported.register_fake
def _(region: str, inputs: Sequence[Tensor], parameters: Sequence[Tensor], buffers: Sequence[Tensor]) -> list[Tensor]:
    return [torch.empty(shape, dtype=getattr(torch, dtype)) for shape, dtype, _ in region_of(region).outputs]


class Holder(nn.Module):
    """The place of a region in an emitted program; :meth:`bind` puts the user's code there.

    The user's module is no child: its parameters are those of the program.
    """

    def __init__(self, region: Region) -> None:
        super().__init__()
        self.kind, self.name = region.kind, region.name
        self._call: tuple[Callable[..., Any], ...] = ()

    def bind(self, model: nn.Module, device: torch.device | None = None) -> None:
        """Takes the module out of ``model``, as a copy on meta whose tensors come with each call."""
        if self.kind == MODULE:
            self._call = (stateless(model.get_submodule(self.name), model, device),)

    def train(self, mode: bool = True) -> Holder:
        """As of every module; the user's code follows."""
        super().train(mode)
        for call in self._call:
            if isinstance(call, Stateless):
                call.module.eval()
                if mode:
                    restore(call.module, call.trained)
        return self

    def call(self) -> Callable[..., Any]:
        """``call(state, args, kwargs)``.

        Raises:
            InternalError: nothing is bound.
            RuntimeMismatchError: the function cannot be imported.
        """
        if not self._call:
            if self.kind == MODULE:
                raise InternalError(f"The program lacks the module of its opaque region {self.name}")
            self._call = (of_function(load_function(self.name)),)
        return self._call[0]


def load_function(name: str) -> type[torch.autograd.Function]:
    """The class that ``package.module:Class`` names.

    Raises:
        RuntimeMismatchError: there is none in this process.
    """
    module, _, path = name.partition(":")
    try:
        found: Any = importlib.import_module(module)
        for part in path.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError) as error:
        raise RuntimeMismatchError(
            "Cannot import this autograd function",
            where=name,
            got=f"{type(error).__name__}: {error}",
            fix="Define the class at the top of a module that all ranks can import",
        ) from error
    return cast("type[torch.autograd.Function]", found)


def of_function(function: type[torch.autograd.Function]) -> Callable[..., Any]:
    """A function as :meth:`Holder.call` gives it."""
    return lambda state, args, kwargs: function.apply(*args, **kwargs)  # type: ignore[no-untyped-call]


@dataclass(frozen=True, slots=True)
class Stateless:
    """Calls a module on the parameters and buffers that come with each call; ``trained``: its modes in a step of training."""

    module: nn.Module
    trained: tuple[bool, ...]

    def __call__(self, state: dict[str, Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What the module returns; ``state``: its tensors by name."""
        return torch.func.functional_call(self.module, state, args, kwargs, tie_weights=True, strict=False)


def stateless(module: nn.Module, model: nn.Module, device: torch.device | None = None) -> Stateless:
    """A module of ``model`` as :meth:`Holder.call` gives it: ``state`` has all its parameters and buffers by name."""
    on_meta = partial(torch.empty_like, device="meta")
    copied = trained_copy(module, model, on_meta, lambda value: value.detach().to(device or value.device))
    return Stateless(copied, modes(copied))


class _Joined(torch.autograd.Function):
    """Passes ``outputs`` on; gives a zero gradient to ``sources`` that a branch left out, on every rank alike."""

    @staticmethod
    def forward(ctx: Any, count: int, *values: Tensor) -> tuple[Tensor, ...]:
        ctx.sources = [(v.shape, v.dtype, v.device, v.requires_grad) for v in values[count:]]
        return tuple(v.view_as(v) for v in values[:count])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        zeros = [
            torch.zeros(shape, dtype=dtype, device=device) if wanted else None
            for shape, dtype, device, wanted in ctx.sources
        ]
        return (None, *gradients, *zeros)


spmd_types.register_local_autograd_function(_Joined)


def opaque(
    holder: Holder,
    description: str,
    inputs: Sequence[Tensor],
    parameters: Sequence[Tensor],
    buffers: Sequence[Tensor],
    *,
    salt: Salt = 0,
    seed: int = 0,
    axes: Sequence[str] = (),
) -> tuple[Tensor, ...]:
    """Runs a region; its random numbers come from the stream that :func:`autopar.ops.seeded.dropout` describes.

    Args:
        holder: the user's code.
        description: of the region, as :meth:`Region.dumps` writes it.
        inputs, parameters, buffers: this rank's; buffers are copied, training leaves them as they are.

    Returns:
        The tensors that it returns, in order.

    Raises:
        AutoparError: it returns another number of tensors than when it was traced.
    """
    region, device = region_of(description), (*inputs, *parameters)[0].device
    devices = (torch.device("cpu"), *((device,) if device.type == "cuda" else ()))  # the user's code may draw on both
    with seeded(devices, salt, seed, axes):
        found = tensors_of(run(region, holder.call(), inputs, parameters, [b.clone() for b in buffers]))
    if len(found) != len(region.outputs):
        raise AutoparError(
            f"The opaque module returned {len(found)} tensors, but {len(region.outputs)} when it was traced",
            where=region.name,
            fix="Make its number of outputs the same in every step, or name a module around it with opaque=",
        )
    flows = [i for i, (_, _, grad) in enumerate(region.outputs) if grad and found[i].is_floating_point()]
    if not flows or not torch.is_grad_enabled() or not any(v.requires_grad for v in (*inputs, *parameters)):
        return found
    joined = _Joined.apply(len(flows), *(found[i] for i in flows), *parameters)  # type: ignore[no-untyped-call]
    passed = dict(zip(flows, joined, strict=True))
    return tuple(passed.get(i, value) for i, value in enumerate(found))


def run(
    region: Region,
    call: Callable[..., Any],
    inputs: Sequence[Tensor],
    parameters: Sequence[Tensor],
    buffers: Sequence[Tensor],
) -> Any:
    """What a region's code returns for one call."""
    tensors, constants = iter(inputs), dict(region.constants)
    tree = pytree.treespec_loads(region.tree)
    leaves = [constants[i] if i in constants else next(tensors) for i in range(len(constants) + len(inputs))]
    args, kwargs = pytree.tree_unflatten(leaves, tree)
    state = dict(zip((*region.parameters, *region.buffers), (*parameters, *buffers), strict=True))
    return call(state, tuple(args), kwargs)


def tensors_of(output: Any) -> tuple[Tensor, ...]:
    """The tensors in what a module returns, in order."""
    return tuple(leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, Tensor))
