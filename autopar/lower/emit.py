"""Emits a sequence of operators as an fx module: the names of values, the parameters, and the streams of random numbers."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx

from autopar.graph.graph import Argument, Buffer, Graph, Layout, Op, Parameter, Ref, TensorSpec
from autopar.graph.operator_kinds import OPAQUE, draws_random
from autopar.ops import plain
from autopar.ops.kernels import KERNELS, region_of, resolve
from autopar.ops.opaque import Holder
from autopar.plan.mesh import DATA_AXES, P, R
from autopar.rules.apply import BATCH, OVER_DATA
from autopar.rules.local_calls import SPREAD, layout_of, use_layout

SEED = "rng_seed"
"""Name of the input that random operators draw from: a Python int that differs for each step and micro-batch."""

SHARE = "batch_share"
"""Name of the input that means over samples read: a Python float, the share of the plan's global batch that the step computes."""

MICRO_BATCH_WEIGHT = "micro_batch_weight"
"""Name of the input that sums over the samples of all data ranks read: a Python float, the weight of the micro-batch in them."""

_KEYWORDS = {SHARE: "share", MICRO_BATCH_WEIGHT: "micro_batch_weight"}
"""The keyword arguments of operators that take these inputs."""

_STATISTICS = {
    "autopar.batch_norm": (SHARE, MICRO_BATCH_WEIGHT),
    "autopar.batch_norm_running": (SHARE, MICRO_BATCH_WEIGHT),
    "autopar.total": (MICRO_BATCH_WEIGHT,),
}
"""The inputs that operators over the batch take if they sum over data ranks, by target."""

_FUNCTIONS: dict[str, Callable[..., Any]] = {
    **{f"aten.{name}.Tensor": getattr(torch, name) for name in ("add", "sub", "mul", "div")},
    **{
        f"aten.{name}.default": getattr(torch, name)
        for name in (
            "bmm", "cat", "clone", "cos", "embedding", "exp", "layer_norm", "matmul", "neg", "permute", "relu",
            "reshape", "rsqrt", "sigmoid", "sin", "sqrt", "sum", "tanh", "unsqueeze",
        )
    },
    "aten.batch_norm.default": plain.fixed_batch_norm,
    "aten.mean.dim": torch.mean,
    "aten.pow.Tensor_Scalar": torch.pow,
    "aten.softmax.int": torch.softmax,
    "aten.sum.dim_IntList": torch.sum,
    "aten.transpose.int": torch.transpose,
    "aten.gelu.default": F.gelu,
    "aten.linear.default": F.linear,
    "aten.scaled_dot_product_attention.default": F.scaled_dot_product_attention,
    "aten.silu.default": F.silu,
    "aten.view.default": torch.reshape,
}  # fmt: skip
"""Functions that take the arguments of the operator: they read like ordinary PyTorch code, and calls are faster than those of overloads.

A view becomes a reshape, which copies if it must: strides depend on kernels, which differ between devices and shapes."""

TARGETS = {function: target for target, function in _FUNCTIONS.items() if target != "aten.view.default"}

_ATTENTION = "aten.scaled_dot_product_attention.default"
_ATTENTIONS = (_ATTENTION, "autopar.attention_gathered", "autopar.attention_ring")


def is_random(op: Op) -> bool:
    """Return whether the operator draws random numbers."""
    if op.target in _ATTENTIONS:
        return len(op.args) > 4 and bool(op.args[4])
    return op.target == OPAQUE or draws_random(op.target)


def numbers_of_batch(graph: Graph, op: Op) -> tuple[str, ...]:
    """Return which of :data:`SHARE` and :data:`MICRO_BATCH_WEIGHT` the operator reads, because its result depends on the batch size."""
    if op.target == OVER_DATA:
        return (MICRO_BATCH_WEIGHT,) if "P" in op.args[1:] and not moves_samples(op) else ()
    if op.target in _STATISTICS and any(axis in op.args for axis in DATA_AXES):
        return _STATISTICS[op.target]
    if op.target != "autopar.partial_mean" or dict(op.layouts[0]).get(BATCH) != P:
        return ()
    # a mean divides by a number of elements that grows with the global batch if it is of parts of the batch
    is_of_parts = any(dict(layout_of(graph, ref)).get(BATCH, R).is_split for ref in op.operands)
    return (SHARE,) if is_of_parts else ()


def moves_samples(op: Op) -> bool:
    """Return whether a change of type over samples gathers or splits them, rather than only summing the values of data ranks."""
    return not {"P", "I", "R"}.issuperset(op.args[1:])


@dataclass(slots=True)
class Emitter:
    """One fx module under construction.

    Attributes:
        name: the name of the module's class.
        salts: a number for each random operator of the program, by the operator's name.
        period: the difference between the seeds of two consecutive steps; the seeds of a step's micro-batches are in between.
        device: the device of tensors that operators make from no other tensor.
        graph, root: the fx graph, and the module that holds parameters and buffers.
        values: the node of each value.
        numbers: the inputs that are not tensors, by name.
        read_numbers: the inputs of :func:`numbers_of_batch` that each operator reads, by the operator's name.
    """

    name: str
    salts: Mapping[str, int]
    device: torch.device
    period: int
    graph: fx.Graph = field(default_factory=fx.Graph)
    root: torch.nn.Module = field(default_factory=torch.nn.Module)
    values: dict[Ref, fx.Node] = field(default_factory=dict)
    numbers: dict[str, fx.Node] = field(default_factory=dict)
    read_numbers: dict[str, tuple[str, ...]] = field(default_factory=dict)

    def input(self, ref: Ref, spec: TensorSpec, layout: Layout) -> str:
        """Add a tensor that the caller passes, and return its name."""
        self._leaf(ref, _typed(self._placeholder(str_name(ref)), spec, layout))
        return str_name(ref)

    def number_inputs(self, graph: Graph, ops: Iterable[Op]) -> list[str]:
        """Add the inputs of ``ops`` that are not tensors (the seed, :func:`numbers_of_batch`), and return their names."""
        self.read_numbers = {op.name: numbers_of_batch(graph, op) for op in ops}
        names = [SEED] if any(is_random(op) for op in ops) else []
        names += sorted({name for read in self.read_numbers.values() for name in read})
        self.numbers = {name: self._placeholder(name) for name in names}
        return names

    def shared_parameter(self, parameter: Parameter) -> str:
        """Add a parameter that the caller passes, and return its name."""
        self._local(parameter, self._placeholder(parameter.name))
        return parameter.name

    def parameter(self, parameter: Parameter) -> None:
        """Add a parameter that the module holds, on meta, with its local shape."""
        tensor = torch.empty(parameter.spec.shape, dtype=parameter.spec.dtype, device="meta")
        self.root.register_parameter(parameter.name, torch.nn.Parameter(tensor, parameter.spec.requires_grad))
        self._local(parameter, self.graph.get_attr(parameter.name))

    def buffer(self, buffer: Buffer) -> str:
        """Add a buffer that the module holds, and return its name. It is on meta if the graph does not hold its value."""
        value = buffer.value
        if value is None:
            value = torch.empty(buffer.spec.shape, dtype=buffer.spec.dtype, device="meta")
        self.root.register_buffer(buffer.name, value)
        self._leaf(Ref(buffer.name), _typed(self.graph.get_attr(buffer.name), buffer.spec, ()))
        return buffer.name

    def op(self, op: Op) -> None:
        """Add one call, which :meth:`number_inputs` must have seen before. Each of several outputs becomes a node."""
        target, args = op.target, list(op.args)
        kwargs: dict[str, Any] = dict(op.kwargs)
        if takes_device(op):
            kwargs["device"] = self.device
        region: tuple[fx.Node, ...] = ()
        if target == OPAQUE:  # the holder of untraced code, which the runtime fills
            self.root.add_module(f"{op.name}_region", Holder(region_of(str(args[0])), op.name))
            region = (self.graph.get_attr(f"{op.name}_region"),)
        if is_random(op):
            args = args[:2] if target == "autopar.dropout" else args
            if target == _ATTENTION:
                target = "autopar.attention"
            elif not target.startswith("autopar."):
                args, target = [target, *args], "autopar.draw"
            kwargs |= {"salt": self.salts[op.name], "axes": random_axes(op.layouts[0] if op.layouts else ())}
            kwargs["seed"] = self._seed_of(op)
        kwargs |= {_KEYWORDS[number]: self.numbers[number] for number in self.read_numbers[op.name]}
        node = self.graph.create_node(
            "call_function",
            _FUNCTIONS.get(target) or resolve(target),
            (*region, *(self._argument(arg) for arg in args)),
            {key: self._argument(value) for key, value in kwargs.items()},
            name=op.name,
        )
        node.meta["op"] = op.name
        node.meta["takes"] = tuple(n.meta["types"] for n in node.all_input_nodes if "types" in n.meta)
        layouts = op.layouts or ((),) * len(op.outputs)
        if len(op.outputs) == 1 and target != OPAQUE:
            self.values[Ref(op.name)] = _typed(node, op.spec, layouts[0])
            return
        for i in range(len(op.outputs)):
            part = self.graph.create_node(
                "call_function", operator.getitem, (node, i), name=str_name(Ref(op.name, i), suffix_first=True)
            )
            self.values[Ref(op.name, i)] = _typed(part, op.outputs[i], layouts[i])

    def _seed_of(self, op: Op) -> fx.Node:
        """Return the node of the seed: that of the micro-batch, or that of the step if all samples share the drawn value.

        One device would draw such a value once in a step.
        """
        layout, seed = dict(op.layouts[0]) if op.layouts else {}, self.numbers[SEED]
        if layout.get(BATCH, P).kind not in ("I", "R"):
            return seed
        return self.graph.create_node("call_function", operator.floordiv, (seed, self.period), name=f"{op.name}_seed")

    def finish(self, outputs: Sequence[Ref], kept: Iterable[Ref] = ()) -> fx.GraphModule:
        """Return the finished module, whose forward returns a tuple with one tensor for each of ``outputs``.

        Args:
            outputs: the values that it returns.
            kept: values that stay in the code although nothing reads them.
        """
        self.graph.output(tuple(self.values[ref] for ref in outputs))
        needed = {self.values[ref] for ref in kept if ref in self.values}
        for node in tuple(self.graph.nodes):
            if node.target is operator.getitem and not node.users and node not in needed:
                self.graph.erase_node(node)
        return fx.GraphModule(self.root, self.graph, class_name=self.name)

    def _placeholder(self, name: str) -> fx.Node:
        return self.graph.create_node("placeholder", name, name=name)  # Graph.placeholder changes the case of names

    def _local(self, parameter: Parameter, node: fx.Node) -> None:
        """Add the node of a parameter's local tensor, cast to its dtype if FSDP does not cast it."""
        _typed(node, parameter.spec, use_layout(parameter))
        name = f"{parameter.name}_local"
        is_cast_here = not parameter.spec.shape or any(axis == SPREAD for axis, _ in parameter.layout)
        args = (node, parameter.spec.dtype) if is_cast_here else (node,)
        local = self.graph.create_node("call_function", plain.local, args, name=name)
        self._leaf(Ref(parameter.name), _typed(local, parameter.spec, parameter.layout))

    def _leaf(self, ref: Ref, node: fx.Node) -> None:
        """Let operators read ``node`` as the input, parameter or buffer ``ref``."""
        node.meta["reads"] = ref
        self.values[ref] = node

    def _argument(self, argument: Argument) -> Any:
        """Return an argument with the nodes of its tensors."""
        if isinstance(argument, Ref):
            return self.values[argument]
        if isinstance(argument, tuple):
            return [self._argument(item) for item in argument]
        return argument


def random_axes(layout: Layout) -> tuple[str, ...]:
    """Return the mesh axes on which ranks draw different numbers: those that split the tensor. Ranks with summands share a mask."""
    split = (DATA_AXES if axis == BATCH else (axis,) for axis, kind in layout if kind.is_split)
    return tuple(axis for axes in split for axis in axes)


def str_name(ref: Ref, *, suffix_first: bool = False) -> str:
    """Return an identifier for a value. It differs from all names of operators, as a second ``topk`` is called ``topk_1``."""
    return f"{ref.name}_out{ref.index}" if ref.index or suffix_first else ref.name


def _typed(node: fx.Node, spec: TensorSpec, layout: Layout) -> fx.Node:
    """Record the spec and the types of a node, for comments and for the check, and return it."""
    node.meta["spec"], node.meta["types"] = spec, layout
    return node


def _comment(node: fx.Node) -> str:
    """Return the shape and the types of a node as a comment."""
    types = ", ".join(f"{axis}: {kind}" for axis, kind in node.meta["types"])
    return f"{list(node.meta['spec'].shape)} {types}".rstrip()


def takes_device(op: Op) -> bool:
    """Return whether the operator makes a tensor from no other tensor and has an argument ``device``."""
    if op.operands or not op.target.startswith("aten."):
        return False
    schema = getattr(resolve(op.target), "_schema", None)
    return schema is not None and any(argument.name == "device" for argument in schema.arguments)


_SHORT = (
    ("torch.ops.aten.", "aten."),
    ("torch._C._nn.", "F."),
    ("torch.nn.functional.", "F."),
    *((f"autopar_ops_{kernels}_", f"{kernels}.") for kernels in KERNELS),
)
"""Prefixes in the code of fx, and their short forms."""


def readable(module: fx.GraphModule) -> str:
    """Return the code of the module for people to read.

    Names of modules are short, statements that free values are left out, attributes are written where they are read, and each line has a
    comment with the shape and the types of its result.
    """
    comments = {node.name: _comment(node) for node in module.graph.nodes if "types" in node.meta}
    attributes: dict[str, str] = {}
    lines: list[str] = []
    for line in module.code.strip().splitlines():
        text = re.sub(r";  .*= None$", "", line)
        if match := re.fullmatch(r"\s+(\w+) = (self\.\w+)", text):
            attributes[match[1]] = match[2]
            continue
        name, equals, value = text.partition(" = ")
        value = re.sub(r"(?<![\w.])\w+\b(?! = )", lambda word: attributes.get(word[0], word[0]), value or text)
        text = f"{name}{equals}{value}" if equals else value
        for long, short in _SHORT:
            text = text.replace(long, short)
        comment = comments.get(name.strip())
        lines.append(f"{text}  # {comment}" if comment else text)
    return "\n".join(lines)


def read_layout(graph: Graph, ref: Ref) -> Layout:
    """Return the types of a tensor where operators read it: a total is R on ``batch``."""
    types = layout_of(graph, ref)
    return tuple((axis, R if axis == BATCH else kind) for axis, kind in types) if ref in graph.sums else types
