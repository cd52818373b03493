import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from autopar.runtime.same_values import checksums

DTYPES = (torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.bool, torch.complex64, torch.uint8)


def number(value: Tensor) -> int:
    return int(checksums([value]))


def random(dtype: torch.dtype, length: int) -> Tensor:
    generator = torch.Generator().manual_seed(length)
    wide = torch.randn(length, generator=generator, dtype=torch.float64)
    return wide > 0 if dtype == torch.bool else (wide * 50).to(dtype) if dtype != torch.complex64 else wide.to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("length", [0, 1, 3, 4097, 2**19 + 7, 2**20])
def test_the_same_bits_have_one_number_wherever_they_lie(dtype: torch.dtype, length: int) -> None:
    value = random(dtype, length)
    moved = torch.cat([value.new_zeros(1), value])[1:]  # at an odd place of its storage
    strided = torch.stack([value, value], 1)[:, 0]
    others = [random(torch.float32, 7), moved, strided]
    assert number(value) == number(moved) == number(strided)
    assert checksums(others).tolist()[1:] == [number(value)] * 2


@given(
    dtype=st.sampled_from(DTYPES), rows=st.integers(1, 9), columns=st.integers(1, 3000),
    places=st.tuples(st.integers(0, 2**30), st.integers(0, 2**30)),
)  # fmt: skip
def test_what_is_changed_has_another(dtype: torch.dtype, rows: int, columns: int, places: tuple[int, int]) -> None:
    value = random(dtype, rows * columns)
    before = number(value)
    one, other = (place % len(value) for place in places)
    changed = value.clone()
    changed[one] = ~changed[one] if dtype == torch.bool else changed[one] + 1
    assert number(changed) != before
    swapped = value.clone()
    swapped[[one, other]] = value[[other, one]]
    assert (number(swapped) == before) == torch.equal(swapped, value)
    turned = value.view(rows, columns).flip(0).reshape(-1)
    assert (number(turned) == before) == torch.equal(turned, value)


def test_numbers_differ_by_signs_zeros_imaginary_parts_and_the_order_of_chunks() -> None:
    value = random(torch.float32, 5000)
    assert len({number(value), number(-value), number(value.sort().values), number(value * 0), number(-value * 0)}) == 5
    # imaginary parts, which torch leaves out of a cast with a warning
    turns = torch.polar(torch.ones(4), torch.arange(4.0))
    assert number(turns) != number(turns.conj()) == number(turns.conj().resolve_conj())
    chunks = random(torch.float32, 2**20)
    assert number(chunks.roll(2**19)) != number(chunks)


def test_numbers_do_not_depend_on_what_stands_beside() -> None:
    values = [random(dtype, length) for length in (0, 5, 10_007, 0, 4096, 1) for dtype in DTYPES]
    assert checksums(values).tolist() == [number(value) for value in values]
