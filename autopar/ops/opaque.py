"""Regions of untraced code, which run as the user wrote them; emitted code calls :func:`opaque`.

A region is a module of the user's model or a ``torch.autograd.Function``, and is one operator ``autopar.opaque`` in the graph. It may
branch on values and count in Python, as nothing is known of what it computes. It runs on the samples of this rank with its parameters
and has its own backward.

A model in ``train()`` may contain modules in ``eval()``: frozen batch norms, encoders without dropout. They keep their mode. If the model
itself is in ``eval()``, as ``from_pretrained`` returns it, all modules train.
"""

from __future__ import annotations

import copy
import importlib
import types
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar, cast

import spmd_types
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from autopar.errors import AutoparError, InternalError, RuntimeMismatchError, TraceError
from autopar.ops.kernels import MODULE, Region, region_of
from autopar.ops.seeded import Salt, seeded
from autopar.util.formatting import some

Copied = TypeVar("Copied", bound=nn.Module)


def deep_copy(module: Copied, memo: dict[int, Any] | None = None) -> Copied:
    """Return ``copy.deepcopy`` of a module, in which closures refer to the copy.

    Tensors that a hook before forward has computed as attributes (by pruning, ``weight_norm``) are copied without their history, which
    torch refuses to copy. Python does not copy functions. A hook or an activation like ``lambda x: x * self.scale`` would still read the parameters of the
    original ``module``, and a hook that collects values would collect them there.
    """
    memo = {} if memo is None else memo
    attributes = [value for inner in module.modules() for value in vars(inner).values()]
    memo |= {
        id(v): v.detach().clone()
        for v in attributes
        if isinstance(v, torch.Tensor) and not v.is_leaf and id(v) not in memo
    }
    copied_functions: list[tuple[types.FunctionType, tuple[types.CellType, ...]]] = []
    for function in _functions([vars(inner) for inner in module.modules()]):
        cells = tuple(types.CellType() for _ in function.__closure__ or ())
        copied = types.FunctionType(
            function.__code__, function.__globals__, function.__name__, function.__defaults__, cells
        )
        copied.__kwdefaults__, copied.__qualname__ = function.__kwdefaults__, function.__qualname__
        copied.__dict__.update(function.__dict__)
        memo[id(function)] = copied
        copied_functions.append((function, cells))
    result = copy.deepcopy(module, memo)
    for function, cells in copied_functions:
        for old, new in zip(function.__closure__ or (), cells, strict=True):
            try:
                value = old.cell_contents
            except ValueError:  # a name that is bound to nothing yet
                continue
            new.cell_contents = _copied(value, memo)
    return result


def _copied(value: object, memo: Mapping[int, Any]) -> object:
    """Return the copy of a value in a closure: itself, unless it is a part of what was copied, or a method of such a part."""
    if isinstance(value, types.MethodType) and id(value.__self__) in memo:
        return types.MethodType(value.__func__, memo[id(value.__self__)])
    return memo.get(id(value), value)


def _functions(value: object) -> Iterator[types.FunctionType]:
    """Yield the functions with a closure in ``value``: in containers, partial calls and the closures of others."""
    queue, seen = [value], set[int]()
    while queue:
        item = queue.pop()
        if id(item) in seen:
            continue
        seen.add(id(item))
        if isinstance(item, partial):
            queue += [item.func, *item.args, *item.keywords.values()]
        elif isinstance(item, Mapping):
            queue += item.values()
        elif isinstance(item, list | tuple | set):
            queue += item
        elif isinstance(item, types.FunctionType) and item.__closure__:
            yield item
            queue += [cell.cell_contents for cell in item.__closure__ if cell != types.CellType()]


def trained_copy(
    module: nn.Module, model: nn.Module, empty: Callable[[Tensor], Tensor], constant: Callable[[Tensor], Tensor]
) -> nn.Module:
    """Return a copy of ``model`` or of a module in it, in the modes that a step of training has.

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


def without_dropout(model: nn.Module, keeps: Collection[str] = ()) -> None:
    """Set all dropout probabilities and the noise of routers to 0, in modules, in their attributes and in their configs.

    Configs are replaced by copies, as forward may read them or make further modules from them; the user's config is not changed.

    Args:
        keeps: paths of modules of dropout that stay as they are.
    """
    configs: dict[int, tuple[Any, Any]] = {}  # each original with its copy; holding the original keeps its id unique
    for path, module in model.named_modules():
        if isinstance(module, nn.modules.dropout._DropoutNd) and path not in keeps:
            module.p = 0.0
        _drop_nothing(module)
        config = vars(module).get("config")
        if hasattr(config, "__dict__"):
            if id(config) not in configs:
                configs[id(config)] = config, copy.copy(config)
                _drop_nothing(configs[id(config)][1])
            module.config = configs[id(config)][1]


def _drop_nothing(holder: Any) -> None:
    for name, value in list(vars(holder).items()):
        if isinstance(value, float) and any(word in name for word in _DROPPING):
            setattr(holder, name, 0.0)


_DROPPING = ("dropout", "pdrop", "drop_prob", "drop_path", "layerdrop", "jitter_noise")
"""Parts of the names of attributes with the probability of dropping elements, branches of a sample or layers, or a router's noise."""


def notes_of(model: nn.Module) -> tuple[str, ...]:
    """Return a sentence that names the outermost modules in ``eval()`` of a model in ``train()``, if there are any."""
    outermost: list[str] = []
    for path, module in model.named_modules() if model.training else ():
        if not module.training and not any(path.startswith(f"{outer}.") for outer in outermost):
            outermost.append(path)
    return (f"modules in eval() stay so while the others train: {some(outermost)}",) if outermost else ()


@torch.library.custom_op("autopar::opaque", mutates_args=())
def _exported(
    region: str, inputs: Sequence[Tensor], parameters: Sequence[Tensor], buffers: Sequence[Tensor]
) -> list[Tensor]:
    """Return the operator that represents a region in an exported graph."""
    raise RuntimeError("an opaque region runs in a program, not in an exported graph")


@_exported.register_fake
def _(region: str, inputs: Sequence[Tensor], parameters: Sequence[Tensor], buffers: Sequence[Tensor]) -> list[Tensor]:
    return [torch.empty(shape, dtype=getattr(torch, dtype)) for shape, dtype, _ in region_of(region).outputs]


class Holder(nn.Module):
    """The place of a region in an emitted program, which :meth:`bind` fills with the user's code.

    The user's module is not a child: its parameters are those of the program.

    Attributes:
        op: the name of the operator that calls the region.
        reached: the places, among inputs and parameters of a call, of those that a backward has come to. A branch that was not taken
            leaves its parameters out.
    """

    def __init__(self, region: Region, op: str = "") -> None:
        super().__init__()
        self.kind, self.name, self.op = region.kind, region.name, op
        self.reached = set[int]()
        self._call: Callable[..., Any] | None = None

    def bind(self, model: nn.Module, device: torch.device | None = None) -> None:
        """Take the module of the region from ``model``, as a copy on meta whose tensors are passed with each call."""
        if self.kind == MODULE:
            self._call = stateless(model.get_submodule(self.name), model, device)

    def train(self, mode: bool = True) -> Holder:
        """Set the mode of this module and of the user's code."""
        super().train(mode)
        if isinstance(self._call, Stateless):
            self._call.module.eval()
            for inner, trained in zip(self._call.module.modules(), self._call.trained, strict=True):
                inner.training = mode and trained
        return self

    def call(self) -> Callable[..., Any]:
        """Return the user's code as ``call(state, args, kwargs)``.

        Raises:
            InternalError: the module is not bound.
            RuntimeMismatchError: the function cannot be imported.
        """
        if self._call is None:
            if self.kind == MODULE:
                raise InternalError(f"The program lacks the module of its opaque region {self.name}")
            self._call = of_function(load_function(self.name))
        return self._call

    def noted(self, passed: Sequence[Tensor]) -> list[Tensor]:
        """Return views of what is passed, which note in :attr:`reached` that a gradient comes to them."""
        return [self._noting(place, value) if value.requires_grad else value for place, value in enumerate(passed)]

    def _noting(self, place: int, value: Tensor) -> Tensor:
        view = value.view_as(value)
        if view.requires_grad:  # not in an evaluation
            view.register_hook(partial(self._note, place))  # type: ignore[no-untyped-call]
        return view

    def _note(self, place: int, _gradient: Tensor) -> None:
        self.reached.add(place)


def load_function(name: str) -> type[torch.autograd.Function]:
    """Return the class that ``package.module:Class`` names.

    Raises:
        RuntimeMismatchError: this process has no such class.
    """
    module, _, path = name.partition(":")
    try:
        function: Any = importlib.import_module(module)
        for part in path.split("."):
            function = getattr(function, part)
    except (ImportError, AttributeError) as error:
        raise RuntimeMismatchError(
            "Cannot import this autograd function",
            where=name,
            got=f"{type(error).__name__}: {error}",
            fix="Define the class at the top of a module that all ranks can import",
        ) from error
    return cast("type[torch.autograd.Function]", function)


def of_function(function: type[torch.autograd.Function]) -> Callable[..., Any]:
    """Return an autograd function in the form of :meth:`Holder.call`."""
    return lambda state, args, kwargs: function.apply(*args, **kwargs)  # type: ignore[no-untyped-call]


@dataclass(frozen=True, slots=True)
class Stateless:
    """A module that runs with the parameters and buffers of each call.

    Attributes:
        module: the module, whose parameters and buffers are on meta.
        trained: for each module in it, whether it is in ``train()`` in a training step.
    """

    module: nn.Module
    trained: tuple[bool, ...]

    def __call__(self, state: dict[str, Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the output of the module; ``state`` has its tensors by name."""
        return torch.func.functional_call(self.module, state, args, kwargs, tie_weights=True, strict=False)


def stateless(module: nn.Module, model: nn.Module, device: torch.device | None = None) -> Stateless:
    """Return a module of ``model`` as :meth:`Holder.call` gives it: ``state`` has all its parameters and buffers by name."""
    on_meta = partial(torch.empty_like, device="meta")
    copied = trained_copy(module, model, on_meta, lambda value: value.detach().to(device or value.device))
    return Stateless(copied, tuple(inner.training for inner in copied.modules()))


class _Joined(torch.autograd.Function):
    """Returns ``outputs``, and gives a zero gradient to ``sources`` that the code did not use.

    All ranks then have gradients of the same parameters, those of the region and those that its inputs come from.
    """

    @staticmethod
    def forward(ctx: Any, count: int, *values: Tensor) -> tuple[Tensor, ...]:
        ctx.sources = [(v.shape, v.dtype, v.device, v.requires_grad) for v in values[count:]]
        return tuple(v.view_as(v) for v in values[:count])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        zeros = [
            torch.zeros((), dtype=dtype, device=device).expand(shape) if wanted else None
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
    """Run a region; its random numbers are from the stream that :func:`autopar.ops.seeded.dropout` describes.

    Args:
        holder: the user's code.
        description: the region, as :meth:`Region.dumps` writes it.
        inputs, parameters, buffers: the tensors of this rank. Buffers are copied, so that training does not change them.
        salt, seed, axes: for random numbers; see :func:`autopar.ops.seeded.dropout`.

    Returns:
        The tensors that the code returns, in order.

    Raises:
        AutoparError: it returns another number of tensors than when it was traced, or one with a gradient that had none.
    """
    region, passed = region_of(description), (*inputs, *parameters)
    device = passed[0].device
    devices = (torch.device("cpu"), *((device,) if device.type == "cuda" else ()))  # the user's code may draw on both
    with seeded(devices, salt, seed, axes):
        noted, copies = holder.noted(passed), [b.clone() for b in buffers]
        outputs = tensors_of(run(region, holder.call(), noted[: len(inputs)], noted[len(inputs) :], copies))
    if len(outputs) != len(region.outputs):
        raise AutoparError(
            f"The opaque module returned {len(outputs)} tensors, but {len(region.outputs)} when it was traced",
            where=region.name,
            fix="Make its number of outputs the same in every step, or name a module around it with opaque=",
        )
    if any(y.requires_grad and not grad for y, (_, _, grad) in zip(outputs, region.outputs, strict=True)):
        raise AutoparError(
            "The opaque module returned a tensor with a gradient that had none on the inputs of the trace",
            where=region.name,
            fix="Compute it from the inputs in every branch (x * 0.0, not zeros), or name a module around it with opaque=",
        )
    with_gradient = [i for i, (_, _, grad) in enumerate(region.outputs) if grad and outputs[i].is_floating_point()]
    if not with_gradient or not torch.is_grad_enabled() or not any(v.requires_grad for v in passed):
        return outputs
    joined = _Joined.apply(len(with_gradient), *(outputs[i] for i in with_gradient), *passed)  # type: ignore[no-untyped-call]
    joined_outputs = dict(zip(with_gradient, joined, strict=True))
    return tuple(joined_outputs.get(i, value) for i, value in enumerate(outputs))


def run(
    region: Region,
    call: Callable[..., Any],
    inputs: Sequence[Tensor],
    parameters: Sequence[Tensor],
    buffers: Sequence[Tensor],
) -> Any:
    """Call the code of a region once; return its result, which is the loss of a whole model, once for each sample if these are apart."""
    tensors, constants = iter(inputs), dict(region.constants)
    tree = pytree.treespec_loads(region.tree)
    leaves = [constants[i] if i in constants else next(tensors) for i in range(len(constants) + len(inputs))]
    args, kwargs = pytree.tree_unflatten(leaves, tree)
    state = dict(zip((*region.parameters, *region.buffers), (*parameters, *buffers), strict=True))
    output = call(state, tuple(args), kwargs)
    if not region.is_loss:
        return output
    loss = pick_loss(output, region.name)
    if region.splits is None:
        return loss
    return loss.expand(next(x.shape[d] for x, d in zip(inputs, region.splits[0], strict=True) if d is not None))


def pick_loss(output: Any, place: str) -> Tensor:
    """Return the loss in what a model returns: its entry or attribute ``loss``, or else the first floating-point scalar in it.

    Args:
        output: is what the model, or its ``loss_fn``, returns.
        place: is named in errors.

    Raises:
        TraceError: there is no such scalar, or ``output`` is a mapping with several that have a gradient and none is called ``loss``.
    """
    named = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    leaves = [named] if isinstance(named, Tensor) else pytree.tree_leaves(output)
    scalars = [v for v in leaves if isinstance(v, Tensor) and v.dim() == 0 and v.is_floating_point()]
    if isinstance(output, Mapping) and not isinstance(named, Tensor):
        learned = {
            key: v for key, v in output.items() if any(v is scalar and scalar.requires_grad for scalar in scalars)
        }
        if len(learned) > 1:
            raise TraceError(
                f"The model returns several losses ({', '.join(map(str, learned))}), and none is called loss",
                where=place,
                fix="Say how they make one: return their sum as loss, or give "
                f"loss_fn=lambda output, batch: {' + '.join(f'output[{key!r}]' for key in learned)}",
            )
    if scalars:
        return scalars[0]
    shapes = [
        str(tuple(leaf.shape)) + ("" if leaf.is_floating_point() else f" in {str(leaf.dtype).removeprefix('torch.')}")
        for leaf in leaves
        if isinstance(leaf, Tensor)
    ]
    raise TraceError(
        "The model returns no scalar loss",
        where=place,
        got=f"outputs of shape {', '.join(shapes)}" if shapes else f"a {type(output).__name__} without tensors",
        fix="Add labels to the example inputs, return the loss, or give loss_fn=lambda output, batch: ...",
    )


def tensors_of(output: Any) -> tuple[Tensor, ...]:
    """Return the tensors in what a module returns, in order."""
    return tuple(leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, Tensor))
