import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autopar.errors import TraceError
from autopar.tracing.trace import trace
from tests.support.distributed.oddities import Remembering
from tests.support.said import refuses
from tests.support.small_models import model_of, same_as_the_model

Write = Callable[[nn.Module, Tensor], Tensor]


def writing(write: Write) -> nn.Module:
    """A linear, then whatever ``write`` does with the module and the activation."""

    def forward(self: Any, x: Tensor) -> Tensor:
        return (write(self, self.linear(x)) ** 2).mean()

    return model_of(forward, linear=nn.Linear(4, 6), kept=nn.Buffer(torch.linspace(1.0, 2.0, 6)))


@pytest.mark.parametrize("statistics", [True, False])
def test_statistics_averages_power_iterations_and_counters(statistics: bool) -> None:
    same_as_the_model(Remembering(statistics).double(), {"x": torch.randn(6, 8, dtype=torch.float64)}, steps=3)


def _written_through_a_view(module: nn.Module, y: Tensor) -> Tensor:
    y = y * 1.0
    y[:, 1:3].mul_(3.0)
    y.view(-1, 2, 3)[:, 0].copy_(y[:, 3:] * 2)
    y[:, torch.tensor([0, 5])] = 0.25
    return y


def _complex_parts(module: nn.Module, y: Tensor) -> Tensor:
    spectrum = torch.fft.rfft(y)
    kept = torch.zeros_like(spectrum)
    kept[:, 1:3] = spectrum[:, 1:3] * (0.5 + 2j)
    kept[:, 3] = spectrum[:, 0].conj()
    kept[::2, 0] += 1j
    return torch.fft.irfft(kept, n=y.shape[-1])


def _shifted(module: nn.Module, y: Tensor) -> Tensor:
    shifted = y.new_zeros(y.shape)
    shifted[:, 1:] = y[:, :-1] * 2
    shifted[:, 0] = 0.5
    return shifted.masked_fill_(shifted > 1.0, 0.25)


def _returned_by_the_write(module: nn.Module, y: Tensor) -> Tensor:
    made = y * 2.0
    part = made[:, 1].mul_(3.0)
    made[:, 1:].add_(1.0)
    return made * part.sum()


def _read_before_and_after(module: nn.Module, y: Tensor) -> Tensor:
    made = y * 2.0
    before = made + 1.0
    made.add_(before).div_(torch.tensor(4.0))
    return torch.cat([made, before, made.detach()])


def _one_of_two_results(module: nn.Module, y: Tensor) -> Tensor:
    weights, _ = torch.topk(torch.sigmoid(y), 3)
    weights /= weights.sum(dim=-1, keepdim=True)
    return weights


def _of_shared_memory(module: nn.Module, y: Tensor) -> Tensor:
    made = y * 2.0
    same, _ = torch.broadcast_tensors(made, made[:1])
    same.add_(1.0)
    kept = nn.functional.dropout(made, 0.0)
    kept.mul_(3.0)
    other = nn.functional.dropout(y, training=False)
    other.add_(1.0)
    return made * same + y


def _of_parts(module: nn.Module, y: Tensor) -> Tensor:
    made = y.detach() * 2.0
    left, right = made.split(3, dim=1)
    left.add_(1.0)
    right.mul_(left)
    start, _ = module.kept.split(3)
    start.mul_(1.5)
    return y * made * left.sum() + module.kept


def _of_a_view_made_without_gradient(module: nn.Module, y: Tensor) -> Tensor:
    made = y.detach() * 2.0
    with torch.no_grad():
        view = made.view(-1)
    view.add_(1.0)
    return y * made


def _of_another_dtype(module: nn.Module, y: Tensor) -> Tensor:
    flags = y.detach() * 1.0
    return y * (flags.gt_(0.1) + 0.5)


def _of_shared_memory_without_gradient(module: nn.Module, y: Tensor) -> Tensor:
    with torch.no_grad():
        made = torch.ones_like(y)
        kept = nn.functional.dropout(made, 0.0)
        kept.add_(1.0)
        scale = made * 2.0
    return y * scale


def _itself_through_a_dropout_of_nothing(module: nn.Module, y: Tensor) -> Tensor:
    """Gradients flow through what a region returns of its inputs."""
    with torch.no_grad():
        same = nn.functional.dropout(y, training=False)
        twice = same * 2.0
    return y * same + twice


def _in_inference_mode(module: nn.Module, y: Tensor) -> Tensor:
    with torch.inference_mode():
        wanted = torch.sigmoid(y * module.linear.bias)
    return y - wanted.clone()


def _read_through_data(module: nn.Module, y: Tensor) -> Tensor:
    return y - torch.sigmoid(y).data / module.linear.weight.data.norm()


def _replaced(module: nn.Module, y: Tensor) -> Tensor:
    used = y * module.kept
    module.kept = (module.kept * 0.5 + module.linear.bias).detach()
    return used


@pytest.mark.parametrize("write", [
    _written_through_a_view, _shifted, _returned_by_the_write, _read_before_and_after, _one_of_two_results,
    _of_shared_memory, _of_parts, _of_a_view_made_without_gradient, _of_another_dtype,
    _of_shared_memory_without_gradient, _itself_through_a_dropout_of_nothing, _in_inference_mode,
    _read_through_data, _replaced, _complex_parts,
])  # fmt: skip
def test_in_place_operators_mean_what_they_mean_on_one_device(write: Write) -> None:
    same_as_the_model(writing(write).double(), {"x": torch.randn(6, 4, dtype=torch.float64)}, steps=2)


class Drawn(nn.Module):
    """Names of parts of a tensor, writes through them and reads of them, in an order that is drawn."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 6)
        draw = random.Random(seed)
        self.steps = [(draw.choice("vvwwwr"), draw.random(), draw.randrange(6), draw.randrange(7)) for _ in range(14)]

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        names, read = [y * 2.0], [y.sum()]
        for number, (kind_of_step, which, place, kind) in enumerate(self.steps):
            chosen = names[int(which * len(names))]
            if kind_of_step == "v" and chosen.dim() > 1:
                n = place % chosen.shape[0]
                rows = chosen[n], chosen[n:], chosen[::2], chosen[:]
                columns = chosen[:, n % chosen.shape[1]], chosen[:, 1:], chosen.t()
                names.append((*rows, *columns)[kind])
            elif kind_of_step == "w" and chosen.numel():
                source = y.reshape(-1)[: chosen.numel()].reshape(chosen.shape) + number
                if kind % 4 == 0:  # what a product keeps for backward no write may change, on one device either
                    source = source.detach()
                (chosen.mul_, chosen.add_, chosen.copy_, chosen.sub_)[kind % 4](source)
                if kind > 3:
                    chosen[:1] *= 0.5
            elif kind_of_step == "r":
                waves = torch.arange(chosen.numel(), dtype=x.dtype).reshape(chosen.shape).sin()
                read.append((chosen * waves).sum() * (number + 1))
        return torch.stack([*read, *((name.sin() * i).sum() for i, name in enumerate(names))]).sum()


@pytest.mark.parametrize("seed", range(10))
def test_writes_to_parts_in_any_order_mean_what_they_mean_on_one_device(seed: int) -> None:
    same_as_the_model(Drawn(seed).double(), {"x": torch.randn(6, 4, dtype=torch.float64)}, exact=True)


@pytest.mark.parametrize("write", [_read_before_and_after, _one_of_two_results, _shifted])
def test_what_the_program_has_made_is_written_in_one_trace(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.export.ExportedProgram, "run_decompositions", lambda *_: pytest.fail("traced once more"))
    graph = trace(writing(write), (torch.randn(2, 4),))
    assert not [op.target for op in graph.ops if op.target.split(".")[1].endswith("_")]


def _clamped(module: nn.Module, y: Tensor) -> Tensor:
    with torch.no_grad():
        module.linear.weight.clamp_(-0.1, 0.1)
    return y


def _normed(module: nn.Module, y: Tensor) -> Tensor:
    module.linear.weight.data = nn.functional.normalize(module.linear.weight.data)
    return y + module.linear(y[:, :4])  # type: ignore[no-any-return]


def _follows(module: nn.Module, y: Tensor) -> Tensor:
    module.kept.data = 0.9 * module.kept.data + 0.1 * y.detach().mean(0)
    return y * module.kept


def _frozen_for_a_while(module: nn.Module, y: Tensor) -> Tensor:
    module.linear.requires_grad_(requires_grad=False)
    frozen = module.linear(y[:, :4])
    module.linear.requires_grad_()
    return y + frozen  # type: ignore[no-any-return]


def _in_halves(device: str) -> Write:
    def write(module: nn.Module, y: Tensor) -> Tensor:
        with torch.autocast(device, torch.float16 if device == "cuda" else torch.bfloat16):
            halves = module.linear(y[:, :4])
        return y + halves.float()  # type: ignore[no-any-return]

    return write


def _silently(module: nn.Module, y: Tensor) -> Tensor:
    y = y * 1.0
    with torch.no_grad():
        y[:, 1:3].mul_(3.0)
    return y


def _through_einsum_of_a_buffer(module: nn.Module, y: Tensor) -> Tensor:
    torch.einsum("i->i", module.kept).mul_(1.5)
    return y


def _through_einsum_without_gradient(module: nn.Module, y: Tensor) -> Tensor:
    with torch.no_grad():
        made = torch.ones_like(y)
        torch.einsum("ij->ji", made).add_(1.0)
        scale = made * 2.0
    return y * scale


def _list_of_one(module: nn.Module, y: Tensor) -> Tensor:
    (made,) = torch.meshgrid(y[:, 0], indexing="ij")
    return made


def _seen(module: nn.Module, y: Tensor) -> Tensor:
    module.kept.add_(y.shape[0])
    return y * module.kept


@pytest.mark.parametrize(("write", "message"), [
    (_clamped, "The parameter linear.weight is written to in forward"),
    (_normed, r"test_buffers.py:\d+: Forward assigns to .data of a tensor"),
    (_follows, r"test_buffers.py:\d+: Forward assigns to .data of a tensor.*copy_"),
    (_frozen_for_a_while, r"test_buffers.py:\d+: Forward changes requires_grad of a parameter"),
    (_in_halves("cpu"), r"test_buffers.py:\d+: A torch.autocast inside of forward"),
    (_in_halves("cuda"), r"test_buffers.py:\d+: A torch.autocast inside of forward"),
    (_silently, "writes in place to mul, which has a gradient"),
    (_through_einsum_of_a_buffer, "to what aten.einsum.default returns, which is the memory of b_model_kept"),
    (_through_einsum_without_gradient, "writes in place to what aten.einsum.default returns"),
    (_list_of_one, "aten.meshgrid.indexing returns a list of one tensor"),
    (_seen, "A number in the model depends on the batch size"),
])  # fmt: skip
def test_what_would_train_otherwise_than_on_one_device_is_refused(write: Write, message: str) -> None:
    assert refuses(TraceError, message, trace, writing(write), (torch.randn(2, 4),)).fix
