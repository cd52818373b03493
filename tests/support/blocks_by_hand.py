"""Blocks made by hand, for the tests of memory and time."""

from typing import Any

from autopar.cost.blocks.block_cost import BlockCost, ParameterCost
from autopar.cost.model import StageCost, Step
from autopar.plan.mesh import Mesh
from autopar.plan.plan import Recompute


def block(name: str = "layer", *, rows: int = 1024, width: int = 1024, **changes: Any) -> BlockCost:
    """A block with one parameter [rows, width] and round numbers."""
    values: dict[str, Any] = {
        "key": name,
        "forward_s": 1e-3,
        "backward_s": 2e-3,
        "communication_forward_s": 0.0,
        "communication_backward_s": 0.0,
        "saved_bytes": 1000,
        "input_bytes": 100,
        "saved_input_bytes": 100,
        "prelude": (),
        "forward_transient_bytes": 30,
        "backward_transient_bytes": 50,
        "sends": (100,),
        "send_gradients": (100,),
        "flops": 1e9,
        "backward_flops": 2e9,
        "messages": (),
        "parameters": (ParameterCost(name=f"{name}.weight", shape=(rows, width), num_bytes=rows * width * 4),),
    }
    return BlockCost(**(values | changes))


def stage(*blocks: BlockCost, recompute: Recompute = "none") -> StageCost:
    return StageCost(blocks=blocks, recompute=(recompute,) * len(blocks))


def step(mesh: Mesh, *, schedule: str = "none", count: int = 4, zero: int = 0) -> Step:
    return Step(
        mesh=mesh,
        schedule=schedule,
        num_micro_batches=count,
        zero_stage=zero,
        global_batch_size=count * mesh.data,
        flops_per_sample=3e9,
        tokens_per_sample=128,
    )
