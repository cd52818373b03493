"""Subjects that ranks import by name: small Hugging Face models with batches of uneven length, and models of one's own."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

SEQUENCE = 16
VOCABULARY = 96


def hf_model(
    kind: str, *, depth: int = 2, dropout: float = 0.0, hidden: int = 32, heads: int = 4, length: int = 16
) -> Any:
    """GPT-2, or a Llama of half as many heads of keys, with tied weights or not."""
    from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

    none = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
    common: dict[str, Any] = {"vocab_size": VOCABULARY, "use_cache": False, **none}
    if kind == "gpt2":
        config = GPT2Config(
            n_layer=depth, n_embd=hidden, n_head=heads, n_positions=length, resid_pdrop=dropout, embd_pdrop=dropout,
            attn_pdrop=dropout, **common,
        )  # fmt: skip
        return GPT2LMHeadModel(config)
    llama = LlamaConfig(
        num_hidden_layers=depth, hidden_size=hidden, intermediate_size=2 * hidden, num_attention_heads=heads,
        num_key_value_heads=heads // 2, max_position_embeddings=length, tie_word_embeddings=kind == "llama", **common,
    )  # fmt: skip
    return LlamaForCausalLM(llama)


@dataclass(frozen=True)
class HfSubject:
    """``kind``: gpt2, llama (tied) or llama-untied. ``depth``: layers."""

    kind: str
    depth: int = 2
    dropout: float = 0.0

    def build(self, *, drops: bool = False) -> nn.Module:
        torch.manual_seed(7)
        model = self._model()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.02)  # no zeros, no ones
        return model.train()

    def _model(self) -> Any:
        return hf_model(self.kind, depth=self.depth, dropout=self.dropout)

    def make_batch(self, batch_size: int, *, seed: int, padded: bool = True) -> dict[str, Tensor]:
        return texts(batch_size, torch.Generator().manual_seed(seed), padded=padded)

    def trace(self) -> Any:
        from autopar.tracing.trace import trace

        return trace(self.build(), kwargs=self.make_batch(2, seed=0), name=self.kind)


def texts(batch_size: int, generator: torch.Generator, *, padded: bool = True) -> dict[str, Tensor]:
    ids = torch.randint(0, VOCABULARY, (batch_size, SEQUENCE), generator=generator)
    labels, mask = ids.clone(), torch.ones_like(ids)
    if padded:
        lengths = torch.randint(SEQUENCE // 4, SEQUENCE + 1, (batch_size,), generator=generator)
        beyond = torch.arange(SEQUENCE) >= lengths[:, None]
        labels[beyond], mask[beyond] = -100, 0
        labels[0, : SEQUENCE // 2] = -100
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


@dataclass(frozen=True)
class OwnSubject:
    """A model and its batches, by functions: the second is given the number of samples and a generator."""

    model: Callable[[], nn.Module]
    batch: Callable[[int, torch.Generator], dict[str, Tensor]]

    def build(self, *, drops: bool = False) -> nn.Module:
        torch.manual_seed(0)
        return self.model()

    def make_batch(self, batch_size: int, *, seed: int, padded: bool = False) -> dict[str, Tensor]:
        return self.batch(batch_size, torch.Generator().manual_seed(seed))

    def trace(self, samples: int = 2, **options: Any) -> Any:
        from autopar import api

        return api.trace(self.build(), example_inputs=self.make_batch(samples, seed=0), **options)


@cache
def graph_of(subject: Any) -> Any:
    """Its trace, made once in a process, for the tests of all files."""
    return subject.trace()


class Unpadded(HfSubject):
    """Without a mask attention is causal by its flag."""

    def make_batch(self, batch_size: int, *, seed: int, padded: bool = True) -> dict[str, Tensor]:
        batch = HfSubject.make_batch(self, batch_size, seed=seed, padded=padded)
        return {name: value for name, value in batch.items() if name != "attention_mask"}
