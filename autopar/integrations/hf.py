"""Hugging Face's ``Trainer`` with a parallel model, all of whose ranks are one device for it."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from autopar.errors import UsageError
from autopar.integrations.loss import check_precision, loss_of, parts_are_explained, step_loss
from autopar.runtime.checkpoint.contents import put_random_states, random_states
from autopar.runtime.parallel_model import ParallelModel

try:
    import transformers
    from accelerate.utils import GradientAccumulationPlugin
    from transformers.loss.loss_utils import LOSS_MAPPING, ForCausalLMLoss
    from transformers.trainer_pt_utils import find_batch_size
    from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR
    from transformers.utils import can_return_loss, find_labels
except ImportError as missing:
    raise UsageError.missing("package transformers or accelerate", fix='Run: pip install "autopar[hf]"') from missing

_STATE = "trainer_state.json"
"""The Trainer's file that is written last, so that a checkpoint with it is complete."""

_WEIGHTS = "autopar"
"""The folder inside the Trainer's checkpoint that ``par.save`` writes."""

_SETTLED = {
    "gradient_checkpointing": "What is computed again is the plan's: pins=['recompute=full'], or what the search finds",
    "neftune_noise_alpha": "Add the noise in the model's forward, before autopar.parallelize",
    "use_liger_kernel": "Apply the kernels to the model before autopar.parallelize",
    "predict_with_generate": "Load par.full_state_dict() into the model itself, and call its generate(...)",
}
"""Arguments that would change the model after its plan was made or that a parallel model does not support, with a remedy for each."""


class Trainer(transformers.Trainer):  # type: ignore[misc]
    """``transformers.Trainer`` for a model of ``autopar.parallelize``, made on every rank with the same arguments.

    ``per_device_train_batch_size`` is the plan's global batch, and the batch of evaluation is that of all ranks together. Every rank reads
    the same samples and takes its part of them. Checkpoints have what ``par.save`` writes and can be loaded under any plan. ``save_model``
    writes safetensors for ``from_pretrained``.

    Raises:
        UsageError: the model is not parallel, the batch is not that of the plan, or an argument contradicts the plan.
    """

    accelerator: Any
    _signature_columns: Any
    model: Any

    def __init__(
        self, model: ParallelModel, args: transformers.TrainingArguments, *others: Any, **options: Any
    ) -> None:
        original = _checked(model, args, options)
        model.is_distributed_loading_by_transformers = False
        super().__init__(model, args, *others, **options)
        self._given_model = original
        kind = type(original)
        self.label_names = find_labels(kind) if args.label_names is None else args.label_names
        self.can_return_loss = can_return_loss(kind)
        parameters = inspect.signature(original.forward).parameters.values()
        weighs = hasattr(original, "loss_function") and any(p.kind == p.VAR_KEYWORD for p in parameters)
        self.model_accepts_loss_kwargs = bool(getattr(original, "accepts_loss_kwargs", weighs))
        # the Trainer counts all labels of causal models that it does not know as such (GPT-2)
        is_known = LOSS_MAPPING.get(getattr(original, "loss_type", None)) is ForCausalLMLoss
        self._loss_shifts_labels = is_known and _is_causal(original)
        self._restored: dict[str, Any] | None = None

    def create_accelerator_and_postprocess(self) -> None:
        """Replace accelerate's Accelerator by the one for parallel models."""
        from autopar.integrations.accelerate import Accelerator

        super().create_accelerator_and_postprocess()
        if self.is_fsdp_enabled or self.is_deepspeed_enabled or self.args.parallelism_config is not None:
            raise UsageError(
                "FSDP, DeepSpeed or a parallelism_config was asked for in TrainingArguments, but the plan has distributed the model",
                fix="Leave it out, and pin what you want in the plan: zero=3, tp=4, ...",
            )
        self.accelerator = Accelerator(
            mixed_precision=self.args.mixed_precision,
            dataloader_config=self.accelerator.dataloader_config,
            gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=1),
        )
        self.gather_function = self.accelerator.gather_for_metrics

    def _build_accelerator_args(self, **kwargs: Any) -> dict[str, Any]:
        """Return accelerate's arguments without a precision, which is the plan's."""
        return {**super()._build_accelerator_args(**kwargs), "mixed_precision": "no"}

    # --- steps

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the Trainer's step; an error explains how to give the plan a loss that is computed from outputs."""
        with parts_are_explained():
            return super().training_step(*args, **kwargs)

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Any:
        """Return in training a loss whose backward has run, under any plan; in evaluation the loss of the model's outputs.

        If gradients of several batches are accumulated and the model would divide by the labels of all of them, each loss is weighted by
        its labels.
        """
        par = cast("ParallelModel", model)
        if par.training:
            loss = self._weighted(step_loss(par, inputs), inputs, num_items_in_batch)
            return (loss, {"loss": loss}) if return_outputs else loss
        outputs = par(**inputs)
        loss = self._weighted(loss_of(outputs), inputs, num_items_in_batch)
        return (loss, outputs) if return_outputs else loss

    def _weighted(self, loss: Tensor, inputs: Mapping[str, Any], num_items: Tensor | int | None) -> Tensor:
        """Return the mean loss over a batch's labels, weighted by the share of its labels in ``num_items``."""
        if num_items is None or not self.model_accepts_loss_kwargs:
            return loss
        labels = inputs["shift_labels"] if "shift_labels" in inputs else inputs["labels"]
        if _is_causal(self._given_model) and "shift_labels" not in inputs:
            labels = labels[..., 1:]
        share: Tensor = labels.ne(-100).sum().to(loss.device) / num_items
        return loss * share

    def prediction_step(
        self, model: nn.Module, inputs: dict[str, Any], prediction_loss_only: bool, ignore_keys: list[str] | None = None
    ) -> tuple[Any, Any, Any]:
        """Evaluate a batch; logits are not gathered if only the loss is wanted."""
        self.accelerator.num_evaluated = find_batch_size(inputs)  # the Trainer repeats the loss as for a full batch
        has_labels = bool(self.label_names) and all(inputs.get(name) is not None for name in self.label_names)
        if prediction_loss_only and has_labels:
            loss = cast("ParallelModel", model).evaluate(self._prepare_inputs(inputs))
            return self._weighted(loss, inputs, self._get_num_items_in_batch([inputs], loss.device)), None, None
        if ignore_keys is None:
            config = getattr(self._given_model, "config", None)
            ignore_keys = getattr(config, "keys_to_ignore_at_inference", ["past_key_values"])
        outputs: tuple[Any, Any, Any] = super().prediction_step(model, inputs, prediction_loss_only, ignore_keys)
        return outputs

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        """Do nothing: the plan has placed the model."""

    def _has_mixed_mesh_grads(self, model: nn.Module) -> bool:
        """Return False: the parallel model clips gradients, on whatever meshes they are."""
        return False

    def _set_signature_columns_if_needed(self) -> None:
        """Keep the columns of a data set that the plan has inputs for."""
        if self._signature_columns is None:
            names = {leaf.name.split(".")[0] for leaf in self.model._program.graph.inputs}
            self._signature_columns = sorted(names | set(self.label_names) | {"label", "label_ids"})

    def get_decay_parameter_names(self, model: nn.Module) -> list[str]:
        """Return the names by the layers of the original model, which show the parameters of norms."""
        decaying = set(super().get_decay_parameter_names(self._given_model))
        return [name for name, _ in self.model.named_parameters() if name.split("[")[0].split("@")[0] in decaying]

    def get_total_train_batch_size(self, args: transformers.TrainingArguments) -> int:
        """Return the samples of an optimizer step."""
        return int(self._train_batch_size * args.gradient_accumulation_steps)

    def floating_point_ops(self, inputs: dict[str, Any]) -> float:
        """Return this rank's share of the FLOPs, which the Trainer counts by the parameters of the original model."""
        par, self.model = self.model, self._given_model
        try:
            return float(super().floating_point_ops(inputs) / self.args.world_size)
        finally:
            self.model = par

    # --- checkpoints

    def train(self, resume_from_checkpoint: str | bool | None = None, *others: Any, **options: Any) -> Any:
        """Train as the Trainer does; ``resume_from_checkpoint=True`` takes the last complete checkpoint."""
        if resume_from_checkpoint is True:
            resume_from_checkpoint = _last_complete(Path(self.args.output_dir))
        return super().train(resume_from_checkpoint, *others, **options)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Write files for ``from_pretrained``, on all ranks; inside the Trainer's checkpoints ``par.save`` writes the weights."""
        folder = Path(output_dir or self.args.output_dir)
        if not _internal_call:
            self.model.save_pretrained(folder)
            if self.processing_class is not None and self.args.should_save:
                self.processing_class.save_pretrained(folder)
            return
        folder.mkdir(parents=True, exist_ok=True)  # every rank looks for it next, to note where the best model is
        if self.args.save_only_model:
            self.model.save(folder / _WEIGHTS)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        self.model.save(Path(output_dir, _WEIGHTS), self._inner_optimizer(), scheduler=self.lr_scheduler)

    def _save_rng_state(self, output_dir: str) -> None:
        """Do nothing: ``par.save`` has written the random states."""

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        """Check the checkpoint only: the model is loaded later, together with the optimizer."""
        if not Path(resume_from_checkpoint, _WEIGHTS).is_dir():
            raise UsageError(
                f"{resume_from_checkpoint} is no checkpoint of autopar's Trainer",
                fix="Weights of another training are loaded into the model before autopar.parallelize",
            )

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is not None:
            self.model.load(Path(checkpoint, _WEIGHTS), self._inner_optimizer(), scheduler=self.lr_scheduler)
            self._restored = random_states(self.model.device)

    def _load_rng_state(self, checkpoint: str | None) -> None:
        """Restore the random states of the checkpoint, since skipping samples has changed them."""
        if self._restored is not None:
            put_random_states(self._restored, self.model.device)

    def _load_best_model(self) -> None:
        self.model.load(Path(self.state.best_model_checkpoint, _WEIGHTS))

    def _inner_optimizer(self) -> torch.optim.Optimizer:
        """Return the optimizer without accelerate's wrapper."""
        return cast("torch.optim.Optimizer", getattr(self.optimizer, "optimizer", self.optimizer))


class Seq2SeqTrainer(Trainer, transformers.Seq2SeqTrainer):  # type: ignore[misc]
    """``transformers.Seq2SeqTrainer`` for a parallel model, without ``predict_with_generate``."""


def _checked(model: object, args: transformers.TrainingArguments, options: Mapping[str, Any]) -> nn.Module:
    """Return the original model, after a check of the Trainer's arguments.

    Raises:
        UsageError: see :class:`Trainer`.
    """
    if not isinstance(model, ParallelModel):
        raise UsageError(
            f"The Trainer of autopar was given a {type(model).__name__}, not a parallel model",
            fix="Write Trainer(model=autopar.parallelize(model, ...), ...)",
        )
    batch = model.plan.global_batch_size
    if args.per_device_train_batch_size != batch or args.per_device_eval_batch_size > batch:
        raise UsageError.mismatch(
            "The batch of the Trainer (for which all ranks are one device) and that of the plan",
            expected=f"per_device_train_batch_size={batch}, and at most as many in evaluation",
            got=f"{args.per_device_train_batch_size} and {args.per_device_eval_batch_size}",
            fix="Set both per_device_..._batch_size, or plan with another global_batch_size",
        )
    check_precision(model, args.mixed_precision)
    if options.get("compute_loss_func") is not None or args.label_smoothing_factor:
        raise UsageError.unsupported(
            "A loss that the Trainer computes (compute_loss_func, label_smoothing_factor)",
            instead="Give it to the plan: autopar.parallelize(model, loss_fn=...)",
        )
    if args.auto_find_batch_size or options.get("model_init") is not None:
        raise UsageError.unsupported(
            "Another batch size or model in the course of a training (auto_find_batch_size, model_init)",
            instead="Search a plan that fits: autopar.parallelize(model, global_batch_size=...)",
        )
    for name, instead in _SETTLED.items():
        if getattr(args, name, None):
            raise UsageError.unsupported(f"TrainingArguments({name}=...) with a parallel model", instead=instead)
    original = model.original_model
    if original is None:
        raise UsageError(
            "The model that was given to autopar.parallelize is gone, and the Trainer looks at its forward and its layers",
            fix="Keep a reference to it until the Trainer is made",
        )
    return original


def _is_causal(model: nn.Module) -> bool:
    """Return whether the loss of a model ignores the first label."""
    is_causal = getattr(model, "loss_function", None) is ForCausalLMLoss
    return is_causal and not getattr(getattr(model, "config", None), "is_encoder_decoder", False)


def _last_complete(root: Path) -> str:
    """Return the last complete checkpoint of a training. One whose save was interrupted has no state of the Trainer.

    Raises:
        UsageError: there is none.
    """
    prefix = f"{PREFIX_CHECKPOINT_DIR}-"
    complete = (path.parent for path in root.glob(f"{prefix}*/{_STATE}"))
    numbered = [path for path in complete if path.name.removeprefix(prefix).isdecimal()]  # copies have other names
    if not numbered:
        raise UsageError(
            f"No complete checkpoint in {root}", fix="Call trainer.train() without resume_from_checkpoint to begin"
        )
    return str(max(numbered, key=lambda path: int(path.name.removeprefix(prefix))))
