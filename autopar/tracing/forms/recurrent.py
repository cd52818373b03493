"""Calls that hold several steps: recurrent networks taken apart at their dropout, bags of embeddings of one length."""

from __future__ import annotations

from dataclasses import replace

import torch

from autopar.graph.graph import Argument, Ref
from autopar.tracing.builder import Builder, Call, Value
from autopar.tracing.forms.basic import Handler, generic, slice_of, view_to

_MODES = ("sum", "mean", "max")
_DENSE = "embeddings with sparse=True get dense gradients here: train them with an optimizer for such"


def _recurrent(builder: Builder, call: Call) -> Value:
    """A network that drops between its layers: one call for each layer, and between them the dropout that all others are.

    So its random numbers are those of their place, drawn again by recompute, and parts of a batch draw their own.
    """
    given = call.bound()
    num_layers, dropout = given["num_layers"], given["dropout"]
    assert isinstance(num_layers, int) and isinstance(dropout, float)
    states = given["hx"] if isinstance(given["hx"], tuple) else (given["hx"],)
    call = _ending_as_begun(builder, call, states)
    if not (dropout and given["train"] and num_layers > 1):
        position = [argument.name for argument in call.overload._schema.arguments].index("dropout")
        return generic(builder, _without(call, position))
    x, parameters = given["input"], given["params"]
    assert isinstance(x, Ref) and isinstance(parameters, tuple)
    directions, each = 2 if given["bidirectional"] else 1, len(parameters) // num_layers
    ends: list[list[Ref]] = [[] for _ in states]
    for layer in range(num_layers):
        first = layer * directions
        own: list[Argument] = []
        for state in states:
            assert isinstance(state, Ref)
            own.append(slice_of(builder, call, state, 0, first, first + directions))
        specs = [builder.specs[ref] for ref in own if isinstance(ref, Ref)]
        held = parameters[layer * each : (layer + 1) * each]
        args = (x, tuple(own) if len(own) > 1 else own[0], held, given["has_biases"], 1, 0.0, True, directions == 2)
        made = builder.emit(call, call.target, (*args, given["batch_first"]), call.spec, *specs)
        for i, end in enumerate(ends):
            end.append(Ref(made.name, i + 1))
        x = made
        if layer < num_layers - 1:
            x = builder.emit(call, "autopar.dropout", (x, dropout, builder.salts), call.spec)
            builder.salts += 1
    joined = []
    for end, spec in zip(ends, call.outputs[1:], strict=True):
        assert spec is not None
        joined.append(builder.emit(call, "aten.cat.default", (tuple(end), 0), spec))
    return (x, *joined)


def _ending_as_begun(builder: Builder, call: Call, states: tuple[Argument, ...]) -> Call:
    """The states that come out have the shapes of those that go in; an export of torch 2.11 gives them another dim."""
    ends = [
        None if spec is None else replace(spec, shape=builder.shape(state))
        for spec, state in zip(call.outputs[1:], states, strict=True)
        if isinstance(state, Ref)
    ]
    return replace(call, outputs=(call.outputs[0], *ends))


def _without(call: Call, position: int) -> Call:
    if position < len(call.args):
        return replace(call, args=(*call.args[:position], 0.0, *call.args[position + 1 :]))
    return replace(call, kwargs={key: value for key, value in call.kwargs.items() if key != "dropout"})


def _embedding(builder: Builder, call: Call) -> Value:
    """A look-up whose gradient is dense: sums over ranks and their parts know no sparse tensors."""
    given = call.bound()
    if not given["sparse"]:
        return generic(builder, call)
    _say_dense(builder)
    args = tuple(given[key] for key in ("weight", "indices", "padding_idx", "scale_grad_by_freq"))
    return builder.emit(call, call.target, args)


def _say_dense(builder: Builder) -> None:
    if _DENSE not in builder.notes:
        builder.notes.append(_DENSE)


def _bags(builder: Builder, call: Call) -> Value:
    """Bags of one length are rows of a table of ids, [bags, length]; others keep their offsets."""
    given = call.bound()
    weight, ids, offsets, weights = (given[key] for key in ("weight", "indices", "offsets", "per_sample_weights"))
    mode, padding = given["mode"], given["padding_idx"]
    assert isinstance(weight, Ref) and isinstance(ids, Ref) and isinstance(offsets, Ref) and isinstance(mode, int)
    rows = builder.shape(weight)[0]
    if given["sparse"]:
        _say_dense(builder)
    if call.target == "aten.embedding_bag.padding_idx":
        padding = padding % rows if isinstance(padding, int) else -1  # here from the end; in others negative means none
    literals = (_MODES[mode], -1 if padding is None else padding, given["scale_grad_by_freq"])
    length = _length(builder, offsets, builder.shape(ids)[0], call.spec.shape[0])
    if length:
        bags = (call.spec.shape[0], length)
        own = view_to(builder, call, weights, bags) if isinstance(weights, Ref) else None
        args: tuple[Argument, ...] = (weight, view_to(builder, call, ids, bags), own, *literals)
        made = builder.emit(call, "autopar.embedding_bag", args, call.spec)
    else:
        args = (weight, ids, offsets, weights, *literals, given["include_last_offset"])
        made = builder.emit(call, "autopar.embedding_bag_ragged", args, call.spec)
    return (made, *(None for _ in call.outputs[1:]))


def _length(builder: Builder, offsets: Ref, count: int, bags: int) -> int:
    """The one length of all bags; 0 where offsets are not known or bags differ."""
    known = builder.values.get(offsets)
    if known is None or not bags or count % bags:
        return 0
    length = count // bags
    starts = known.expand(builder.shape(offsets))[:bags]
    return length if torch.equal(starts, torch.arange(bags, dtype=starts.dtype) * length) else 0


LAYERS: dict[str, Handler] = {
    **dict.fromkeys((f"aten.{name}.input" for name in ("lstm", "gru", "rnn_tanh", "rnn_relu")), _recurrent),
    "aten.embedding.default": _embedding,
    "aten.embedding_bag.padding_idx": _bags,
    "aten.embedding_bag.default": _bags,
    "aten._embedding_bag.default": _bags,
}
"""By target as traced."""
