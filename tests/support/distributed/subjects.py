"""Small Hugging Face models with batches of uneven length."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

SEQUENCE = 16
VOCABULARY = 96


@dataclass(frozen=True)
class HfSubject:
    """``kind``: gpt2, llama (tied) or llama-untied. ``depth``: layers."""

    kind: str
    depth: int = 2
    dropout: float = 0.0

    def build(self) -> nn.Module:
        torch.manual_seed(7)
        model = self._model()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.02)  # no zeros, no ones
        return model.train()

    def _model(self) -> Any:
        from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

        common: dict[str, Any] = {
            "vocab_size": VOCABULARY, "use_cache": False, "bos_token_id": None, "eos_token_id": None,
            "pad_token_id": None,
        }  # fmt: skip
        if self.kind == "gpt2":
            p = self.dropout
            config = GPT2Config(
                n_layer=self.depth, n_embd=32, n_head=4, n_positions=SEQUENCE, resid_pdrop=p, embd_pdrop=p,
                attn_pdrop=p, **common,
            )  # fmt: skip
            return GPT2LMHeadModel(config)
        llama = LlamaConfig(
            num_hidden_layers=self.depth, hidden_size=32, intermediate_size=64, num_attention_heads=4,
            num_key_value_heads=2, max_position_embeddings=SEQUENCE, tie_word_embeddings=self.kind == "llama", **common,
        )  # fmt: skip
        return LlamaForCausalLM(llama)

    def make_batch(self, batch_size: int, *, seed: int, padded: bool = True) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(seed)
        ids = torch.randint(0, VOCABULARY, (batch_size, SEQUENCE), generator=generator)
        labels, mask = ids.clone(), torch.ones_like(ids)
        if padded:
            lengths = torch.randint(SEQUENCE // 4, SEQUENCE + 1, (batch_size,), generator=generator)
            beyond = torch.arange(SEQUENCE) >= lengths[:, None]
            labels[beyond], mask[beyond] = -100, 0
            labels[0, : SEQUENCE // 2] = -100
        return {"input_ids": ids, "attention_mask": mask, "labels": labels}

    def trace(self) -> Any:
        from autopar.tracing.trace import trace

        return trace(self.build(), kwargs=self.make_batch(2, seed=0), name=self.kind)


@cache
def graph_of(subject: Any) -> Any:
    """Its trace, made once in a process, for the tests of all files."""
    return subject.trace()


class Unpadded(HfSubject):
    """Without a mask attention is causal by its flag."""

    def make_batch(self, batch_size: int, *, seed: int, padded: bool = True) -> dict[str, Tensor]:
        batch = HfSubject.make_batch(self, batch_size, seed=seed, padded=padded)
        return {name: value for name, value in batch.items() if name != "attention_mask"}
