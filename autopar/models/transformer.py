"""Transformers of published training runs, by their sizes, with one operator for each kernel that the programs of those runs launch.

A norm, an activation and fused attention are one operator of torch each, as they are one kernel in Megatron, Transformer Engine and MPT's
flash attention. ``scores`` attention stores its probabilities; its masking and scaling are part of the fused softmax. The models are made
on meta, as only their shapes matter.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Family = Literal["gpt", "llama", "mpt", "bloom"]
Attention = Literal["flash", "scores"]
DROPPED = 0.1
"""The probability of dropout; the time does not depend on it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """The sizes that decide a model's graph, except for the number of its equal layers.

    Attributes:
        family: the family.
        hidden: the width of the model.
        ffn: the inner width of the feed-forward.
        heads, kv_heads: the numbers of query heads, and of key and value heads.
        vocabulary: the number of tokens.
        sequence: tokens of a sample.
        attention: fused attention, or stored scores.
        dtype: the dtype of the model, by torch's name.
        autocast: whether norms, and the softmax of ``plain_scores``, are in single precision between casts.
        dropout: whether the outputs of attention and feed-forward have dropout, and the probabilities of ``scores`` attention.
        plain_scores: whether ``scores`` attention scales, masks and normalizes by separate operators, not by one fused softmax.
        operator_chains: whether GELU and RMS norms are chains of operators, as in Hugging Face's transformers (``NewGELUActivation``,
            ``LlamaRMSNorm``) and minGPT.
    """

    family: Family
    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    vocabulary: int
    sequence: int
    attention: Attention
    dtype: str
    autocast: bool = False
    dropout: bool = False
    plain_scores: bool = False
    operator_chains: bool = False


class ChainedNorm(nn.RMSNorm):
    """An RMS norm as a chain of operators, in single precision except for its weight (Hugging Face, ``LlamaRMSNorm``)."""

    def forward(self, x: Tensor) -> Tensor:
        """Return the norm of ``x`` in its dtype."""
        wide = x.float()
        scaled = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)
        return self.weight * scaled.to(x.dtype)


class Norm(nn.LayerNorm):
    """A layer norm in single precision between casts, as it runs under autocast."""

    def forward(self, x: Tensor) -> Tensor:
        """Return the norm of ``x`` in its dtype."""
        return F.layer_norm(x.float(), (x.shape[-1],), self.weight.float(), self.bias.float()).to(x.dtype)


class Transformer(nn.Module):
    """A decoder with its loss.

    Llama has RMS norms, rotary positions, a gated feed-forward and an untied head. The other families have layer norms, biases, GELU and
    a head tied to the embedding. BLOOM has a norm behind the embedding and no learned positions.
    """

    def __init__(self, sizes: Sizes, layers: int) -> None:
        super().__init__()
        llama = sizes.family == "llama"
        self.heads = sizes.heads
        self.embedding = nn.Embedding(sizes.vocabulary, sizes.hidden)
        self.positions = None if llama or sizes.family == "bloom" else nn.Embedding(sizes.sequence, sizes.hidden)
        self.embedding_norm = nn.LayerNorm(sizes.hidden) if sizes.family == "bloom" else None
        self.layers = nn.ModuleList(Layer(sizes) for _ in range(layers))
        self.norm = _norm(sizes)
        self.head = nn.Linear(sizes.hidden, sizes.vocabulary, bias=False)
        if not llama:
            self.head.weight = self.embedding.weight

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        """Return the mean loss of ids [batch, sequence] and labels of the same shape."""
        x = self.embedding(input_ids)
        if self.positions is not None:
            x = x + self.positions(torch.arange(x.shape[1], device=x.device))
        if self.embedding_norm is not None:
            x = self.embedding_norm(x)
        rotary = self._rotary(x) if self.positions is None and self.embedding_norm is None else None
        for layer in self.layers:
            x = layer(x, rotary)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.view(-1, logits.shape[-1]), labels.view(-1))

    def _rotary(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the cosines and sines of rotary positions (Su et al. 2021), [sequence, width of a head], for all layers."""
        width = x.shape[2] // self.heads
        rates = 10000.0 ** (-torch.arange(0, width, 2, device=x.device) / width)
        angles = torch.arange(x.shape[1], device=x.device)[:, None] * torch.cat([rates, rates])
        return angles.cos().to(x.dtype), angles.sin().to(x.dtype)


class Layer(nn.Module):
    """Attention and feed-forward on [batch, sequence, hidden]."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.sizes, self.width = sizes, sizes.hidden // sizes.heads
        llama = sizes.family == "llama"
        keys = sizes.kv_heads * self.width
        self.norm1, self.norm2 = _norm(sizes), _norm(sizes)
        self.query = nn.Linear(sizes.hidden, sizes.hidden, bias=not llama)
        self.key = nn.Linear(sizes.hidden, keys, bias=not llama)
        self.value = nn.Linear(sizes.hidden, keys, bias=not llama)
        self.out = nn.Linear(sizes.hidden, sizes.hidden, bias=not llama)
        self.up = nn.Linear(sizes.hidden, sizes.ffn, bias=not llama)
        self.gate = nn.Linear(sizes.hidden, sizes.ffn, bias=False) if llama else None
        self.down = nn.Linear(sizes.ffn, sizes.hidden, bias=not llama)

    def forward(self, x: Tensor, rotary: tuple[Tensor, Tensor] | None) -> Tensor:
        """Return the output of the layer, of the shape of ``x``."""
        x = x + self._dropped(self.out(self._attention(self.norm1(x), rotary)))
        y = self.norm2(x)
        gelu = _chained_gelu if self.sizes.operator_chains else F.gelu
        inner = gelu(self.up(y)) if self.gate is None else F.silu(self.gate(y)) * self.up(y)
        result: Tensor = x + self._dropped(self.down(inner))
        return result

    def _dropped(self, x: Tensor) -> Tensor:
        return F.dropout(x, DROPPED, training=self.sizes.dropout)

    def _attention(self, x: Tensor, rotary: tuple[Tensor, Tensor] | None) -> Tensor:
        batch, sequence, hidden = x.shape
        sizes = self.sizes
        query = self.query(x).view(batch, sequence, sizes.heads, self.width).transpose(1, 2)
        key = self.key(x).view(batch, sequence, sizes.kv_heads, self.width).transpose(1, 2)
        value = self.value(x).view(batch, sequence, sizes.kv_heads, self.width).transpose(1, 2)
        if rotary is not None:
            query, key = _rotated(query, rotary), _rotated(key, rotary)
        if sizes.attention == "flash":
            grouped = sizes.heads != sizes.kv_heads
            mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=grouped)
        else:
            scores = query @ key.transpose(2, 3)
            mixed = self._dropped(self._probabilities(scores)).to(value.dtype) @ value
        return mixed.transpose(1, 2).reshape(batch, sequence, hidden)

    def _probabilities(self, scores: Tensor) -> Tensor:
        """Return the probabilities of scores [batch, heads, sequence, sequence]."""
        if not self.sizes.plain_scores:
            return F.softmax(scores, dim=-1)
        sequence = scores.shape[-1]
        masked = torch.ones(sequence, sequence, dtype=torch.bool, device=scores.device).triu(1)
        scores = (scores / math.sqrt(self.width)).masked_fill(masked, -math.inf)
        return F.softmax(scores.float() if self.sizes.autocast else scores, dim=-1)


def _chained_gelu(x: Tensor) -> Tensor:
    """Return GELU by eight operators. It halves by a division, as tracing replaces GPT-2's form, with a multiplication, by ``F.gelu``."""
    return x / 2.0 * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0))))


def _rotated(x: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
    cosines, sines = rotary
    result: Tensor = x * cosines + torch.roll(x, x.shape[-1] // 2, -1) * sines
    return result


def _norm(sizes: Sizes) -> nn.Module:
    if sizes.family == "llama":
        return (ChainedNorm if sizes.operator_chains else nn.RMSNorm)(sizes.hidden, eps=1e-5)
    return Norm(sizes.hidden) if sizes.autocast else nn.LayerNorm(sizes.hidden)


def build(sizes: Sizes, layers: int) -> tuple[Transformer, dict[str, Tensor]]:
    """Return the model and a batch of two samples, on meta."""
    with torch.device("meta"):
        model = Transformer(sizes, layers).to(getattr(torch, sizes.dtype))
        ids = torch.zeros(2, sizes.sequence, dtype=torch.long)
    return model, {"input_ids": ids, "labels": ids.clone()}
