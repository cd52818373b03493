"""Modes of a user's code: stretches without gradient, writes in place, operands of a product in one dtype, and all of it in float64.

A graph is one list of operators, and ``run_decompositions`` too forgets where gradients were off: what was computed there
would get one. So every tensor that enters such a stretch is cut off by ``detach``, which stays.

In place it goes by schemas, which do not say of every operator that it may return its argument. What shares memory is told by the
storages of an export's fake tensors: a write to what nothing else reads becomes a call that returns, other writes are left to
``run_decompositions``, and those that it would get wrong are refused.

Buffers in single precision stay so (``tracing.on_meta``), and code makes tensors in it (``torch.zeros(n, h)``), so that positions
that are added to an input make all that follows single. The kernels of products take one dtype and promote nothing; so what is
single there takes the parameters' dtype, as under ``torch.autocast``. What promotes by itself does so. What has no kernel for halves
(decompositions, Fourier transforms, distances) takes and gives float32, as under ``torch.autocast`` too.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, fx
from torch.export.graph_signature import InputKind
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from autopar.errors import TraceError

_REGION = "wrap_with_set_grad_enabled"
_DROPOUTS = tuple(
    getattr(torch.ops.aten, name).default
    for name in ("dropout", "alpha_dropout", "feature_dropout", "feature_alpha_dropout")
)


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
    for module in program.graph_module.modules():
        for node in list(module.graph.nodes) if isinstance(module, fx.GraphModule) else ():
            # a dropout of nothing returns its argument, with its gradient; torch's decomposition returns a copy
            if node.target in _DROPOUTS and not (node.args[1] and node.args[2]):
                node.replace_all_uses_with(node.args[0])
                module.graph.erase_node(node)
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
            if node.op == "call_function" and writes(node):
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


def writes(node: fx.Node) -> bool:
    """Whether a call changes one of its arguments."""
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable


def return_writes(program: torch.export.ExportedProgram, place_of: Callable[[fx.Node], str]) -> None:
    """Calls that write in place to what a call before them has made return it instead; changes ``program``.

    ``torch.tensor(0.0)`` has such a write (``detach_``), and a program with writes is decomposed, which traces it once more.
    Left to that are writes to inputs and through views, those that draw random numbers and those that change the dtype.

    Args:
        place_of: the user's line of a node, for messages.

    Raises:
        TraceError: what a write changes is read by another name that torch's decompositions do not know of.
    """
    for module in program.graph_module.modules():
        if isinstance(module, fx.GraphModule):
            _return_in(module.graph, place_of)
            if module is not program.graph_module:  # a region without gradient, which is called as it is compiled
                module.recompile()


def _return_in(graph: fx.Graph, place_of: Callable[[fx.Node], str]) -> None:
    order = {node: i for i, node in enumerate(graph.nodes)}
    sharing: dict[int, list[fx.Node]] = {}
    for node in order:
        lifted = {user.target for user in node.users} == {torch.ops.aten.lift_fresh_copy.default}  # a constant, copied
        if not lifted and (memory := _memory(node)) is not None:
            sharing.setdefault(memory, []).append(node)
    for node, place in list(order.items()):
        made = node.args[0] if node.op == "call_function" and writes(node) and node.args else None
        if not isinstance(made, fx.Node) or (memory := _memory(made)) is None:
            continue
        others = sharing[memory]
        read = [
            n
            for n in others
            if n is not made and (n.op != "call_function" or any(order[user] > place for user in n.users))
        ]
        _check_names(node, read, order, place_of)
        call = None if any(order[n] < place for n in read) else _returning(node)
        if call is None or any(user.op == "output" for user in (*made.users, *node.users)):
            continue
        later = [user for user in made.users if order[user] > place]
        with graph.inserting_before(node):
            result = graph.call_function(call, node.args, node.kwargs)
        result.meta, order[result] = dict(node.meta), place
        for user in later:
            user.replace_input_with(made, result)
        node.replace_all_uses_with(result)
        others[:] = [*(n for n in others if n is not node), result]
        graph.erase_node(node)


def _memory(node: fx.Node) -> int | None:
    """Which memory a tensor has, the same for its views; that of fake tensors is held by the nodes' ``meta``."""
    value = node.meta.get("val")
    return value.untyped_storage()._cdata if isinstance(value, Tensor) and value.layout is torch.strided else None


def _check_names(
    node: fx.Node, read: Sequence[fx.Node], order: Mapping[fx.Node, int], place_of: Callable[[fx.Node], str]
) -> None:
    """Composites (``einsum`` of one tensor) may return their argument without a word in their schema; decompositions copy it.

    What a region without gradient returns they follow.
    """
    written = _root(node.args[0])[0]
    for other in read:
        one, two = sorted((written, _root(other)[0]), key=lambda n: order[n])
        if one is not two and isinstance(two.target, torch._ops.OpOverload):
            raise TraceError(
                f"{node.target} writes in place to what {two.target} returns, which is the memory of {one.name}, read later",
                where=place_of(node) or node.name,
                fix="Write x = x + y instead of x += y there, or clone before it",
            )


def _returning(node: fx.Node) -> Any:
    """The operator that returns what ``node`` writes to what a call has made; None where there is none."""
    target: Any = node.target
    made: Any = node.args[0]
    if made.op != "call_function" or target.namespace != "aten" or torch.Tag.nondeterministic_seeded in target.tags:
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


def _root(argument: object) -> tuple[fx.Node, bool]:
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
        users = [user for user in place.users if user.op != "output"]
        with inner.graph.inserting_after(places[-1]):
            made = inner.graph.call_function(torch.ops.aten.detach.default, (place,))
        made.meta = dict(place.meta)
        for user in users:
            user.replace_input_with(place, made)
    inner.recompile()


def _tensors(places: list[fx.Node]) -> Iterator[fx.Node]:
    return (p for p in places if isinstance(p.meta.get("val"), torch.Tensor) and p.meta["val"].is_floating_point())


_ALL = 99
_OPERANDS = {
    **dict.fromkeys(
        ("linear", "bilinear", "matmul", "__matmul__", "__rmatmul__", "mm", "bmm", "mv", "dot", "vdot"), _ALL
    ),
    **dict.fromkeys(("addmm", "addmv", "addbmm", "baddbmm", "einsum", "tensordot", "cdist", "prelu", "lerp"), _ALL),
    **dict.fromkeys((f"conv{kind}{n}d" for n in (1, 2, 3) for kind in ("", "_transpose")), _ALL),
    **dict.fromkeys(
        (f"{kind}{end}" for kind in ("lstm", "gru", "rnn_tanh", "rnn_relu") for end in ("", "_cell")), _ALL
    ),
    "grid_sample": 2,
    "scaled_dot_product_attention": 3,  # a mask may be in another dtype
    "multi_head_attention_forward": 3,
}
"""Functions of torch whose operands have one dtype, and how many of the first arguments are operands."""
_OF_DOUBLES = ("layer_norm", "group_norm")
"""Whose kernels take weights in float32 beside halves, not beside doubles."""
_INTO = tuple(f"{name}{end}" for name in ("index_add", "index_copy", "scatter", "scatter_add") for end in ("", "_"))
"""What writes values into its first argument, of whose dtype they are."""
_LINALG = (
    "cholesky", "cholesky_ex", "cond", "det", "eig", "eigh", "eigvals", "eigvalsh", "householder_product", "inv",
    "inv_ex", "ldl_factor", "ldl_solve", "lstsq", "lu", "lu_factor", "lu_factor_ex", "lu_solve", "matrix_rank",
    "pinv", "qr", "slogdet", "solve", "solve_ex", "solve_triangular", "svd", "svdvals", "tensorinv", "tensorsolve",
    "vander",
)  # fmt: skip
_FOURIER = tuple(
    f"{inverse}{kind}fft{dims}" for inverse in ("", "i") for kind in ("", "r", "h") for dims in ("", "2", "n")
)
_OF_SINGLES = (
    "cdist", "pdist", "cholesky", "cholesky_inverse", "cholesky_solve", "inverse", "det", "logdet", "slogdet",
    "svd", "qr", "pinverse", "triangular_solve", "lu_solve", "geqrf", "orgqr", "ormqr", "complex", "polar",
    "view_as_complex", "quantile", "nanquantile", "stft", "istft", "ctc_loss", "multi_margin_loss",
    "multilabel_margin_loss", "avg_pool3d", "local_response_norm",
)  # fmt: skip
"""Without a kernel for bfloat16 on a CPU in torch 2.13, and on GPUs the decompositions and transforms: found by calling them."""
_PLACES = (torch, Tensor, torch.nn.functional, torch._C._nn, torch._VF)


def for_products(model: torch.nn.Module) -> AbstractContextManager[object]:
    """A context for the model's forward: products have operands in the dtype of its parameters, if that is one other than float32."""
    dtypes = {p.dtype for p in model.parameters() if p.is_floating_point()}
    return _InOneDtype(dtypes.pop()) if len(dtypes) == 1 and torch.float32 not in dtypes else nullcontext()


class _InOneDtype(TorchFunctionMode):
    """Casts operands of products that are float32 to ``dtype`` where another operand, or a parameter, has it.

    Halves become float32 where nothing computes with them.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        names = dict(_OPERANDS) | (dict.fromkeys(_OF_DOUBLES, _ALL) if dtype == torch.float64 else {})
        self._counts = {function: count for name, count in names.items() for function in _named(name)}
        self._into = {function for name in _INTO for function in _named(name)}
        self._of_singles = _of_singles()
        if dtype == torch.float64:
            self._counts |= dict.fromkeys(self._of_singles, _ALL)
            self._of_singles = frozenset()
        self._dtype = dtype

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        given = dict(kwargs or {})
        if func in self._of_singles:
            return func(*self._cast(args, torch.float32), **self._cast(given, torch.float32))
        count = self._counts.get(func, 0)
        if count and self._is_mixed((args, given)):
            args = (*self._cast(args[:count], self._dtype), *args[count:])
            given = self._cast(given, self._dtype) if count == _ALL else given
        elif func in self._into and self._is_mixed((args, given)):
            target = args[0] if args else given["input"]
            args = tuple(v if v is target else self._cast(v, target.dtype) for v in args)
            given = {key: v if v is target else self._cast(v, target.dtype) for key, v in given.items()}
        return func(*args, **given)

    def _is_mixed(self, values: Any) -> bool:
        dtypes = {leaf.dtype for leaf in pytree.tree_leaves(values) if isinstance(leaf, Tensor)}
        return torch.float32 in dtypes and self._dtype in dtypes

    def _cast(self, values: Any, dtype: torch.dtype) -> Any:
        """Floating tensors of the two dtypes in ``dtype``."""
        own = (torch.float32, self._dtype)
        return pytree.tree_map_only(Tensor, lambda value: value.to(dtype) if value.dtype in own else value, values)


def _named(name: str) -> list[Any]:
    """Functions and methods of that name."""
    return [getattr(place, name) for place in _PLACES if hasattr(place, name)]


def _of_singles() -> frozenset[Any]:
    """Functions that have no kernel for halves."""
    found = {function for name in _OF_SINGLES for function in _named(name)}
    for place, names in ((torch.linalg, _LINALG), (torch.fft, _FOURIER)):
        found |= {getattr(place, name) for name in names if hasattr(place, name)}
    return frozenset(found)


class _Doubled(TorchFunctionMode):
    """Says float64 wherever the code of a model says float32: casts, factories, accumulation."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is torch.Tensor.float:
            func = torch.Tensor.double
        args, named = pytree.tree_map(_doubled, (args, dict(kwargs or {})))
        if func is getattr(torch, "_grouped_mm", None) and [x.ndim for x in args] == [2, 3]:
            func = _grouped_mm
        return func(*args, **named)


def _grouped_mm(
    rows: Tensor, matrices: Tensor, offs: Tensor, bias: None = None, out_dtype: torch.dtype | None = None
) -> Tensor:
    """What torch has no kernel for in float64: rows [s, k] by matrices [g, k, n], group by group, into [s, n].

    Args:
        offs: [g], the row after the last of each group; rows after the last group come out as zeros.
    """
    ends = offs.tolist()
    groups = zip([0, *ends[:-1]], ends, matrices, strict=True)
    products = [rows[start:end] @ matrix for start, end, matrix in groups]
    return torch.cat([*products, rows.new_zeros(len(rows) - ends[-1], matrices.shape[-1])])


def _doubled(value: Any) -> Any:
    return torch.float64 if value is torch.float32 else value


@contextmanager
def in_double() -> Iterator[None]:
    """Inside, models compute in float64 what their code computes in float32."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with _Doubled():
            yield
    finally:
        torch.set_default_dtype(before)
