"""The table of rules: those for torch's operators, those that users register, and the strategies that they offer.

A rule is one line of the grammar, or a function where literals of the call matter. An operator that is not in the table and whose dims no
line can describe has no rule: it is reported by name, and nothing is guessed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cache

from autopar.errors import RuleError
from autopar.graph.graph import Argument, Op, Ref, TensorSpec
from autopar.rules import computing_patterns as computing
from autopar.rules import moving_patterns as moving
from autopar.rules import other_kernels
from autopar.rules.grammar import Pattern, enumerate_strategies, parse, pattern_of
from autopar.rules.local_calls import CONVOLUTIONS
from autopar.rules.strategy import Strategy

PatternMaker = Callable[[Op, tuple[TensorSpec, ...]], Pattern]
"""Returns the pattern of a call from the operator and the specs of its operands."""
MoreStrategies = Callable[[Op, tuple[TensorSpec, ...], str, Fraction], Iterator[Strategy]]
"""Yields further strategies of a call from the operator, the specs of its operands, the axis and its size."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """How the calls of one operator are split.

    Attributes:
        line: the rule as a line of the grammar; empty if ``make`` or ``more`` describe the operator.
        make: the function that returns the pattern of a call; None if ``line`` describes it.
        more: the function that yields strategies besides those of the pattern. A rule that has nothing else is for an operator that no
            pattern describes.
        found: whether the rule was found by execution (:mod:`autopar.rules.missing`) rather than declared.
    """

    line: str = ""
    make: PatternMaker | None = None
    more: MoreStrategies | None = None
    found: bool = False


@dataclass(slots=True, kw_only=True)
class RuleTable:
    """Rules by target, and a cache of the strategies that follow from them. :func:`default_table` is the one that is used by default."""

    rules: dict[str, Rule]
    version: int = 0
    """Increases when a rule is added or replaced."""
    _cache: dict[object, tuple[Strategy, ...]] = field(default_factory=dict)

    def register(self, target: str, line: str) -> None:
        """Add or replaces a rule; see :mod:`autopar.rules.grammar`.

        Args:
            target: ``mylib::fused_mlp``, ``mylib::fused_mlp.overload``, or the name that torch prints.
            line: the rule, for example ``"b s k+, f k+ -> b s f"``.

        Raises:
            RuleError: the line is malformed.
        """
        parse(line)
        self.put(full_target(target), Rule(line=line))

    def put(self, target: str, rule: Rule) -> None:
        """Add or replaces a rule, by the target as graphs name it."""
        self.rules[target] = rule
        self.version += 1
        self._cache.clear()

    def pattern(self, op: Op, operands: tuple[TensorSpec, ...]) -> Pattern:
        """Return the labels of one call.

        Raises:
            RuleError: there is no rule, or the call does not fit it.
        """
        rule = self.rules.get(op.target)
        if rule is None:
            raise RuleError(
                f"No sharding rule for operator {op.target}",
                where=op.source or op.module or op.name,
                fix=f'Add one: autopar.register_rule("{op.target}", "b... -> b...")',
            )
        if rule.make is not None:
            return rule.make(op, operands)
        try:
            return pattern_of(rule.line, op, operands)
        except RuleError as error:
            raise error.within(f"{op.name} ({op.target})") from None

    def strategies(
        self, op: Op, operands: tuple[TensorSpec, ...], *, axis: str, size: Fraction, fallback: bool = False
    ) -> tuple[Strategy, ...]:
        """Return all ways to run one operator on one mesh axis.

        Args:
            op: the call. Literals matter; names and layouts do not.
            operands: the specs of ``op.operands``, in order, before the axis is applied. The type of an operand without gradient is never
                I, as R is the same for it.
            axis: a mesh axis, or ``batch``.
            size: the number that the axis divides a dim by. Only dims that it divides are split.
            fallback: whether an operator without a rule has the strategies ``invariant`` and ``replicate``; otherwise it raises an error.
                The caller then records the operator by name.

        Raises:
            RuleError: there is no rule, or the call does not fit it.
        """
        key = (
            op.target,
            without_refs(op.args),
            op.kwargs and without_refs(op.kwargs),
            operands,
            op.outputs,
            axis,
            size.numerator,
            size.denominator,
        )
        cached = self._cache.get(key)
        if cached is None:
            rule = self.rules.get(op.target)
            if rule is None and fallback:
                return tuple(enumerate_strategies(moving.unsplit(op, operands), operands, op.outputs, size))
            offered: list[Strategy] = []
            if rule is None or rule.line or rule.make is not None:
                offered += enumerate_strategies(self.pattern(op, operands), operands, op.outputs, size)
            if rule is not None and rule.more is not None:
                offered += rule.more(op, operands, axis, size)
            cached = self._cache[key] = tuple(offered)
        return cached


def full_target(target: str) -> str:
    """Return a target as graphs name it.

    >>> full_target("mylib::fused_mlp")
    'mylib.fused_mlp.default'
    """
    name = target.replace("::", ".")
    return name if name.count(".") > 1 or "::" not in target else f"{name}.default"


_ANY_REF = Ref("")


def without_refs(value: tuple[Argument, ...] | tuple[tuple[str, Argument], ...]) -> tuple[object, ...]:
    """Return arguments with one mark in place of every tensor, so that calls that differ in operands only become equal."""
    return tuple(
        [_ANY_REF if type(item) is Ref else without_refs(item) if type(item) is tuple else item for item in value]
    )


_UNARY = (
    "abs acos acosh asin asinh atan atanh bitwise_not ceil cos cosh digamma erf erfc erfinv exp exp2 expm1 floor frac"
    " gelu hardsigmoid hardswish isfinite isinf isnan lgamma log log10 log1p log2 log_sigmoid logical_not logit mish"
    " reciprocal relu relu6 round rsqrt selu sgn sigmoid sign silu sin sinh softplus sqrt square tan tanh trunc"
    " threshold hardtanh leaky_relu elu clamp clamp_min clamp_max celu nan_to_num isposinf isneginf"
    " ones_like zeros_like full_like empty_like "
    " pow.Tensor_Scalar pow.Scalar add.Scalar sub.Scalar rsub.Scalar remainder.Scalar fmod.Scalar floor_divide.Scalar"
    " eq.Scalar ne.Scalar lt.Scalar le.Scalar gt.Scalar ge.Scalar bitwise_and.Scalar bitwise_or.Scalar"
    " bitwise_xor.Scalar __and__.Scalar __or__.Scalar __xor__.Scalar __lshift__.Scalar __rshift__.Scalar"
    " bitwise_left_shift.Tensor_Scalar bitwise_right_shift.Tensor_Scalar"
)
_RANDOM = (
    "bernoulli bernoulli.p rand_like randn_like randint_like randint_like.low_dtype exponential uniform"
    " normal_functional normal.Tensor_float normal.float_Tensor cauchy log_normal geometric random random.to"
    " poisson _standard_gamma rrelu"
)
_LINEAR_UNARY = "neg clone detach positive mul.Scalar div.Scalar real"
_BINARY = (
    "pow.Tensor_Tensor atan2 maximum minimum max.other min.other remainder.Tensor fmod.Tensor floor_divide bitwise_and.Tensor"
    " bitwise_or.Tensor bitwise_xor.Tensor __xor__.Tensor logical_and logical_or"
    " logical_xor eq.Tensor ne.Tensor lt.Tensor le.Tensor gt.Tensor ge.Tensor div.Tensor_mode hypot logaddexp"
    " clamp_min.Tensor clamp_max.Tensor isclose xlogy.Tensor bitwise_left_shift.Tensor"
)


def _full(name: str) -> str:
    """Return the target of an operator of torch; its overload is ``default`` if the name has none."""
    return f"aten.{name}" if "." in name else f"aten.{name}.default"


def _lines() -> dict[str, str]:
    """Return the rules that one line describes, by target."""
    lines = {_full(name): "x... -> x..." for name in _UNARY.split()}
    lines |= {_full(name): "x... -> x...; random" for name in _RANDOM.split()}
    lines |= {_full(name): "x... -> x...; linear 0" for name in _LINEAR_UNARY.split()}
    lines |= {_full(name): "x..., x... -> x..." for name in _BINARY.split()}
    lines |= {
        "aten.add.Tensor": "x..., x... -> x...; linear 0+1",
        "aten.sub.Tensor": "x..., x... -> x...; linear 0+1",
        "aten.rsub.Tensor": "x..., x... -> x...; linear 0+1",
        "aten.mul.Tensor": "x..., x... -> x...; linear 0, 1",
        "aten.div.Tensor": "x..., x... -> x...; linear 0",
        "aten.where.self": "x..., x..., x... -> x...; linear 1+2",
        "aten.where.Scalar": "x... -> x...",
        "aten.masked_fill.Tensor": "x..., x..., x... -> x...; linear 0+2",
        "aten.addcmul.default": "x..., x..., x... -> x...; linear 0+1, 0+2",
        "aten.addcdiv.default": "x..., x..., x... -> x...; linear 0+1",
        "aten.lerp.Scalar": "x..., x... -> x...; linear 0+1",
        "aten.lerp.Tensor": "x..., x..., x... -> x...; linear 0+1",
        "aten.clamp.Tensor": "x..., x..., x... -> x...",
        "aten.fill.Tensor": "x..., x... -> x...; linear 1",
        "aten.fill.Scalar": "x... -> x...",
        "aten.multinomial.default": "b... k^ -> b... n^; random",
        "autopar.dropout": "x... -> x...; linear 0; random",
        "aten.linear.default": "b... k+, n k+, n -> b... n; linear 0+2?, 1+2?",
        "autopar.linear_t": "b... k+, k+ n, n -> b... n; linear 0+2?, 1+2?",
        "aten.mm.default": "n k+, k+ m -> n m; linear 0, 1",
        "aten.bmm.default": "b n k+, b k+ m -> b n m; linear 0, 1",
        "aten.addmm.default": "~n m, n k+, k+ m -> n m; linear 0+1, 0+2",
        "aten.baddbmm.default": "~b n m, b n k+, b k+ m -> b n m; linear 0+1, 0+2",
        "aten.outer.default": "n, m -> n m; linear 0, 1",
        "autopar.embedding_vocabulary": "v^ n, b... -> b... n; linear 0",
        "autopar.embedding_bag_vocabulary": "v^ n, b k^, b k^ -> b n; linear 0",
        "aten.view_as_complex.default": "b... t^ -> b...; linear 0",
        "aten.view_as_real.default": "b... -> b... t^; linear 0",
        "aten.linalg_cholesky.default": "b... n^ m^ -> b... n^ m^",
        "aten.cholesky_inverse.default": "b... n^ m^ -> b... n^ m^",
        "aten.cholesky_solve.default": "b... n^ k, b... n^ m^ -> b... n^ k; linear 0",
        "aten.logdet.default": "b... n^ m^ -> b...",
        "aten.im2col.default": "b c^ h^ w^ -> b k^ l^; linear 0",
        "aten.col2im.default": "b k^ l^ -> b c^ h^ w^; linear 0",
        "autopar.cross_entropy_sum": "b...+ c^, b...+ -> ",
        "autopar.cross_entropy_vocabulary": "b...+ c^, b...+ -> ",
        "autopar.masked_scatter_by_sample": "b n...^, b n...^, b m...^ -> b n...; linear 0+2",
        "autopar.ctc_losses": "t^ b c^, b s^, b, b -> b",
    }
    return lines


_OPERATORS_OF: dict[PatternMaker, str] = {
    moving.view: "view unsqueeze",
    moving.permute: "transpose.int permute",
    moving.expand: "expand",
    moving.repeat: "repeat",
    moving.one_hot: "one_hot",
    moving.repeat_interleave: "repeat_interleave.self_int",
    moving.take: "slice.Tensor select.int",
    moving.cat: "cat",
    moving.stack: "stack",
    moving.pad: "pad constant_pad_nd",
    moving.paste: "slice_scatter select_scatter",
    moving.triangle: "tril triu",
    moving.spectra: "stft istft",
    moving.index: "index.Tensor",
    moving.index_put: "index_put",
    moving.index_select: "index_select",
    moving.gather: "gather",
    moving.scatter: "scatter.src scatter.value scatter_add scatter_reduce.two",
    moving.scatter_sum: "autopar.scatter_sum",
    moving.change_over_data: "autopar.change_over_data",
    moving.factory: "full zeros ones empty.memory_format new_zeros new_ones new_full new_empty scalar_tensor",
    moving.random_factory: "rand randn randint randint.low normal.float_float",
    moving.random_order: "randperm",
    moving.recurrent: "lstm.input gru.input rnn_tanh.input rnn_relu.input",
    moving.whole_factory: "arange arange.start arange.start_step eye eye.m linspace",
    computing.cast_dtype: "to.dtype",
    computing.fill: "masked_fill.Scalar where.ScalarOther where.ScalarSelf",
    computing.matmul: "matmul mv dot",
    computing.einsum: "einsum",
    computing.attention: "scaled_dot_product_attention autopar.attention autopar.attention_gathered autopar.attention_ring",
    computing.histogram: "histc",
    computing.embedding: "embedding",
    computing.embedding_bag: "autopar.embedding_bag",
    computing.embedding_bag_ragged: "autopar.embedding_bag_ragged",
    computing.layer_norm: "layer_norm rms_norm",
    computing.reduction: "sum sum.dim_IntList mean mean.dim autopar.partial_mean count_nonzero count_nonzero.dim_IntList"
    " amax amin max min max.dim min.dim argmax argmin any any.dim any.dims all all.dim all.dims prod prod.dim_int logsumexp"
    " var.correction var.dim std.correction std.dim var_mean.correction median norm.ScalarOpt_dim linalg_vector_norm",
    other_kernels.experts_pattern: "autopar.experts autopar.experts_dispatch",
    other_kernels.channel_norm: "group_norm instance_norm batch_norm autopar.batch_norm autopar.batch_norm_running",
    moving.same_dims: "pixel_shuffle pixel_unshuffle autopar.total",
    computing.cross_entropy: "cross_entropy_loss",
}
"""The operators whose calls each function reads: names of torch's operators without ``aten.``, those of autopar in full.

Operators that tracing replaces by others, such as ``reshape``, ``squeeze``, ``split`` and ``chunk``, are in no graph and have no rules.
"""


def _functions() -> dict[str, PatternMaker]:
    """Return the functions for operators whose pattern depends on literals of the call, by target."""
    makers = {
        name if name.startswith("autopar.") else _full(name): make
        for make, names in _OPERATORS_OF.items()
        for name in names.split()
    }
    makers |= dict.fromkeys(moving.WHOLE_DIM_TARGETS, moving.whole_dim)
    makers |= dict.fromkeys(CONVOLUTIONS, computing.convolution)
    makers |= dict.fromkeys(computing.LOSS_TARGETS, computing.loss)
    makers |= dict.fromkeys(other_kernels.WINDOW_TARGETS, other_kernels.window)
    return makers


_FURTHER_STRATEGIES: dict[str, MoreStrategies] = {
    **dict.fromkeys(CONVOLUTIONS, other_kernels.convolution_groups),
    "aten.embedding.default": other_kernels.embedding_vocabulary,
    "autopar.embedding_bag": other_kernels.bag_vocabulary,
    "autopar.cross_entropy_sum": other_kernels.cross_entropy_vocabulary,
    "autopar.experts": other_kernels.experts,
    "autopar.experts_dispatch": other_kernels.experts,
    "aten.mean.default": other_kernels.partial_mean,
    "aten.mean.dim": other_kernels.partial_mean,
    "autopar.batch_norm": other_kernels.batch_statistics,
    "autopar.batch_norm_running": other_kernels.batch_statistics,
    "autopar.total": other_kernels.total_statistics,
    "aten.scaled_dot_product_attention.default": other_kernels.attention_sequence,
    "autopar.attention": other_kernels.attention_sequence,
}
"""The functions that yield strategies besides those of the pattern, by target."""


def torch_rules() -> dict[str, Rule]:
    """Return a new copy of the rules for the operators of torch and autopar."""
    rules = {target: Rule(line=line, more=_FURTHER_STRATEGIES.get(target)) for target, line in _lines().items()}
    rules |= {target: Rule(make=make, more=_FURTHER_STRATEGIES.get(target)) for target, make in _functions().items()}
    return rules | {"autopar.opaque": Rule(more=other_kernels.opaque)}


@cache
def default_table() -> RuleTable:
    """Return the table that is used by default, and that :func:`register_rule` extends."""
    return RuleTable(rules=torch_rules())


def has_rule(target: str, *, table: RuleTable | None = None) -> bool:
    """Return whether the table has a declared rule for a target; a rule that was found by execution is not declared."""
    rule = (default_table() if table is None else table).rules.get(target)
    return rule is not None and not rule.found


def register_rule(
    target: str,
    line: str,
    *,
    example: Sequence[object] | None = None,
    check: bool = True,
    table: RuleTable | None = None,
) -> None:
    """Add a rule for an operator in one line: ``register_rule("mylib::fused_mlp", "b s k+, f k+ -> b s f")``.

    The rule is checked by execution before it is added: every strategy runs forward and backward on two and on four ranks and is
    compared with one device. See :mod:`autopar.rules.grammar` for the language.

    Args:
        target: ``mylib::fused_mlp`` or ``mylib::fused_mlp.overload``.
        line: the rule.
        example: the arguments of one call for the check: tensors (float64 if they are floats) and others. None makes them from the line,
            one tensor for each operand and a different length for every dim.
        check: False accepts the rule without a check, for an operator that cannot run here in float64.
        table: the table; None for the default one.

    Raises:
        RuleError: the line is malformed, the operator does not run on the example, or a strategy gives another result than one device;
            the error names the strategies.
    """
    from autopar.rules.by_execution import check_rule

    if check:
        check_rule(target, line, example)
    (default_table() if table is None else table).register(target, line)
