"""Applies the typings of a plan to a traced graph: the plan names a strategy for each operator, which is looked up in the rules."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction

from autopar.errors import PlanError
from autopar.graph.graph import Graph, Op
from autopar.graph.rewrites import pad
from autopar.plan.mesh import Mesh, Type
from autopar.plan.plan import AxisTyping, Plan
from autopar.rules import local_calls
from autopar.rules import table as rules
from autopar.rules.apply import BATCH, crosses_samples, shard
from autopar.rules.missing import complete
from autopar.rules.strategy import Strategy, Typing

_AGAIN = "Search again with this model and this version of autopar"

SHARDED_AXES = ("cp", "tp")
"""Axes that the operators of the program carry out, in the order in which their typings are applied."""


def local_graph(plan: Plan, graph: Graph, data_rank: int = 0) -> Graph:
    """Return the graph of one rank for one micro-batch: the traced ``graph`` with every typing of the plan applied.

    Args:
        data_rank: the data rank whose micro-batch is taken; it matters if their sizes differ (``Plan.data_shares``).

    Raises:
        PlanError: the plan is for another graph, or names a strategy that no rule offers.
        RuleError: a typing does not hold.
    """
    return local_graph_and_typings(plan, graph, data_rank)[0]


def local_graph_and_typings(plan: Plan, graph: Graph, data_rank: int = 0) -> tuple[Graph, tuple[Typing, ...]]:
    """Return the result of :func:`local_graph`, and the typings in the order in which they are applied: ``batch``, then sharded axes."""
    if plan.model.fingerprint != graph.fingerprint:
        raise PlanError(
            f"This plan was made for model '{plan.model.name}' ({plan.model.fingerprint}), "
            f"not for '{graph.name}' ({graph.fingerprint})",
            fix="Search a plan for this model",
        )
    _check_number("blocks of the plan", len(graph.blocks), len(plan.blocks))
    complete(graph)  # the plan may name strategies of rules that were derived when it was searched
    size = plan.micro_batch_of(data_rank)
    typings = [batch_typing(plan, graph, size)]
    result = shard(graph, typings[0], global_batch_size=plan.global_batch_size, micro_batch_size=size)
    crossing = crosses_samples(result)
    if crossing and plan.num_micro_batches > 1:
        raise _one_micro_batch(plan, crossing[0])
    if crossing and plan.data_shares:
        raise _equal_shares(plan, _place(crossing[0]))
    if plan.mesh.ep_data > 1:
        result = local_calls.spread(result, plan.mesh.ep_data, _spread_mixtures(plan, graph))
    result = _pad(plan, result)
    for axis in SHARDED_AXES:
        if getattr(plan.mesh, axis) > 1:
            typings.append(_blocks_typing(plan, result, axis, Fraction(getattr(plan.mesh, axis))))
            result = shard(result, typings[-1])
    return result, tuple(typings)


def _check_number(what: str, expected: int, got: int, place: str = "") -> None:
    """Check that the plan has as many entries as the graph needs.

    Raises:
        PlanError: the numbers differ.
    """
    if got != expected:
        raise PlanError.mismatch(f"The number of {what}", where=place, expected=expected, got=got, fix=_AGAIN)


def whole_graph(plan: Plan, graph: Graph) -> Graph:
    """Return the traced ``graph`` for the plan's global batch on one device: the same operators, with other shapes."""
    single_device = replace(plan, mesh=Mesh(), micro_batch_size=plan.global_batch_size, data_shares=())
    typing = batch_typing(single_device, graph)
    as_traced = {name: replace(strategy, target="") for name, strategy in typing.strategies.items()}
    size = plan.global_batch_size
    as_traced_typing = replace(typing, strategies=as_traced)
    return shard(graph, as_traced_typing, global_batch_size=size, micro_batch_size=size, whole=True)


def _spread_mixtures(plan: Plan, graph: Graph) -> frozenset[str]:
    """Return the names of the mixtures of the traced ``graph`` whose experts the plan splits over ``ep_data``."""
    mixtures: list[str] = []
    for block, planned in zip(graph.blocks, plan.blocks, strict=True):
        place = f"block {block.index} ({block.label})"
        typing = _chosen(plan, planned.layout, local_calls.SPREAD, place)
        names, ops = typing.strategies if typing is not None else (), graph.block_ops(block)
        _check_number(f"strategies on axis {local_calls.SPREAD}", len(ops), len(names), place)
        for op, name in zip(ops, names, strict=True):
            if name == local_calls.DISPATCH and op.target == local_calls.EXPERTS:
                mixtures.append(op.name)
            elif name != local_calls.SAMPLES:
                raise _unknown_strategy(op, name, local_calls.SPREAD, place, local_calls.SAMPLES)
    return frozenset(mixtures)


def _pad(plan: Plan, graph: Graph) -> Graph:
    """Return the graph with the vocabularies padded as the plan says.

    Raises:
        PlanError: the model does not have such a vocabulary.
    """
    try:
        return pad(graph, {entry.parameter: entry.length for entry in plan.padding})
    except ValueError as error:
        raise PlanError("The plan pads a vocabulary that the model does not have", got=error, fix=_AGAIN) from error


def batch_typing(plan: Plan, graph: Graph, micro_batch_size: int | None = None) -> Typing:
    """Return the typing on axis ``batch``, which cuts a micro-batch out of the traced batch. Inputs are split by samples.

    Args:
        micro_batch_size: samples of the micro-batch, by default those of the plan.

    Raises:
        PlanError: the plan does not fit the graph, or samples depend on each other in a way that its micro-batches or shares do not allow.
    """
    size = Fraction(graph.batch_size, micro_batch_size or plan.micro_batch_size)
    _check_number("strategies of the prelude", len(graph.prelude), len(plan.prelude))
    prelude = _strategies(graph, graph.prelude, plan.prelude, BATCH, size, "prelude")
    typing = _blocks_typing(plan, graph, BATCH, size)
    typing = replace(typing, strategies={**prelude, **typing.strategies})
    if graph.exact and plan.global_batch_size != graph.batch_size:
        raise PlanError(
            f"The model was traced for a global batch of {graph.batch_size} and holds for no other, "
            f"but the plan has {plan.global_batch_size}",
            where=graph.mixing or graph.name,
            fix="Trace the model at the plan's global batch",
        )
    if graph.mixing and plan.num_micro_batches > 1:
        raise PlanError(
            f"Samples of the batch depend on each other, so a data rank cannot cut them into {plan.num_micro_batches} micro-batches",
            where=graph.mixing,
            fix="Pin num_micro_batches=1",
        )
    every = (*graph.prelude, *graph.ops)
    mixing = next((op for op in every if typing.strategies[op.name].name.startswith("statistics")), None)
    if mixing is not None and plan.num_micro_batches > 1:
        raise _one_micro_batch(plan, mixing)
    if plan.data_shares and (graph.mixing or mixing is not None):
        raise _equal_shares(plan, _place(mixing) if mixing is not None else graph.mixing)
    return typing


def _equal_shares(plan: Plan, place: str) -> PlanError:
    """Return the error for unequal data shares although samples depend on each other in ``place``."""
    return PlanError(
        "Samples of the batch depend on each other, so data ranks cannot take the unequal shares "
        f"{'-'.join(map(str, plan.data_shares))}",
        where=place,
        fix="Pin data_shares=equal",
    )


def _place(op: Op) -> str:
    """Return an operator with its target and module, for errors."""
    return f"{op.name} ({op.target}), {op.module}"


def _one_micro_batch(plan: Plan, op: Op) -> PlanError:
    """Return the error for several micro-batches although ``op`` takes statistics over the batch."""
    is_norm = op.target in ("autopar.batch_norm", "autopar.batch_norm_running")
    return PlanError(
        f"Statistics over the batch cannot be taken in {plan.num_micro_batches} micro-batches",
        where=_place(op),
        fix="Pin num_micro_batches=1" + (", or use a norm that looks at one sample (group norm)" if is_norm else ""),
    )


def check_batch_typing(plan: Plan, graph: Graph) -> None:
    """Check that the plan's typing of axis ``batch`` holds for the graph: samples are independent wherever it says so.

    Raises:
        PlanError: the plan has no typing for the graph.
        RuleError: the typing does not hold.
    """
    size = plan.micro_batch_of(0)
    typing = batch_typing(plan, graph, size)
    shard(graph, typing, global_batch_size=plan.global_batch_size, micro_batch_size=size)


def _blocks_typing(plan: Plan, graph: Graph, axis: str, size: Fraction) -> Typing:
    """Return the typing of all blocks on one axis, which divides dims by ``size``.

    Raises:
        PlanError: the layout of a block is missing or does not fit its operators, or a parameter has two types.
    """
    strategies: dict[str, Strategy] = {}
    parameters: dict[str, Type] = {}
    for block, planned in zip(graph.blocks, plan.blocks, strict=True):
        place = f"block {block.index} ({block.label})"
        chosen = _chosen(plan, planned.layout, axis, place)
        if chosen is None:
            raise PlanError.missing(f"types and strategies of the block on axis {axis}", where=place, fix=_AGAIN)
        strategies |= _strategies(graph, graph.block_ops(block), chosen.strategies, axis, size, place)
        owned = graph.block_parameters(block)
        _check_number("types of the block's parameters", len(owned), len(chosen.parameters), place)
        for parameter, kind in zip(owned, chosen.parameters, strict=True):
            if parameters.setdefault(parameter.name, kind) != kind:
                raise PlanError(
                    f"The plan gives a parameter two types on axis {axis}: {parameters[parameter.name]} and {kind}",
                    where=f"{place}: {parameter.fqn}",
                    fix=_AGAIN,
                )
    return Typing(axis=axis, size=size, strategies=strategies, parameters=parameters)


def _chosen(plan: Plan, layout: int, axis: str, place: str) -> AxisTyping | None:
    """Return the typing of a layout on one axis; None if the layout has none.

    Raises:
        PlanError: the plan has no such layout.
    """
    if not 0 <= layout < len(plan.layouts):
        raise PlanError(f"The plan has no layout {layout}", where=place, fix=_AGAIN)
    return next((t for t in plan.layouts[layout].typings if t.axis == axis), None)


def _strategies(
    graph: Graph, ops: Sequence[Op], names: Sequence[str], axis: str, size: Fraction, place: str
) -> dict[str, Strategy]:
    """Return the strategies on one axis by the names of their operators.

    Args:
        names: the names of the strategies in the plan, one for each of ``ops``.

    Raises:
        PlanError: there are too many or too few names, or an operator has no strategy of its name.
    """
    _check_number("strategies", len(ops), len(names), place)
    strategies = {}
    for op, name in zip(ops, names, strict=True):
        specs = tuple(graph.spec(ref) for ref in op.operands)
        offered = rules.default_table().strategies(op, specs, axis=axis, size=size, fallback=True)
        strategy = next((strategy for strategy in offered if strategy.name == name), None)
        if strategy is None:
            raise _unknown_strategy(op, name, axis, place, f"one of {', '.join(s.name for s in offered) or 'none'}")
        strategies[op.name] = strategy
    return strategies


def _unknown_strategy(op: Op, name: str, axis: str, place: str, expected: str) -> PlanError:
    """Return the error for a name in the plan that is no strategy of an operator."""
    return PlanError(
        f"{op.target} has no strategy '{name}' on axis {axis}",
        where=f"{place}: {op.name}",
        expected=expected,
        fix=_AGAIN,
    )
