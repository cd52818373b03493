"""What one optimizer step costs: seconds with their parts, and the bytes of each rank.

``step`` defines :class:`~autopar.cost.step.step.Step` and :class:`~autopar.cost.step.step.StageCost`, with the seconds of a stage.
``step_model.StepModel`` prices and caches blocks and stages on the data axes: ``data_parallel`` has FSDP's gathers and reductions, which
overlap blocks, ``gradient_buckets`` the sums that FSDP does not do, ``memory`` the bytes, and what optimizers keep and move.
``pipeline_step.PipelineStep`` puts the stages of a plan on pipeline ranks and simulates the schedule's actions (``simulation``), whose
critical paths it finds too (the critical path method, Kelley and Walker 1959). :class:`~autopar.cost.step.step.Runtime` is what the
training program decides.
"""
