"""What autograd keeps moves to the host and back: once a storage, parameters aside, and gone when backward is done."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from autopar.runtime.step.kept_for_backward import Mover
from tests.support.close import assert_close


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        y = self.up(x).sin()
        return x + self.down((y * y.transpose(0, 1).transpose(0, 1)).cos()) * scale


def gradients(device: str, width: int, rows: int, *, moves: bool) -> tuple[list[Tensor], Mover, int]:
    """Of four blocks; the bytes that the device holds at the end of the forward of all of them."""
    torch.manual_seed(0)
    blocks = [Block(width).to(device) for _ in range(4)]
    mover, scale = Mover(), torch.full((width,), 0.5, device=device)
    held = 0
    for seed in range(2):
        x = torch.randn(rows, width, generator=torch.Generator().manual_seed(seed)).to(device)
        mover.begin([x, scale])
        for block in blocks:
            if moves:
                with mover.block(block.parameters()):
                    x = block(x, scale)
            else:
                x = block(x, scale)
        held = torch.cuda.memory_allocated() if device == "cuda" else 0
        (x * x).sum().backward()
    return [p.grad for block in blocks for p in block.parameters() if p.grad is not None], mover, held


def test_gradients_are_the_same_and_each_storage_moves_once() -> None:
    plain, _, _ = gradients("cpu", 8, 16, moves=False)
    found, mover, _ = gradients("cpu", 8, 16, moves=True)
    assert all(torch.equal(a, b) for a, b in zip(plain, found, strict=True))
    row = 16 * 8 * 4
    # outputs of the first linear, of sine, product and cosine; of all blocks but the first what enters: that stays for others
    assert mover.down_bytes == mover.up_bytes == 2 * (4 * 4 * 4 * row + 3 * row)


@pytest.fixture
def few_objects() -> Iterator[None]:
    """Collections look at what the test makes alone."""
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.mark.usefixtures("few_objects")
def test_nothing_outlives_the_graph_that_kept_it() -> None:
    torch.manual_seed(0)
    block, mover = Block(8), Mover()
    x = torch.randn(4, 8)
    mover.begin([x])
    with mover.block(block.parameters()):
        y = block(x, torch.ones(8))
    assert mover._under_way is not None
    saved = mover._under_way()
    assert saved is not None
    assert saved._here == []  # on the host alone
    kept = weakref.ref(saved)
    del saved
    gc.collect()
    assert kept() is not None
    y.sum().backward()
    del y
    gc.collect()
    assert kept() is None


@pytest.mark.gpu
def test_a_gpu_holds_less_and_computes_the_same() -> None:
    plain, _, full = gradients("cuda", 1024, 4096, moves=False)
    found, mover, held = gradients("cuda", 1024, 4096, moves=True)
    assert_close(found, plain, 1e-4)
    assert mover.down_bytes > 0
    assert held < 0.6 * full
