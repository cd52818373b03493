import pickle
from dataclasses import FrozenInstanceError, dataclass, field, replace

import pytest
import torch

from autopar.frozen import quickly, replaced
from autopar.graph.ir import Op, Ref, TensorSpec
from autopar.layout import I, P, R, S, Type


@quickly
@dataclass(frozen=True, slots=True, kw_only=True)
class Made:
    a: int
    b: str = "b"
    c: int = field(default=-1, init=False)

    def __post_init__(self) -> None:
        if self.a < 0:
            raise ValueError(self.a)


def test_it_is_made_as_a_dataclass_is() -> None:
    made = Made(a=1)
    assert (made.a, made.b, made.c) == (1, "b", -1)
    assert made == Made(a=1, b="b") != Made(a=2)
    assert hash(made) == hash(replace(made, a=1)) and repr(made) == "Made(a=1, b='b', c=-1)"
    assert replace(made, b="d").b == "d" and pickle.loads(pickle.dumps(made)) == made
    with pytest.raises(FrozenInstanceError):
        made.a = 2  # type: ignore[misc]
    for wrong in ({}, {"a": 1, "c": 2}, {"a": 1, "d": 2}):
        with pytest.raises(TypeError):
            Made(**wrong)  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        Made(1)  # type: ignore[misc]
    with pytest.raises(ValueError, match="-1"):
        Made(a=-1)


def test_a_changed_copy_is_that_of_a_dataclass() -> None:
    made = Made(a=1, b="d")
    assert replaced(made, a=2) == replace(made, a=2) == Made(a=2, b="d") and replaced(made) == made
    assert replaced(made, b=None).b is None and replaced(made, a=2).c == -1
    for wrong in ({"c": 2}, {"d": 2}):
        with pytest.raises(TypeError):
            replaced(made, **wrong)
    with pytest.raises(ValueError, match="-1"):
        replaced(made, a=-1)


def test_what_it_cannot_make_is_refused() -> None:
    @dataclass
    class Open:
        a: int

    @dataclass(frozen=True, slots=True, kw_only=True)
    class Listed:
        a: list[int] = field(default_factory=list)

    for cls in (Open, Listed):
        with pytest.raises(TypeError):
            quickly(cls)


def test_specs_are_equal_by_all_that_they_say() -> None:
    spec = TensorSpec(shape=(2, 3), dtype=torch.float32)
    others = [
        TensorSpec(shape=(3, 2), dtype=torch.float32), TensorSpec(shape=(2, 3), dtype=torch.float16),
        TensorSpec(shape=(2, 3), dtype=torch.float32, requires_grad=True),
    ]  # fmt: skip
    same = TensorSpec(shape=(2, 3), dtype=torch.float32)
    assert spec == same and hash(spec) == hash(same) and spec != (2, 3)
    assert len({spec, same, *others}) == 4 and spec not in others


def test_references_and_types_are_equal_by_what_they_say() -> None:
    assert Ref("a") == Ref("a", 0) != Ref("a", 1) and Ref("a") != "a" and hash(Ref("a")) == hash(Ref("a"))
    assert len({Ref("a"), Ref("a", 1), Ref("b"), Ref("a")}) == 3
    assert Type("S", 1) == S(1) and S(1) is S(1) and hash(Type("S", 1)) == hash(S(1))
    assert len({I, R, P, S(0), S(1), Type("I")}) == 5 and S(0) != S(1) and I != R and I != "I"
    assert sorted([S(1), R, I, S(0), P]) == [I, P, R, S(0), S(1)]


def test_operators_remember_their_operands_and_no_more() -> None:
    spec = TensorSpec(shape=(2,), dtype=torch.float32)
    op = Op(name="a", target="t", args=(Ref("x"), (Ref("y"),)), outputs=(spec,))
    assert op.operands == (Ref("x"), Ref("y")) and op == replace(op) and replace(op, name="b").operands == op.operands
