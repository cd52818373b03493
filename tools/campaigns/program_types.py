"""Checks the types of a program: on this machine, for the complete world of ranks, without weights.

Every distinct block runs operator by operator on meta tensors, under a fake process group of the full world size.
``spmd_types.checker`` infers types, which must agree with those that the program states:

- *local, strict* for every operator: it finds I mixed with split work (a gradient that nobody sums), a pending sum in an operator that is
  not linear, and a wrong operand of a collective. It infers "varying" for the result of a split contraction. Where the program states P
  there, the check goes on with P, so that a missing reduction is found at the next operator;
- *global* for the operators that it has rules for (:data:`GLOBAL`): contractions, norms, attention, elementwise operators and collectives,
  each on operands of the stated types and dims.

Operands must have the types that their operator was lowered for, and results the stated shapes. The outputs of blocks are checked too. The
loss must be I on every axis of the program and a pending sum over samples. Last, gradients are followed from the loss to the parameters
(:mod:`autopar.lower.check_sums`), as the checker cannot follow operators that it does not know while a pending sum on another axis passes
through them, nor operators with several outputs.

An operator that is linear in an operand may take each rank's summand of it: its results are summands of the result. The checker knows the
linear functions of torch. This module lists autopar's linear operators and handles products with a bias.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, cast

import spmd_types
import torch
import torch.distributed as dist
from spmd_types import _checker
from spmd_types.checker import typecheck as checking
from torch import fx
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from autopar.errors import InternalError, UsageError
from autopar.graph.graph import Layout, TensorSpec
from autopar.lower.check_sums import check_program
from autopar.lower.emit import MICRO_BATCH_WEIGHT, SEED, SHARE, TARGETS, str_name
from autopar.lower.program import Program
from autopar.ops import collectives, plain, seeded
from autopar.ops import sequence as sequence_ops
from autopar.ops import sharded as sharded_ops
from autopar.ops.opaque import opaque
from autopar.plan.mesh import DATA_AXES, MESH_AXES, Mesh, Type
from autopar.rules.apply import BATCH
from autopar.rules.local_calls import SPREAD, layout_of

GLOBAL = frozenset(
    {
        "aten.add.Tensor", "aten.gelu.default", "aten.layer_norm.default", "aten.linear.default", "aten.mul.Tensor",
        "aten.neg.default", "aten.pow.Tensor_Scalar", "aten.rsqrt.default", "aten.silu.default",
        "aten.scaled_dot_product_attention.default", "aten.softmax.int", "aten.tanh.default", "aten.transpose.int",
        "autopar.all_gather", "autopar.all_reduce", "autopar.invariant_to_replicate", "autopar.linear_t",
        "autopar.reduce_scatter",
    }
)  # fmt: skip
"""Targets for which global mode has a rule that fits any shapes."""


_NUMBERS = {SEED: 0, SHARE: 1.0, MICRO_BATCH_WEIGHT: 1.0}
"""The values of inputs that are not tensors, for the check."""


def typecheck(program: Program, mesh: Mesh | None = None, *, rank: int = 0) -> int:
    """Check every distinct block and prelude of ``program``.

    Args:
        mesh: the mesh to check for, by default that of the plan. Its degrees on sharded axes must be those of the plan.
        rank: the rank of the world that this process stands for; the part of a causal mask that it sees depends on it.

    Returns:
        The number of operators checked.

    Raises:
        InternalError: a type is wrong; the error names the block and the operator.
        UsageError: this process already has a process group.
    """
    mesh = mesh or program.mesh
    with _fake_world(mesh, rank) as device_mesh, spmd_types.set_current_mesh(device_mesh):
        return _Check(program, mesh).run()


@contextmanager
def _fake_world(mesh: Mesh, rank: int) -> Iterator[DeviceMesh]:
    """Provide a device mesh over ranks that do not exist. It leaves out ``pp``, as pipeline ranks run different programs."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if dist.is_initialized():
        raise UsageError("A program cannot be checked beside a process group", fix="Check it in a separate process")
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=mesh.world_size)
    try:
        yield init_device_mesh("cpu", mesh.degrees, mesh_dim_names=MESH_AXES)[MESH_AXES[1:]]
    finally:
        dist.destroy_process_group()


class _Check:
    """The state of one :func:`typecheck`.

    Attributes:
        axes: the mesh axes of more than one rank, without ``pp``.
        count: the number of operators checked.
    """

    def __init__(self, program: Program, mesh: Mesh) -> None:
        self.program = program
        self.axes = tuple(axis for axis in MESH_AXES[1:] if getattr(mesh, axis) > 1)
        self.count = 0

    def run(self) -> int:
        """Check all parts of the program, and return the number of operators checked."""
        program = self.program
        for sums in program.sums:
            self.module(sums.module, "sums", sums.outputs)
        seen: set[str] = set()
        for stage in program.stages:
            if stage.prelude is not None:
                self.module(stage.prelude.module, f"prelude of stage {stage.index}", stage.prelude.outputs)
            for block in stage.blocks:
                if block.kind not in seen:
                    seen.add(block.kind)
                    self.module(block.module, f"block {block.index} ({block.label})", block.outputs)
        self.loss()
        check_program(self.program)
        return self.count

    def loss(self) -> None:
        """Check that the loss is I on every axis of the program and a pending sum over samples."""
        layout = dict(layout_of(self.program.graph, self.program.graph.loss))
        for axis, kind in layout.items():
            if kind.kind != ("P" if axis == BATCH else "I"):
                raise InternalError(
                    "The loss of the program has the wrong type",
                    where="loss",
                    expected="P over samples and I on other axes",
                    got=f"{kind} on {axis}",
                )

    # --- one module

    def module(self, module: fx.GraphModule, place: str, outputs: tuple[str, ...]) -> None:
        """Run a module node by node and check each node; ``outputs`` are the names of its results."""
        env: dict[fx.Node, Any] = {}
        for node in module.graph.nodes:
            node_place = f"{place}: {node.name} ({target_name(node.target)})"
            if node.op == "placeholder":
                env[node] = _NUMBERS[node.target] if node.target in _NUMBERS else self.tensor(node)
            elif node.op == "get_attr":
                env[node] = self.tensor(node) if "spec" in node.meta else None  # None: the code of an opaque region
            elif node.target is operator.floordiv:
                env[node] = 0  # the seed of the step, derived from that of a micro-batch
            elif node.op == "call_function":
                with _naming_errors(node_place):
                    env[node] = self.call(node, env, node_place)
            else:
                self.check_outputs(node, place, outputs)

    def check_outputs(self, node: fx.Node, place: str, outputs: tuple[str, ...]) -> None:
        """Check that the outputs of a module have the types that later blocks expect."""
        graph = self.program.graph
        stated = {str_name(ref): layout_of(graph, ref) for ref in graph._index.refs if not graph.is_parameter(ref)}
        for name, value in zip(outputs, cast("tuple[fx.Node, ...]", node.args[0]), strict=True):
            for axis, kind in stated[name]:
                got = dict(value.meta["types"]).get(axis, kind)
                is_total = axis == BATCH and kind.kind == "P" and got.kind == "R"  # it is summed before the prelude
                if got != kind and not is_total:
                    raise InternalError(
                        f"{name} leaves with the wrong type",
                        where=f"{place}: {value.name}",
                        expected=f"{axis}: {kind}",
                        got=f"{axis}: {got}",
                    )

    def call(self, node: fx.Node, env: dict[fx.Node, Any], place: str) -> Any:
        """Run the operator of a node on meta tensors, check its types, and return its result.

        Args:
            env: the values of earlier nodes.
            place: block and operator, for errors.
        """
        args, kwargs = _arguments(node, env)
        operands = [n for n in node.all_input_nodes if "types" in n.meta]
        changed = node.args[1] if node.target in CHANGES else ""
        pending = [axis for axis in self.axes if axis != changed and any(self.kind(n, axis) == "P" for n in operands)]
        # the types of several outputs are stated by their getitem nodes
        stated = [node] if "types" in node.meta else list(node.users)
        partial = bool(pending) and all(self.kind(n, axis) in ("P", None) for n in stated for axis in pending)
        call = linear_call(node.target) if partial else cast("Callable[..., Any]", node.target)
        if not operands and "types" in node.meta:  # a factory: its result has the stated types
            self.count += 1
            value = cast("Callable[..., Any]", node.target)(*args, **kwargs)
            # the checker infers I for such an output, and R is stated
            if node.target is operator.getitem and not node.meta["spec"].requires_grad:
                self.compare(value, node, place)
                value = _untyped(value)
            return self.annotate(value, node)
        if node.target is opaque:  # untraced code: its results have the stated types
            self.operands(node, operands, place)
            outputs = {cast("int", user.args[1]): _empty(user.meta["spec"]) for user in node.users}
            return [outputs.get(i) for i in range(1 + max(outputs, default=-1))]
        passes = partial and passes_by(node.target, call)
        if node.target is operator.getitem or passes:
            with spmd_types.no_typecheck():  # the checker does not know that this operator is linear
                result = cast("Callable[..., Any]", node.target)(*args, **kwargs)
            self.operands(node, operands, place)
            return self.annotate(_untyped(result), node) if "types" in node.meta else result
        self.count += 1
        with checking(strict_mode="strict", local=True):
            result = call(*args, **kwargs)
        self.operands(node, operands, place)
        if "types" in node.meta:
            self.compare(result, node, place)
            if node.meta["spec"].shape != tuple(result.shape):
                raise InternalError(
                    "The result of the operator has the wrong shape",
                    where=place,
                    expected=str(node.meta["spec"].shape),
                    got=tuple(result.shape),
                )
            if self.axes and _has_global_rule(node):
                self.check_globally(node, call, place)
        return result

    def operands(self, node: fx.Node, operands: list[fx.Node], place: str) -> None:
        """Check that each operand has the types that the operator was lowered for."""
        for operand, expected in zip(operands, node.meta.get("takes", ()), strict=False):
            if operand.meta["types"] != expected:
                raise InternalError(
                    "An operand of the operator has the wrong type",
                    where=place,
                    expected=_text(expected),
                    got=f"{operand.name} of {_text(operand.meta['types'])}",
                )

    def compare(self, result: torch.Tensor, node: fx.Node, place: str) -> None:
        """Compare the inferred types with the stated ones.

        If P is stated for a tensor that the checker infers as varying, the check continues with P. For a value without gradient I and R
        mean the same, and the checker's R is accepted.
        """
        has_gradient = node.meta["spec"].requires_grad
        for axis in self.axes:
            stated, found = self.kind(node, axis), spmd_types.maybe_get_axis_local_type(result, collectives.group(axis))
            if stated is None or (has_gradient and node.target is plain.local):
                continue
            if found is spmd_types.V and stated == "P":
                spmd_types.mutate_type(result, collectives.group(axis), src=spmd_types.V, dst=spmd_types.P)
            elif not has_gradient:
                if found is spmd_types.V and stated in ("R", "I"):
                    raise _wrong_type(place, axis, stated, found)
            elif found is spmd_types.R and stated == "S" and target_name(node.target) == "aten.expand.default":
                spmd_types.mutate_type(result, collectives.group(axis), src=spmd_types.R, dst=spmd_types.V)
            elif found is not _LOCAL[stated]:
                raise _wrong_type(place, axis, stated, found)

    def check_globally(self, node: fx.Node, call: Callable[..., Any], place: str) -> None:
        """Run the operator again in global mode, on operands of the stated types and dims, and compare the types of the result."""
        with checking(strict_mode="strict", local=False):
            operands = {n: self.tensor(n, with_dims=True) for n in node.all_input_nodes}
            args, kwargs = _arguments(node, operands)
            try:
                result = call(*args, **kwargs)
            except spmd_types.SpmdTypeError as error:
                if _FLATTENS in str(error.__cause__):
                    return
                raise
        for axis in self.axes:
            stated, found = self.kind(node, axis), spmd_types.maybe_get_axis_local_type(result, collectives.group(axis))
            same = not node.meta["spec"].requires_grad and stated in ("R", "I")
            if stated is not None and found is not _LOCAL[stated] and not same:
                raise _wrong_type(place, axis, stated, found, ", dims considered")

    # --- tensors

    def tensor(self, node: fx.Node, *, with_dims: bool = False) -> torch.Tensor:
        """Return a meta tensor of the spec of a node, with its stated types."""
        return self.annotate(_empty(node.meta["spec"]), node, with_dims=with_dims)

    def annotate(self, tensor: torch.Tensor, node: fx.Node, *, with_dims: bool = False) -> torch.Tensor:
        """Give a tensor the stated types of a node, and the split dims too if ``with_dims``; return it."""
        dims: list[list[str]] = [[] for _ in tensor.shape]
        types: dict[str, Any] = {}
        for axis in self.axes:
            kind = self.type(node, axis)
            types[axis] = _LOCAL[kind.kind if kind is not None else "R"]
            if kind is not None and kind.is_split:
                dims[kind.dim].append(axis)
        if not types:
            return tensor
        if not with_dims or not any(dims):
            return cast("torch.Tensor", spmd_types.assert_type(tensor, types))
        spec = spmd_types.PartitionSpec(*(tuple(d) if len(d) > 1 else d[0] if d else None for d in dims))
        return cast("torch.Tensor", spmd_types.assert_type(tensor, types, partition_spec=spec))

    def type(self, node: fx.Node, axis: str) -> Type | None:
        """Return the stated type of a node on a mesh axis, None if there is none; I of a value without gradient is returned as R."""
        layout: Layout = node.meta["types"]
        if node.op == "call_function" and node.target is plain.local:
            layout = cast("fx.Node", node.args[0]).meta["types"]
        types = dict(layout)
        kind = types.get(BATCH if axis in DATA_AXES else axis)
        if axis in DATA_AXES and SPREAD in types:  # data ranks of ep_data have different experts
            kind = types[SPREAD]
        if kind is not None and kind.kind == "I" and not node.meta["spec"].requires_grad:
            return Type("R")
        return kind

    def kind(self, node: fx.Node, axis: str) -> str | None:
        """Return the letter of :meth:`type`, without its dim."""
        stated = self.type(node, axis)
        return None if stated is None else stated.kind


_FLATTENS = "Attempted to flatten multiple dimensions"
"""The message by which the checker refuses to flatten dims, with torch up to 2.11 (not 2.13).

Its rules of linears and attention flatten rows, or samples and heads, to one dim. They cannot if a dim but the first of these is split.
There only local types are checked."""

_LOCAL = {"I": spmd_types.I, "R": spmd_types.R, "S": spmd_types.V, "P": spmd_types.P}
"""The checker's local types by ours."""


def _wrong_type(place: str, axis: str, stated: str, found: object, suffix: str = "") -> InternalError:
    """Return the error for a result whose inferred type ``found`` is not the stated one."""
    return InternalError(
        f"The result of the operator has the wrong type{suffix}",
        where=place,
        expected=f"{axis}: {stated}",
        got=f"{found}",
    )


def _text(layout: Layout) -> str:
    """Return the types of a layout for messages."""
    return ", ".join(f"{axis}: {kind}" for axis, kind in layout) or "no type"


def _has_global_rule(node: fx.Node) -> bool:
    """Return whether global mode has a rule that fits the node.

    It has none for causal attention, which makes its mask inside where the checker cannot follow, nor for grouped heads. A linear whose
    inner dims have length one becomes a batch of products, for which there is no rule. Truth values, which collectives send as bytes, have
    none either.
    """
    target = target_name(node.target)
    is_attention = target == "aten.scaled_dot_product_attention.default"
    is_unsupported = is_attention and (node.args[5:6] == (True,) or node.kwargs.get("enable_gqa", False))
    has_unit_dims = "linear" in target and 1 in node.all_input_nodes[0].meta["spec"].shape[1:-1]
    is_bool = target.startswith("autopar.") and node.meta["spec"].dtype == torch.bool
    return target in GLOBAL and not is_unsupported and not has_unit_dims and not is_bool


def _arguments(node: fx.Node, values: Mapping[fx.Node, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of a call with the values of its operands; factories get the device meta."""
    args = fx.node.map_arg(node.args, lambda n: values[n])
    kwargs = fx.node.map_arg(node.kwargs, lambda n: values[n])
    if "device" in kwargs:
        kwargs = {**kwargs, "device": torch.device("meta")}
    return cast("tuple[Any, ...]", args), cast("dict[str, Any]", kwargs)


def _empty(spec: TensorSpec) -> torch.Tensor:
    return torch.empty(spec.shape, dtype=spec.dtype, device="meta", requires_grad=spec.requires_grad)


def _untyped(result: torch.Tensor) -> torch.Tensor:
    """Return a tensor like ``result`` without the types that it may have inherited from an operand."""
    untyped = torch.empty(result.shape, dtype=result.dtype, device=result.device)
    return untyped.requires_grad_(result.requires_grad)


@contextmanager
def _naming_errors(place: str) -> Iterator[None]:
    """Turn errors of the checker and of operators in the body into an InternalError that names ``place``."""
    try:
        yield
    except (spmd_types.SpmdTypeError, RuntimeError, ValueError, IndexError) as error:
        # if a change of type is missing, shapes are wrong, and operators refuse them
        raise InternalError(
            "The generated program is inconsistent", where=place, got=str(error).strip().partition("\n")[0]
        ) from error


# --- pending sums ---------------------------------------------------------------------------------

CHANGES = frozenset(
    (
        collectives.all_gather,
        collectives.all_reduce,
        collectives.all_to_all,
        collectives.invariant_to_replicate,
        collectives.keep_on_first,
        collectives.reduce_scatter,
        collectives.shard,
    )
)
"""Changes of type on one axis. They are linear, so that a pending sum on another axis may pass; the checker does not know this."""

_LINEAR = frozenset(
    (
        seeded.dropout,  # all summands share one mask
        sequence_ops.attention_gathered,  # linear in the values
        sequence_ops.attention_ring,
        sharded_ops.change_over_data,
        sharded_ops.total,
    )
)
"""Other operators of autopar that are linear in the operand that may be a pending sum on another axis."""

_CHOOSE = frozenset((torch.gather, torch.index_select, torch.repeat_interleave))
"""Operators that are linear in the tensor that they select from; the checker would require that the indices are summands too."""


def passes_by(target: Any, call: Callable[..., Any]) -> bool:
    """Return whether the checker cannot follow a pending sum through an operator that the program states to be linear in it.

    Args:
        target: the function of the program.
        call: the function that replaces it in the check (:func:`linear_call`).
    """
    return not _is_known(call) or target in _LINEAR or target in CHANGES


def _is_known(call: Callable[..., Any]) -> bool:
    """Return whether the checker can find out if a pending sum may pass."""
    return call in _checker._OP_REGISTRY or call.__module__ in (
        "autopar.ops.collectives",
        "autopar.ops.plain",
        "autopar.ops.seeded",
        "autopar.ops.sharded",
        "autopar.ops.sequence",
        __name__,
    )


def linear_call(target: Any) -> Callable[..., Any]:
    """Return the function that replaces ``target`` in the check: a linear function that the checker knows, as it knows no overloads."""
    name = target_name(target)
    if name in ("aten.linear.default", "autopar.linear_t"):
        return _linear_t if name == "autopar.linear_t" else _linear
    if target is sharded_ops.embedding_vocabulary:
        return _embedding_product
    if isinstance(target, torch._ops.OpOverload):
        public = getattr(torch, target._schema.name.partition("::")[2], None)
        if public in _checker._OP_REGISTRY and public not in _CHOOSE:
            return cast("Callable[..., Any]", public)
    return cast("Callable[..., Any]", target)


def _linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    return _linear_t(x, torch.t(weight), bias)


def _linear_t(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Return ``x @ weight + bias``, in which each rank may have a summand of the bias."""
    y = torch.matmul(x, weight)
    if bias is None:
        return y
    for axis, kind in spmd_types.get_local_type(bias).items():
        if kind is spmd_types.P and spmd_types.get_axis_local_type(y, axis) is spmd_types.V:
            spmd_types.mutate_type(y, axis, src=spmd_types.V, dst=spmd_types.P)
    return torch.add(y, bias)


def _embedding_product(weight: torch.Tensor, ids: torch.Tensor, axis: str, padding_idx: int = -1) -> torch.Tensor:
    """Return embeddings as the product of one-hot rows and the table, of which ranks on another axis may have summands."""
    chosen = ids.unsqueeze(-1).expand(*ids.shape, weight.shape[0]).to(weight.dtype)
    return sharded_ops._pending(torch.matmul(chosen, weight), collectives.group(axis))


def target_name(target: Any) -> str:
    """Return the name that graphs have for the function of a node (``Op.target``)."""
    if target in TARGETS:
        return TARGETS[target]
    if isinstance(target, torch._ops.OpOverload):
        return str(target)  # as graphs name it
    return f"autopar.{target.__name__}" if callable(target) else str(target)
