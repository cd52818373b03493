"""One rank of a plan on fake CUDA tensors among fake ranks: what a program asks of a GPU, seen on a machine that has none.

``guard.cpp`` gives torch a CUDA device that does nothing, so that autograd (its device thread included), FSDP and pipelines work on
tensors without memory. What is run is the project's own: World, lowering, ParallelModel, the optimizer, clipping, evaluation.

Stubs, of which nothing is proven: streams and events (no race is seen), NCCL (no deadlock), memory, speed and every number. The vote
of torch's pipeline schedules before their first step is left out, what experts read of their routing is even, and a scaler finds
no infinity.
"""
