"""The same model and plan by other means: DDP, FSDP2, tensor parallelism by hand, a pipeline by hand.

Each gives two functions: forward and backward of one step on this rank, which returns the global
loss, and the optimizer's update.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.nn.parallel import DistributedDataParallel

Step = tuple[Callable[[dict[str, Tensor]], Tensor], Callable[[], None]]


def updater(parameters: Any) -> Callable[[], None]:
    optimizer = torch.optim.AdamW(parameters, lr=1e-3, eps=1e-5, fused=True)

    def update() -> None:
        optimizer.step()
        optimizer.zero_grad()

    return update


def mean_over_ranks(loss: Tensor) -> Tensor:
    total = loss.detach().clone()
    dist.all_reduce(total)
    return total / dist.get_world_size()


def _own(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    rank, size = dist.get_rank(), dist.get_world_size()
    return {name: value.chunk(size)[rank] for name, value in batch.items()}


def ddp(model: nn.Module) -> Step:
    return _data_parallel(DistributedDataParallel(model))


def fsdp(model: Any) -> Step:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model.transformer.h:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return _data_parallel(model)


def _data_parallel(model: nn.Module) -> Step:
    def step(batch: dict[str, Tensor]) -> Tensor:
        loss = model(**_own(batch)).loss
        loss.backward()
        return mean_over_ranks(loss)

    return step, updater(model.parameters())


# --- tensor parallelism as Megatron does it, on GPT-2


class _Enter(torch.autograd.Function):
    """Megatron's f."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        grad = grads[0].contiguous()
        dist.all_reduce(grad)
        return grad


class _Leave(torch.autograd.Function):
    """Megatron's g."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        x = x.contiguous()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0]


class _TensorParallelBlock(nn.Module):
    def __init__(self, block: Any, rank: int, size: int) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = block.ln_1, block.ln_2
        hidden = block.ln_1.weight.numel()
        self.head = block.attn.head_dim
        qkv_w, qkv_b = block.attn.c_attn.weight.split(hidden, 1), block.attn.c_attn.bias.split(hidden)
        self.qkv_w = nn.ParameterList(w.chunk(size, 1)[rank].detach().clone() for w in qkv_w)
        self.qkv_b = nn.ParameterList(b.chunk(size)[rank].detach().clone() for b in qkv_b)
        self.out_w = nn.Parameter(block.attn.c_proj.weight.chunk(size, 0)[rank].detach().clone())
        self.out_b = nn.Parameter(block.attn.c_proj.bias.detach().clone())
        self.up_w = nn.Parameter(block.mlp.c_fc.weight.chunk(size, 1)[rank].detach().clone())
        self.up_b = nn.Parameter(block.mlp.c_fc.bias.chunk(size)[rank].detach().clone())
        self.down_w = nn.Parameter(block.mlp.c_proj.weight.chunk(size, 0)[rank].detach().clone())
        self.down_b = nn.Parameter(block.mlp.c_proj.bias.detach().clone())
        self.act = block.mlp.act

    def forward(self, x: Tensor) -> Tensor:
        b, s, _ = x.shape
        inner = _Enter.apply(self.ln_1(x))
        q, k, v = (
            F.linear(inner, w.t(), c).view(b, s, -1, self.head).transpose(1, 2)
            for w, c in zip(self.qkv_w, self.qkv_b, strict=True)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, s, -1)
        x = x + _Leave.apply(mixed @ self.out_w) + self.out_b
        inner = _Enter.apply(self.ln_2(x))
        return x + _Leave.apply(self.act(F.linear(inner, self.up_w.t(), self.up_b)) @ self.down_w) + self.down_b


class TensorParallelGpt2(nn.Module):
    """Embedding and head whole on every rank."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        rank, size = dist.get_rank(), dist.get_world_size()
        self.wte, self.wpe, self.ln_f = model.transformer.wte, model.transformer.wpe, model.transformer.ln_f
        self.blocks = nn.ModuleList(_TensorParallelBlock(block, rank, size) for block in model.transformer.h)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        x = self.wte(input_ids) + self.wpe(torch.arange(input_ids.shape[1]))
        for block in self.blocks:
            x = block(x)
        return next_token_loss(F.linear(self.ln_f(x), self.wte.weight), labels)


def next_token_loss(logits: Tensor, labels: Tensor) -> Tensor:
    shifted = F.pad(labels, (0, 1), value=-100)[:, 1:]
    return F.cross_entropy(logits.flatten(0, 1), shifted.flatten())


def tensor_parallel(model: Any) -> Step:
    module = TensorParallelGpt2(model)

    def step(batch: dict[str, Tensor]) -> Tensor:
        loss: Tensor = module(**batch)
        loss.backward()
        return loss.detach()

    return step, updater(module.parameters())


# --- a pipeline of two stages


class _First(nn.Module):
    def __init__(self, model: Any, stop: int) -> None:
        super().__init__()
        self.wte, self.wpe, self.blocks = model.transformer.wte, model.transformer.wpe, model.transformer.h[:stop]

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.wte(input_ids) + self.wpe(torch.arange(input_ids.shape[1]))
        for block in self.blocks:
            x = block(x)
        return x


class _Last(nn.Module):
    def __init__(self, model: Any, start: int) -> None:
        super().__init__()
        self.blocks, self.ln_f, self.lm_head = model.transformer.h[start:], model.transformer.ln_f, model.lm_head

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.lm_head(self.ln_f(x))


def pipeline(model: Any, micro_batches: int) -> Step:
    rank, half = dist.get_rank(), len(model.transformer.h) // 2
    module = _First(model, half) if rank == 0 else _Last(model, half)
    tied = model.transformer.wte.weight
    stage = PipelineStage(module, rank, 2, torch.device("cpu"))
    schedule = Schedule1F1B(stage, micro_batches, loss_fn=next_token_loss)

    def step(batch: dict[str, Tensor]) -> Tensor:
        losses: list[Tensor] = []
        if rank == 0:
            schedule.step(batch["input_ids"], return_outputs=False)
        else:
            schedule.step(target=batch["labels"], losses=losses, return_outputs=False)
        dist.all_reduce(tied.grad)
        loss = torch.stack([x.detach() for x in losses]).mean() if losses else torch.zeros(())
        dist.all_reduce(loss)
        return loss

    return step, updater(module.parameters())
