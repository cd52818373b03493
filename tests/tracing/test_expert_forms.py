import importlib
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from autopar.tracing.model_with_loss import _form, swap_experts
from tests.support.close import assert_close

FORMS = {
    "mixtral.MixtralExperts": "silu", "nemotron_h.NemotronHExperts": "relu2", "aria.AriaExperts": "silu is_transposed",
    "gpt_oss.GptOssExperts": "silu alpha=1.702 limit=7.0 shift=1.0 is_transposed is_interleaved",
    "deepseek_v4.DeepseekV4Experts": "silu limit=7.0",
    "minimax_m3_vl.MiniMaxM3VLExperts": "silu alpha=1.702 limit=7.0 shift=1.0",
}  # fmt: skip


ASKED = {"alpha": 1.702, "limit": 7.0, "mlp_hidden_act": "relu2", "act": "silu", "impl": "eager", "experts": 4}


class Config(SimpleNamespace):
    def __getattr__(self, key: str) -> Any:
        return next((value for part, value in ASKED.items() if part in key), 8)


def made(name: str) -> torch.nn.Module:
    home, _, own = name.partition(".")
    try:
        module = importlib.import_module(f"transformers.models.{home}.modeling_{home}")
    except ModuleNotFoundError:
        pytest.skip(f"transformers has no {home} here")
    experts: torch.nn.Module = getattr(module, own)(Config()).double()
    generator = torch.Generator().manual_seed(0)
    for parameter in experts.parameters():
        parameter.data = 3 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64)  # beyond limits
    return experts


def check_swapped(module: torch.nn.Module, call: Callable[..., tuple[Tensor, ...]], *leaves: Tensor) -> None:
    """With the operator in place of experts a module makes what it made before, with the same gradients."""

    def results() -> list[Tensor]:
        given = [x.clone().requires_grad_() for x in leaves]
        module.zero_grad()
        made = call(*given)
        sum(x.square().sum() for x in made).backward()
        every = [*given, *module.parameters()]
        return [*(x.detach() for x in made), *(torch.zeros_like(x) if x.grad is None else x.grad for x in every)]

    wanted = results()
    swap_experts(module)
    for one, other in zip(results(), wanted, strict=True):
        assert_close(one, other, 1e-12)


@pytest.mark.parametrize("name", FORMS)
def test_the_operator_computes_what_the_module_does(name: str) -> None:
    experts = made(name)
    assert str(_form(experts)) == FORMS[name]
    generator = torch.Generator().manual_seed(1)
    hidden, weights = (torch.randn(*s, generator=generator, dtype=torch.float64) for s in ((12, 8), (12, 2)))
    indices = torch.rand(12, 3, generator=generator).topk(2).indices  # the last expert has no token
    check_swapped(experts, lambda x, w: (experts(x, indices, w),), hidden, weights)


@pytest.mark.parametrize("gate", [
    lambda self, x: self.act_fn(x[..., :8]).clamp(max=self.limit) * x[..., 8:],
    lambda self, x: (self.act_fn(x[..., :8].float()) * x[..., 8:].float()).to(x.dtype),
    lambda self, x: self.act_fn(x[..., 8:]) * x[..., :8],  # halves the other way round
])  # fmt: skip
def test_gates_of_other_forms_stay_as_they_are_written(gate: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    experts: Any = made("mixtral.MixtralExperts")
    experts.limit = 7.0
    monkeypatch.setattr(type(experts), "_apply_gate", gate)
    assert _form(experts) is None
    swap_experts(experts)
    assert "forward" not in vars(experts)


def test_scores_on_what_goes_in_choose_the_experts_of_llama_4() -> None:
    modeling = pytest.importorskip("transformers.models.llama4.modeling_llama4")
    config = Config(hidden_size=8, intermediate_size=6, num_local_experts=4, num_experts_per_tok=2, hidden_act="silu")
    mixture = modeling.Llama4TextMoe(config).double()
    for parameter in mixture.parameters():
        torch.nn.init.normal_(parameter)
    check_swapped(mixture, mixture, torch.randn(2, 6, 8, dtype=torch.float64))
    assert "forward" in vars(mixture)
