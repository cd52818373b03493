"""Where parameters get their values: slices, initialisation of models on meta."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from autopar.errors import RuntimeMismatchError, UsageError
from autopar.graph.graph import Parameter, Part, TensorSpec
from autopar.plan.mesh import I, S
from autopar.runtime.weights import ModelWeights, initialise, local_index


def parameter(shape: tuple[int, ...], **options: object) -> Parameter:
    spec = TensorSpec(shape=shape, dtype=torch.float32, requires_grad=True)
    return Parameter(name="w", fqn="0.weight", spec=spec, **options)  # type: ignore[arg-type]


def test_slices_of_all_ranks_make_the_part() -> None:
    full = torch.arange(6 * 12.0).view(6, 12)
    ir = parameter((6, 2), part=Part(dim=1, start=4, stop=8), layout=(("batch", I), ("tp", S(1))))
    pieces = [full[local_index(ir, full.shape, {"tp": 2, "pp": 1}, {"tp": rank, "pp": 0})] for rank in range(2)]
    assert torch.equal(torch.cat(pieces, 1), full[:, 4:8])


def test_two_axes_may_split_one_dim() -> None:
    full = torch.arange(8.0)
    ir = parameter((2,), layout=(("cp", S(0)), ("tp", S(0))))
    pieces = [
        full[local_index(ir, full.shape, {"cp": 2, "tp": 2}, {"cp": c, "tp": t})] for c in range(2) for t in range(2)
    ]
    assert torch.equal(torch.cat(pieces), full)


def test_another_shape_is_refused() -> None:
    with pytest.raises(RuntimeMismatchError, match=r"0\.weight: .*\(5, 12\)"):
        local_index(parameter((6, 12)), torch.Size((5, 12)), {}, {})


class Bare(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))


def on_meta() -> nn.Module:
    with torch.device("meta"):
        return nn.Sequential(nn.Linear(3, 5), nn.Sequential(nn.Linear(5, 4), Bare()))


def test_modules_on_meta_are_initialised_one_by_one() -> None:
    model = on_meta()
    made = initialise(model, "1.0", seed=1)
    assert made.weight.shape == (4, 5)
    assert not made.weight.is_meta
    assert all(p.is_meta for p in model.parameters())
    assert torch.equal(made.weight, initialise(model, "1.0", seed=1).weight)
    assert not torch.equal(made.weight, initialise(model, "1.0", seed=2).weight)


def test_state_of_the_random_generator_is_kept() -> None:
    torch.manual_seed(0)
    wanted = torch.rand(3)
    torch.manual_seed(0)
    initialise(on_meta(), "0", seed=1)
    assert torch.equal(torch.rand(3), wanted)


def test_a_module_without_initialiser_is_named() -> None:
    with pytest.raises(UsageError, match=r"1\.1\.scale: A Bare .*reset_parameters"):
        initialise(on_meta(), "1.1", seed=0)


def test_real_weights_are_taken_as_they_are() -> None:
    model = nn.Sequential(nn.Linear(3, 4))
    found = ModelWeights(model, 0).parameter(parameter((4, 3)), (slice(1, 3), slice(0, 3)))
    assert torch.equal(found, model[0].weight[1:3])
    assert not found.requires_grad


def test_initialisers_of_parents_see_the_names_of_their_children() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(4, 4)
            self.other = nn.Linear(4, 4)

        def _init_weights(self, module: nn.Module) -> None:
            if isinstance(module, nn.Linear):
                nn.init.ones_(module.weight)
                nn.init.zeros_(module.bias)
            for name, p in module.named_parameters():
                if name == "inner.weight":
                    p.data.mul_(3.0)

    with torch.device("meta"):
        model = Scaled()
    assert torch.equal(initialise(model, "inner", 0).weight, torch.full((4, 4), 3.0))
    assert torch.equal(initialise(model, "other", 0).weight, torch.ones(4, 4))


class Choice(nn.Module):
    """An integer buffer, of which the initialiser may leave elements out."""

    def __init__(self, first: int = 0) -> None:
        super().__init__()
        self.first = first
        self.register_buffer("order", torch.tensor([2, 0, 1]))

    def reset_parameters(self) -> None:
        self.order[self.first :] = torch.tensor([2, 0, 1])[self.first :]


def test_integers_that_an_initialiser_leaves_out_are_found() -> None:
    with torch.device("meta"):
        whole, partial = Choice(), Choice(first=1)
    assert initialise(whole, "", 0).order.tolist() == [2, 0, 1]
    with pytest.raises(UsageError, match=r"order: A Choice on meta has no initialiser"):
        initialise(partial, "", 0)
