"""Kinds of operators: which draw random numbers, are attention, are recomputed in backward by selective recompute, and run code as written.

**Selective recompute** keeps the outputs of operators that are expensive, communicate, draw or choose: products with a parameter,
convolutions, fused attention, changes of type, experts, embeddings, losses, random draws, top-k, sorts, and unknown code. It recomputes
element-wise operators, activations, norms, softmaxes, reductions and copies, and products of two activations whose result is larger than
both (the scores of unfused attention). torchtitan's "op" selective checkpointing does the same, and so does Megatron (Korthikanti et al.
2022, section 5) for unfused attention. Exceptions are made where recompute would free no memory (:func:`made_again`).

The choice depends only on the graph of one rank, so that the cost model and the program agree. See docs/adr/0015-selective-recompute.md.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TypeAlias, cast

import torch

from autopar.errors import RuleError
from autopar.graph.aliasing import storage_roots
from autopar.graph.elements import collect_refs
from autopar.graph.graph import Block, Graph, Op, Ref
from autopar.ops.kernels import aten_targets, region_of, resolve
from autopar.util.formatting import some

_NOT_BY_ITSELF = aten_targets("scaled_dot_product_attention.default lstm.input gru.input rnn_tanh.input rnn_relu.input")
"""Operators that torch tags as random although most calls draw nothing. Attention draws if its dropout argument says so, which the lowering
checks. The dropout between layers of recurrent networks is a separate operator in a graph."""


@cache
def draws_random(target: str) -> bool:
    """Return whether an operator draws random numbers at every call.

    >>> draws_random("aten.bernoulli.p"), draws_random("autopar.dropout"), draws_random("aten.add.Tensor")
    (True, True, False)
    """
    if target.startswith("autopar."):  # known without loading the kernels
        return target == "autopar.dropout"
    return target not in _NOT_BY_ITSELF and torch.Tag.nondeterministic_seeded in _tags(target)


def _tags(target: str) -> Collection[torch.Tag]:
    """Return the tags of an operator of torch; none for any other operator."""
    try:
        return cast("Collection[torch.Tag]", getattr(resolve(target), "tags", ()))
    except RuleError:
        return ()


DROPOUT_ARGUMENT = {
    "autopar.dropout": 1,
    "aten.dropout.default": 1,
    "aten.native_dropout.default": 1,
    "aten.scaled_dot_product_attention.default": 4,
}
"""The position of the dropout probability among the arguments, by target."""


def draws_values(op: Op) -> bool:
    """Return whether an operator draws random numbers and is no dropout."""
    return draws_random(op.target) and op.target not in DROPOUT_ARGUMENT


def without_dropout(op: Op) -> Op:
    """Return the same call with a dropout probability of 0."""
    position = DROPOUT_ARGUMENT.get(op.target)
    return op if position is None else op.with_argument(position, "dropout_p", 0.0)


def is_attention(op: Op) -> bool:
    """Return whether an operator is fused attention."""
    return op.target in ("aten.scaled_dot_product_attention.default", "autopar.attention")


def is_scores(op: Op) -> bool:
    """Return whether an operator is the softmax of unfused attention, over scores [samples, heads, rows, columns]."""
    return op.target == "aten.softmax.int" and len(op.spec.shape) == 4 and op.args[1] in (-1, 3)


def has_written_attention(graph: Graph) -> bool:
    """Return whether the graph has unfused attention, which ring attention cannot run."""
    return any(is_scores(op) for op in graph.ops)


def attention_heads(graph: Graph, operand: int = 0) -> tuple[int, ...]:
    """Return the distinct numbers of heads of fused attention, ascending: of queries (``operand`` 0), or of keys and values (1)."""
    shapes = [graph.spec(op.operands[operand]).shape for op in graph.ops if is_attention(op)]
    return tuple(sorted({shape[1] for shape in shapes if len(shape) == 4}))


def attention_sequences(graph: Graph) -> tuple[int, ...]:
    """Return the distinct lengths of sequences that can be split, ascending.

    These are the lengths of queries and keys of fused attention. Of unfused attention only the rows of the scores count: its keys are
    complete when the scores are computed, and the scores may have further columns (attention sinks).
    """
    lengths = {graph.spec(ref).shape[-2] for op in graph.ops if is_attention(op) for ref in op.operands[:2]}
    lengths |= {op.spec.shape[-2] for op in graph.ops if is_scores(op)}
    return tuple(sorted(lengths))


_SUMS = aten_targets("add.Tensor sub.Tensor")
_DROPOUT = "autopar.dropout"
_PRODUCTS = aten_targets("mm.default bmm.default matmul.default baddbmm.default einsum.default")
VIEWS = aten_targets(
    "view.default _unsafe_view.default reshape.default flatten.using_ints unflatten.int squeeze.default squeeze.dim squeeze.dims"
    " unsqueeze.default transpose.int t.default permute.default expand.default slice.Tensor select.int narrow.default"
    " alias.default detach.default split.Tensor split_with_sizes.default chunk.default unbind.int diagonal.default movedim.int"
    " unfold.default view_as.default expand_as.default"
)
"""Operators whose output is in the storage of their first operand."""
_COPIES = aten_targets(
    "clone.default contiguous.default to.dtype _to_copy.default type_as.default cat.default stack.default pad.default"
    " constant_pad_nd.default repeat.default repeat_interleave.self_int roll.default flip.default tril.default triu.default"
)
_REDUCTIONS = aten_targets("mean.default mean.dim sum.default sum.dim_IntList cumsum.default")
_SCALED = aten_targets("add.Scalar sub.Scalar rsub.Scalar neg.default mul.Scalar div.Scalar")
_LINEAR = (VIEWS - {"aten.unfold.default"}) | _COPIES | _REDUCTIONS | _SUMS | _SCALED
SAVES_NOTHING = _LINEAR | aten_targets("rsub.Tensor zeros_like.default ones_like.default")
"""Operators whose backward needs neither their operands nor their outputs."""
_OTHERS = aten_targets(
    "softmax.int _softmax.default log_softmax.int _log_softmax.default layer_norm.default native_layer_norm.default"
    " rms_norm.default group_norm.default instance_norm.default amax.default amin.default logsumexp.default var.correction"
    " std.correction linalg_vector_norm.default norm.ScalarOpt_dim index.Tensor index_select.default gather.default glu.default"
    " zeros_like.default ones_like.default prod.default"
)
_CHEAP = _LINEAR | _OTHERS
SAVES_OUTPUT = aten_targets(
    "exp.default tanh.default sigmoid.default sqrt.default rsqrt.default relu.default reciprocal.default sign.default"
    " amax.default amin.default logsumexp.default prod.default elu.default selu.default softmax.int _softmax.default"
    " log_softmax.int _log_softmax.default"
)
"""Operators whose backward needs their outputs, but not their operands."""


def is_dear(op: Op) -> bool:
    """Return whether selective recompute always keeps the outputs of an operator, whatever its operands are."""
    return op.target not in _SUMS and op.target not in _PRODUCTS and op.target != _DROPOUT and not _is_cheap(op.target)


def made_again(graph: Graph, block: Block, roots: Mapping[Ref, Ref] | None = None) -> frozenset[int]:
    """Return the positions in ``graph.block_ops(block)`` of the operators that selective recompute runs again in backward.

    The rules of the module have two exceptions, in which recompute would free no memory:

    - a sum, a difference or a dropout of values that are all kept is kept, as its operands are as large and would be needed instead;
    - a group of recomputed operators that read each other's values (rotary positions, casts, the mean behind a projection) is kept if
      the values that backward needs from it are no larger than its operands that no other operator of the block keeps.

    Args:
        roots: for every value of the block the value in whose storage it is; None computes them with :func:`storage_roots`.
    """
    ops = graph.block_ops(block)
    root_of = storage_roots(ops, graph.spec) if roots is None else roots
    reads = [tuple(dict.fromkeys(root_of.get(ref, ref) for ref in op.operands)) for op in ops]
    recomputed: dict[str, int] = {}
    of_parameters: set[str] = set()  # operators that read nothing but parameters, directly or through each other
    for i, op in enumerate(ops):
        if op.outputs and all(root_of.get(ref) != ref for ref in op.refs):
            continue  # a view
        live = [ref for ref in reads[i] if not graph.is_prelude(ref)]
        if live and all(graph.is_parameter(ref) or ref.name in of_parameters for ref in live):
            of_parameters.add(op.name)
        if op.target in _PRODUCTS:
            has_weight = any(graph.is_parameter(ref) or ref.name in of_parameters for ref in live)
            is_recomputed = not has_weight and op.spec.num_bytes > _bytes_of(graph, op.operands)
        elif op.target in _SUMS or op.target == _DROPOUT:
            is_recomputed = any(ref.name in recomputed for ref in live)
        else:
            is_recomputed = _is_cheap(op.target)
        if is_recomputed:
            recomputed[op.name] = i
    return frozenset(_without_idle(graph, ops, reads, recomputed).values())


def _without_idle(
    graph: Graph, ops: tuple[Op, ...], reads: list[tuple[Ref, ...]], recomputed: Mapping[str, int]
) -> dict[str, int]:
    """Return ``recomputed`` without the groups of operators whose recompute frees no memory.

    Args:
        reads: the storages that each operator reads.
        recomputed: the positions of recomputed operators in ``ops``, by name.
    """
    parent = {name: name for name in recomputed}  # a union-find structure over operators that read each other's values

    def find(name: str) -> str:
        while parent[name] != name:
            parent[name] = parent[parent[name]]
            name = parent[name]
        return name

    for name, i in recomputed.items():
        for ref in reads[i]:
            if ref.name in parent:
                parent[find(ref.name)] = find(name)
    group_of = {name: find(name) for name in recomputed}
    needed: dict[str, set[Ref]] = {name: set() for name in group_of.values()}  # values of a group that backward needs
    read: dict[str, set[Ref]] = {name: set() for name in needed}  # values that a group reads
    kept: set[Ref] = set()  # operands that backward of some operator keeps
    for op, roots in zip(ops, reads, strict=True):
        group = group_of.get(op.name, "")
        keeps = _keeps_operands(graph, op)
        kept.update(roots if keeps else ())
        if group and op.target in SAVES_OUTPUT:
            needed[group].update(op.refs)
        for ref in roots:
            producer = group_of.get(ref.name, "")
            if producer and (keeps or producer != group):
                needed[producer].add(ref)
            elif group and not producer and not graph.is_parameter(ref) and not graph.is_prelude(ref):
                read[group].add(ref)
    idle = {name for name in needed if _bytes_of(graph, needed[name]) <= _bytes_of(graph, read[name] - kept)}
    return {name: i for name, i in recomputed.items() if group_of[name] not in idle}


def _bytes_of(graph: Graph, refs: Iterable[Ref]) -> int:
    return sum(graph.spec(ref).num_bytes for ref in refs)


def _keeps_operands(graph: Graph, op: Op) -> bool:
    """Return whether backward of an operator needs its operands, as for products, fused attention, norms and most functions."""
    if op.target in _LINEAR or op.target in SAVES_OUTPUT or not any(spec.requires_grad for spec in op.outputs):
        return False
    if op.target == "aten.mul.Tensor":
        return sum(graph.spec(ref).requires_grad for ref in op.operands) > 1
    if op.target == "aten.div.Tensor":
        return any(graph.spec(ref).requires_grad for ref in op.operands[1:])
    return op.target.startswith("aten.") or "attention" in op.target or op.target == "autopar.linear_t"


@cache
def _is_cheap(target: str) -> bool:
    """Return whether an operator is in the lists above or is element-wise; operators that draw random numbers are not.

    >>> _is_cheap("aten.gelu.default"), _is_cheap("aten.linear.default"), _is_cheap("autopar.all_gather")
    (True, False, False)
    """
    if target in _CHEAP or not target.startswith("aten."):
        return target in _CHEAP
    tags = _tags(target)
    return torch.Tag.pointwise in tags and torch.Tag.nondeterministic_seeded not in tags


# --- opaque regions -------------------------------------------------------------------------------

OPAQUE = "autopar.opaque"
"""The target of the operator that runs a region of code that is not traced."""
_OPAQUE_NOTE = "opaque, whole on every rank of tp and cp and of a cost that is known roughly: "
_OWN_BACKWARD = "an export would drop its own backward, which is not what autograd makes of its forward"
_WHOLE = "the whole model"
_MIXED = "; its samples are not known to be apart: "
"""The beginnings of the parts of a note. :func:`why_opaque` finds the parts by them."""


Passed: TypeAlias = tuple[str, int]
"""A tensor that an operator passes to its region: the operator's name, and the tensor's place among inputs and parameters."""
Sources: TypeAlias = set[Passed | None]
"""What gradients come from: tensors passed to regions, by whose code, and None, for the loss without a region between."""


@dataclass(frozen=True, slots=True)
class RegionGradients:
    """Where gradients come from in a model with opaque regions.

    Attributes:
        parameters: the sources of each parameter's gradient, by its name; of those alone that regions stand before on all ways.
        regions: the sources of the gradient of each region's outputs, by its operator's name, from the loss on.
    """

    parameters: dict[str, Sources]
    regions: dict[str, Sources]

    @property
    def passed(self) -> list[Passed]:
        """All sources but the loss, in an order that all ranks have."""
        found = Sources().union(*self.parameters.values(), *self.regions.values())
        return sorted(source for source in found if source is not None)

    def unreached(self, noted: set[Passed]) -> set[str]:
        """Return the parameters to which no gradient has come from the loss, if backward has come to ``noted``.

        What a region was passed has also been noted where zeros alone came to the region's outputs, as later code left them out.
        """
        true: Sources = {None}
        for region, sources in self.regions.items():
            if not true.isdisjoint(sources):
                true.update(passed for passed in noted if passed[0] == region)
        return {name for name, sources in self.parameters.items() if true.isdisjoint(sources)}


def region_gradients(graph: Graph) -> RegionGradients:
    """Return where gradients come from."""
    sources_of: defaultdict[Ref, Sources] = defaultdict(set)
    sources_of[graph.loss] = {None}
    regions: dict[str, Sources] = {}
    for op in reversed(graph.ops):
        sources = Sources().union(*(sources_of[ref] for ref in op.refs))
        if not sources:
            continue
        if None in sources:  # which is there in every step
            sources = {None}
        if op.target == OPAQUE:
            regions[op.name] = sources
        for place, ref in enumerate(_passed(op) if op.target == OPAQUE else op.operands):
            if graph.spec(ref).requires_grad:
                sources_of[ref] |= {(op.name, place)} if op.target == OPAQUE else sources
    of_parameter: defaultdict[str, Sources] = defaultdict(set)
    for p in graph.parameters:  # a part of a parameter has zeros where another part has a gradient
        of_parameter[p.fqn] |= sources_of[Ref(p.name)]
    parameters = {p.name: of_parameter[p.fqn] for p in graph.parameters}
    return RegionGradients({name: s for name, s in parameters.items() if s and None not in s}, regions)


def _passed(op: Op) -> list[Ref]:
    """Return the inputs and the parameters of a call of a region, in order."""
    refs: list[Ref] = []
    collect_refs(op.args[1:3], refs)
    return refs


def opaque_notes(graph: Graph, reasons: Mapping[str, str]) -> tuple[str, ...]:
    """Return a note for all regions that are opaque for the same reason: their names, the reason, and why they mix samples.

    Args:
        reasons: says for modules, by path, why they are opaque. Regions without an entry are autograd functions.
    """
    calls = [op for op in (*graph.prelude, *graph.ops) if op.target == OPAQUE]
    regions = {region.name: region for region in (region_of(str(op.args[0])) for op in calls)}
    groups: dict[tuple[str, str], list[str]] = {}
    for name, region in regions.items():
        groups.setdefault((reasons.get(name, _OWN_BACKWARD), region.why), []).append(name or _WHOLE)
    return tuple(
        f"{_OPAQUE_NOTE}{some(names)}; {why}" + (f"{_MIXED}{why_mixed}" if why_mixed else "")
        for (why, why_mixed), names in groups.items()
    )


def why_opaque(notes: Sequence[str], name: str) -> str:
    """Return why the region ``name`` is opaque according to the notes of :func:`opaque_notes`; empty if none of them names it."""
    for note in notes:
        names, _, why = note.removeprefix(_OPAQUE_NOTE).partition("; ")
        if note.startswith(_OPAQUE_NOTE) and (name or _WHOLE) in names.split(" and ")[0].split(", "):
            return why.partition(_MIXED)[0]
    return ""
