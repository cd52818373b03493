"""What one optimizer step costs: seconds and where they go, bytes of each rank.

``step`` has what a step is, :class:`~autopar.cost.step.step.Step` and its :class:`~autopar.cost.step.step.StageCost` with its seconds.
``step_model.StepModel`` prices blocks and stages on the data axes (``data_parallel``: FSDP's gathers and reductions beside the blocks;
``gradient_buckets``: sums that FSDP does not do; ``memory``, with what optimizers keep and move), each once, by value.
``pipeline_step.PipelineStep`` puts the stages of a plan on pipeline ranks and simulates the schedule's own list of actions
(``simulation``), whose longest chains it finds too (the critical path method, Kelley and Walker 1959).
:class:`~autopar.cost.step.step.Runtime` is what the program that trains decides.
"""
