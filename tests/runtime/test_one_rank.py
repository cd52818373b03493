import copy
import gc
import io
import math
import pickle
import re
import weakref
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import autopar
from autopar import api
from autopar.errors import AutoparError, PlanError, RankFailedError, UsageError
from autopar.plan.mesh import Mesh
from autopar.plan.plan import BF16, PRECISIONS
from autopar.runtime.launch import launch
from autopar.runtime.parallel_model import ParallelModel
from autopar.runtime.step.gradients import BucketedSums, RankParameter, unshare_gradients
from autopar.tracing.trace import trace
from autopar.verification.reference import adamw, loss_of
from tests.support.close import assert_close
from tests.support.distributed.oddities import Above
from tests.support.distributed.plans import make_plan
from tests.support.distributed.subjects import graph_of
from tests.support.lower.unusual import Around, Marked
from tests.support.parallel import SMALL, alone, halve, small
from tests.support.said import refuses
from tests.support.small_models import model_of

pytestmark = pytest.mark.usefixtures("one_rank")

Batch = dict[str, Tensor]


def test_a_load_that_is_refused_is_told_in_a_line_and_changes_no_state(
    parallel: Any, batch: Batch, tmp_path: Path
) -> None:
    """A parameter without a gradient has none; a step that makes them would move the averages of all others."""
    optimizer = adamw(parallel.parameters())
    parallel.train_step(batch)
    optimizer.step()
    optimizer.state.pop(optimizer.param_groups[0]["params"][0])
    before = copy.deepcopy(list(optimizer.state.values()))
    parallel.save(tmp_path, torch.optim.SGD(parallel.parameters(), lr=0.1))
    lacks = r"it lacks optimizer\.\S+\.exp_avg and \d+ more.*the kind of optimizer that was saved"
    for path, said in ((tmp_path / "nowhere", "Cannot read the checkpoint .*nowhere: .*par.save"), (tmp_path, lacks)):
        caught = refuses(PlanError, said, parallel.load, path, optimizer)
        assert "\n" not in str(caught)
        assert_close([dict(state) for state in optimizer.state.values()], [dict(state) for state in before], 0.0)


def test_batches_that_do_not_fit_are_refused(parallel: ParallelModel, batch: Batch) -> None:
    wanted = parallel.evaluate(batch).item()
    uneven = {name: value[: 6 + (name == "labels")] for name, value in batch.items()}
    short = {name: value[:, :8] for name, value in batch.items()}
    for given, said in (
        ({"input_ids": batch["input_ids"]}, r"Expected input_ids, attention_mask, labels, got input_ids"),
        (SMALL.make_batch(10, seed=0), r"input_ids has 10 samples.*8 \(the complete global batch\) or fewer"),
        (SMALL.make_batch(0, seed=0, padded=False), r"input_ids has 0 samples"),
        (uneven, r"numbers of samples: 6 of input_ids, 6 of attention_mask, 7 of labels"),
        (short, r"input_ids has shape \(8, 8\), but the plan takes \(samples, 16\)\. Pad"),
        ({**batch, "input_ids": batch["input_ids"].float()}, r"Expected int64, got float32\. Cast it"),
        (list(batch.values()), r"The batch is a list, not a dict.*'input_ids': .*'labels'"),
    ):
        refuses(UsageError, said, parallel.train_step, given)
    whole = {name: value.int() for name, value in batch.items()}
    assert parallel.train_step(whole).item() == pytest.approx(wanted, rel=1e-6)


def test_what_a_step_cannot_take_is_refused(parallel: ParallelModel, batch: Batch) -> None:
    wanted = parallel.evaluate(batch).item()
    said = r"needs gradients, but they are off \(torch\.inference_mode\)\. Call par\.evaluate"
    with torch.inference_mode(), pytest.raises(UsageError, match=said):
        parallel.train_step(batch)
    for call in (parallel.train_step, parallel.evaluate, lambda b: parallel(**b)):
        said = r"inside torch\.autocast to bfloat16: the plan computes in float32"
        with torch.autocast("cpu", torch.bfloat16), pytest.raises(UsageError, match=said):
            call(batch)
    with torch.inference_mode():
        made = {name: value.clone() for name, value in batch.items()}
    assert parallel.train_step(made).item() == pytest.approx(wanted, rel=1e-6)


def test_inputs_that_need_gradients_are_refused() -> None:
    traced = api.trace(of_sides(), example_inputs=sides(torch.float32))
    parallel = alone(of_sides(), traced, micro=2)
    given = sides(torch.float32)["sides"]
    given["left"].requires_grad_()
    for call in (parallel.train_step, lambda batch: parallel(**batch)):
        refuses(UsageError, r"sides_left requires a gradient.*Call detach\(\)", call, {"sides": given})
    parallel.evaluate({"sides": given})


def test_states_of_the_models_own_optimizer_are_refused(parallel: ParallelModel, batch: Batch) -> None:
    """Its parameters have another order: they went to others of the same shape."""
    model = SMALL.build()
    theirs, mine = (adamw(list(m.parameters())[:2]) for m in (model, parallel))
    loss_of(model(**batch)).backward()
    theirs.step()
    parallel.train_step(batch)
    before = mine.state_dict()
    mine.load_state_dict(theirs.state_dict())
    refuses(UsageError, r"a state 'exp_avg' that was loaded.*par\.load carry", mine.step)
    mine.load_state_dict(before)
    mine.step()
    mine.load_state_dict(mine.state_dict())
    mine.step()


def test_plan_for_another_model_is_refused() -> None:
    plan = make_plan(graph_of(SMALL), Mesh(), global_batch_size=8, micro_batch_size=2)
    wrong = replace(plan, model=replace(plan.model, fingerprint="0" * 16, name="other"))
    with pytest.raises(PlanError, match="made for model 'other', not for 'gpt2'"):
        launch(SMALL.build(), lambda: (wrong, graph_of(SMALL)), device_type="cpu")


@pytest.mark.parametrize("way", ["train_step", "backward"])
def test_gradients_of_steps_add_up_without_those_that_failed(parallel: ParallelModel, batch: Batch, way: str) -> None:
    parallel.train_step(batch)
    once = parallel.full_gradients()
    if way == "train_step":
        bad = {**batch, "labels": batch["labels"].clone()}
        bad["labels"][5] = 10**6
        refuses(IndexError, "out of bounds", parallel.train_step, bad)
    else:
        loss = parallel(**batch).loss
        first = next(iter(parallel._assembly.held)).leaf
        stop_there = first.register_hook(lambda _: {}["nothing"])
        refuses(KeyError, "nothing", loss.backward)
        stop_there.remove()
    parallel.train_step(batch)
    for name, tensor in parallel.full_gradients().items():
        assert_close(tensor, 2 * once[name], place=name)


def _joined(self: nn.Module, x: Tensor) -> Tensor:
    return ((torch.cat([self.a, self.b]) + self.c.view(5, 8) + x).sin() ** 2).sum()


@pytest.mark.parametrize("way", ["train_step", "backward"])
@pytest.mark.parametrize("micro", [1, 4])
def test_parameters_that_one_gradient_reaches_hold_it_apart(micro: int, way: str) -> None:
    """Torch keeps it in one memory: in a loop of its own what comes second is added to each of them twice."""
    kind = {name: nn.Parameter(torch.randn(shape)) for name, shape in (("a", (2, 8)), ("b", (3, 8)), ("c", (40,)))}
    model, batch = model_of(_joined, **kind), {"x": torch.randn(4, 5, 8)}
    parallel = alone(copy.deepcopy(model), api.trace(model, example_inputs=batch), micro=micro)
    for _ in range(2):
        parallel.train_step(batch) if way == "train_step" else parallel(**batch).backward()
    _joined(model, **batch).backward()
    norm = parallel.clip_grad_norm_(1.0)
    for name, tensor in parallel.full_gradients().items():
        assert_close(tensor, 2 / norm * model.get_parameter(name).grad, place=name)


def _late(self: nn.Module, x: Tensor) -> Tensor:
    weight = self.a.view(8, 8) + self.b.view(8, 8)
    return Marked.apply(x, weight.expand(len(x), 8, 8)).square().mean()


def test_gradients_that_a_later_micro_batch_leaves_in_one_memory_are_held_apart() -> None:
    """The first two give none, and the last two are added up."""
    model = model_of(_late, **{name: nn.Parameter(torch.randn(64)) for name in "ab"})
    x = torch.randn(4, 8)
    parallel = alone(copy.deepcopy(model), api.trace(model, example_inputs={"x": x}), micro=1)
    x[:2, 0] = -10.0
    parallel.train_step({"x": x})
    (_late(model, x[2:]) / 2).backward()
    for name, tensor in parallel.full_gradients().items():
        assert_close(tensor, model.get_parameter(name).grad, place=name)


def test_gradients_that_are_parts_of_one_tensor_are_not_copied() -> None:
    """As FSDP's are; the one that overlaps others is."""
    whole = torch.randn(6, 4)
    grads = whole[:2], whole.view(24), whole[2:], whole[:0]
    parameters = [nn.Parameter(torch.zeros(grad.shape)) for grad in grads]
    for parameter, grad in zip(parameters, grads, strict=True):
        parameter.grad = grad
    unshare_gradients(parameters)
    now = [parameter.grad for parameter in parameters]
    assert [one is grad for one, grad in zip(now, grads, strict=True)] == [True, False, True, True]
    assert all(one is not None and torch.equal(one, grad) for one, grad in zip(now, grads, strict=True))


def test_weights_that_change_before_a_backward_are_refused(parallel: ParallelModel, batch: Batch) -> None:
    parallel.train_step(batch)
    loss = parallel(**batch).loss
    parallel.train_step(batch)
    adamw(parallel.parameters()).step()
    refuses(UsageError, r"more written between par\(\*\*batch\) and the backward\(\)", loss.backward)
    parallel(**batch).loss.backward()


def test_a_steps_loss_is_neither_passed_back_nor_scaled_again(parallel: ParallelModel, batch: Batch) -> None:
    """A scaler would divide gradients by what has not scaled them."""
    loss = parallel.train_step(batch)
    refuses(UsageError, r"loss.backward\(\) was called after.*Leave backward\(\) out", loss.backward)
    refuses(UsageError, "already run the backward pass", (loss / 4).backward)
    scaler = torch.amp.GradScaler("cpu")
    refuses(UsageError, "GradScaler cannot scale the loss of par.train_step.*Leave", scaler.scale, loss)
    assert torch.amp.GradScaler("cpu", enabled=False).scale(loss) is loss
    assert repr(loss).startswith("tensor(")
    for other in (loss * 4, loss.detach(), copy.deepcopy(loss), pickle.loads(pickle.dumps(loss)), torch.stack([loss])):
        assert type(other) is Tensor


def test_the_norm_is_as_exact_as_the_parameters() -> None:
    model, batch = of_sides().double(), sides(torch.float64)
    fine = api.trace(model, example_inputs=batch, precision="fp64")
    parallel = alone(model, fine, precision=PRECISIONS["fp64"])
    model(**batch).backward()
    parallel.train_step({"sides": batch["sides"]})
    wanted = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5).item()
    assert parallel.clip_grad_norm_(0.5).item() == pytest.approx(wanted, rel=1e-12)


def test_what_fsdp_keeps_of_a_step_that_failed_is_refused(batch: Batch) -> None:
    parallel = small(precision=BF16)
    refuses(UsageError, "inputs of the batch", parallel.train_step, {})
    parallel.train_step(batch)
    refuses(IndexError, "out of bounds", parallel.train_step, {**batch, "labels": batch["labels"] + 10**6})
    with pytest.raises(RankFailedError, match=r"rank 0: IndexError: Target \d+ is out of bounds.* Correct what"):
        parallel.train_step(batch)


def test_parameters_may_be_frozen_after_the_plan_was_made_and_not_thawed(parallel: ParallelModel, batch: Batch) -> None:
    name, frozen = next((n, p) for n, p in parallel.named_parameters() if n.endswith("c_attn.weight[0:32]"))
    frozen.requires_grad_(False)
    parallel.train_step(batch)
    assert frozen.grad is None, name
    assert all(p.grad is not None for p in parallel.parameters() if p is not frozen)
    frozen.requires_grad_(True)
    parallel.train_step(batch)
    assert frozen.grad is not None, name

    model = SMALL.build()
    model.transformer.wpe.weight.requires_grad_(False)
    known = trace(model, kwargs=SMALL.make_batch(2, seed=0), name=graph_of(SMALL).name)
    parallel = alone(model, known, batch=8, micro=2)
    parallel.train_step(batch)
    dict(parallel.named_parameters())["transformer.wpe.weight"].requires_grad_(True)
    refuses(UsageError, r"transformer\.wpe\.weight cannot learn: frozen.*Set requires_grad", parallel.train_step, batch)


def test_hooks_on_parameters_that_would_not_be_called_are_refused(parallel: ParallelModel, batch: Batch) -> None:
    parameter = next(iter(parallel.parameters()))
    for register in (parameter.register_hook, parameter.register_post_accumulate_grad_hook):
        handle = register(lambda _: None)
        with pytest.raises(UsageError, match=r"A hook on a parameter \(transformer\.\S+\) is not supported.* change"):
            parallel.train_step(batch)
        handle.remove()
    parallel.train_step(batch)


def test_an_optimizer_of_the_model_that_was_given_is_refused(batch: Batch) -> None:
    """It has no gradients there, and torch passes over such: nothing would be learnt, and nothing said."""
    model = SMALL.build()
    parallel = small(model)
    optimizer = adamw(model.parameters())
    parallel.train_step(batch)
    refuses(UsageError, r"AdamW has the parameters of the model before.*par\.parameters\(\)", optimizer.step)
    loss_of(model(**batch)).backward()
    optimizer.step()  # somebody trains the model itself as well


def test_a_learning_rate_in_a_tensor_is_kept(parallel: ParallelModel, tmp_path: Path) -> None:
    parallel.save(tmp_path, torch.optim.SGD(parallel.parameters(), lr=torch.tensor(0.25), foreach=True))
    fresh = torch.optim.SGD(parallel.parameters(), lr=torch.tensor(1.0), foreach=False)
    (group,) = fresh.param_groups
    rate = group["lr"]
    parallel.load(tmp_path, fresh)
    assert (group["lr"] is rate, rate.item()) == (True, 0.25)
    assert group["foreach"] is False, "how a job steps on its devices is its own"


class Unknown(torch.optim.SGD):
    """Derived from one that steps element by element: it may have a sum of its own."""


WRITES: dict[str, Callable[[nn.Parameter], object]] = {
    "data": lambda p: setattr(p, "data", p.data * 0.5), "whole": lambda p: setattr(p, "data", torch.zeros(p.shape)),
    "vector": lambda p: nn.utils.vector_to_parameters(nn.utils.parameters_to_vector([p]) * 0.5, [p]),
    "swapped": lambda p: torch.utils.swap_tensors(p, nn.Parameter(p.detach() * 0.5)),
}  # fmt: skip


@pytest.mark.parametrize("how", WRITES)
def test_a_parameter_is_written_in_place(parallel: ParallelModel, batch: Batch, how: str, tmp_path: Path) -> None:
    key, parameter = next(parallel.named_parameters())
    before, kept = parallel.train_step(batch).item(), parameter.detach().clone()
    parameter.data *= 0.5
    assert parallel.train_step(batch).item() != before
    parameter.data.copy_(kept)
    assert parallel.train_step(batch).item() == before
    WRITES[how](parameter)
    save = partial(parallel.save, tmp_path / "kept")
    for read in (partial(parallel.train_step, batch), parallel.full_state_dict, save):
        refuses(UsageError, rf"The memory of.*{re.escape(key)}.*distribute_tensor", read)
    assert not (tmp_path / "kept").exists()


@pytest.mark.slow
def test_torch_compile_of_an_optimizer_steps_as_it_does(batch: Batch) -> None:
    """Dynamo knows torch's own DTensors and none that are derived from them."""
    found = []
    gc.collect()  # models that other tests have left take their hooks out of what Dynamo goes through
    for compiled in (False, True):
        parallel = small()
        optimizer = torch.optim.AdamW(parallel.parameters(), lr=0.1, foreach=True)
        step = torch.compile(optimizer.step, backend="aot_eager") if compiled else optimizer.step
        parallel.train_step(batch)
        step()
        found.append(parallel.train_step(batch).item())
    assert found[0] == pytest.approx(found[1])


def test_a_model_that_is_left_goes_at_once_and_its_hooks_with_it(batch: Batch) -> None:
    """One in a circle of references stays until Python looks for circles, and steps of later optimizers go through its hooks."""
    gc.collect()
    gc.disable()
    try:
        parallel = small()
        parallel.train_step(batch)
        parallel.evaluate(SMALL.make_batch(3, seed=0))
        left = weakref.ref(parallel)
        del parallel
        assert left() is None
    finally:
        gc.enable()


def test_what_changes_in_the_model_too_late_is_told_of_once(batch: Batch, caplog: pytest.LogCaptureFixture) -> None:
    other = {name: p * 0.5 for name, p in SMALL.build().state_dict().items()}
    written = "parameters of the model have been written since autopar.parallelize (transformer.wte"
    changed = "have changed since autopar.parallelize (transformer.drop.p)"

    def told(words: str, change: Callable[[nn.Module, ParallelModel], object]) -> bool:
        caplog.clear()
        model = SMALL.build()
        parallel = small(model)
        change(model, parallel)
        for _ in range(2):
            parallel.train_step(batch)
        assert caplog.text.count(words) <= 1
        return words in caplog.text

    assert told(written, lambda model, _: model.load_state_dict(other))
    assert told(written, lambda model, _: model.load_state_dict(other, assign=True))
    assert told(changed, lambda model, _: setattr(model.transformer.drop, "p", 0.5))
    assert not told(written, lambda model, _: model.eval())
    assert "have hooks" not in caplog.text and "attributes" not in caplog.text
    assert not told(written, lambda model, _: model.get_submodule("transformer.h.0").register_forward_hook(print))
    assert "layers of the model have hooks (transformer.h.0), which no step calls" in caplog.text
    assert not told(written, lambda model, parallel: model.load_state_dict(parallel.full_state_dict()))


def test_an_optimizer_is_told_of_parts(parallel: ParallelModel, batch: Batch, caplog: pytest.LogCaptureFixture) -> None:
    named = dict(parallel.named_parameters())
    parallel.train_step(batch)
    every = list(named.values())
    torch.optim.Adafactor([named["transformer.h.0.mlp.c_fc.weight"]]).step()
    for kind in (torch.optim.AdamW, Unknown, Unknown):
        kind(every).step()
    (told,) = [record.getMessage() for record in caplog.records if record.name == "autopar"]
    assert "Unknown is not known to step element by element, and gets parts" in told
    assert "attn.c_attn.weight[0:32]" in told


def test_another_adafactor_than_torchs_is_refused(parallel: ParallelModel) -> None:

    optimizer = type("Adafactor", (Unknown,), {"__module__": "transformers.optimization"})(parallel.parameters())
    refuses(UsageError, r"The Adafactor of transformers is not supported\. Use torch\.optim\.Adafactor", optimizer.step)


def test_buckets_leave_after_the_last_backward() -> None:
    held = []
    for i in range(3):
        leaf = torch.nn.Parameter(torch.full((4,), float(i)))
        visible = torch.nn.Parameter(leaf.detach().clone())
        held.append(RankParameter(name=str(i), key=str(i), parameter=visible, leaf=leaf, group=dist.group.WORLD))
    sums = BucketedSums(held, bucket_bytes=32)
    sums.begin(2)
    for _ in range(2):
        sum((h.leaf * h.leaf).sum() for h in held[:2]).backward()
    sums.finish()
    for i, h in enumerate(held[:2]):
        assert torch.equal(h.parameter.grad, torch.full((4,), 4.0 * i))
        assert h.leaf.grad is None
    assert torch.equal(held[2].parameter.grad, torch.zeros(4))


def of_sides() -> nn.Module:
    """Two linear layers of one width each, on inputs in a dict."""

    def forward(self: Any, sides: dict[str, Tensor], scale: float = 1.0) -> Tensor:
        return (self.left(sides["left"]) + scale * self.right(sides["right"])).square().mean()

    torch.manual_seed(0)
    return model_of(forward, left=nn.Linear(4, 8), right=nn.Linear(6, 8))


def sides(dtype: torch.dtype) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(1)
    found = {name: torch.randn(4, n, generator=generator).to(dtype) for name, n in (("left", 4), ("right", 6))}
    return {"sides": found, "scale": 2.0}


@pytest.mark.parametrize(
    ("own", "precision"), [("float64", "fp32"), ("bfloat16", "fp32"), ("float32", "bf16"), ("float32", "fp32")]
)
def test_models_and_batches_of_any_dtype_are_computed_in_the_plans(own: str, precision: str) -> None:
    """Inputs in dicts too; what is no tensor is a constant of the plan."""
    dtype = getattr(torch, own)
    model, batch = of_sides().to(dtype), sides(dtype)
    recipe = PRECISIONS[precision]
    traced = api.trace(model, example_inputs=batch, precision=recipe.name)
    assert {p.spec.dtype for p in traced.parameters} == {getattr(torch, recipe.compute)}
    parallel = alone(model, traced, micro=2, precision=recipe)
    refuses(UsageError, "Leave out scale: what was no tensor", parallel.train_step, batch)
    found = parallel.train_step({"sides": batch["sides"]})
    assert found.item() == pytest.approx(model(**batch).item(), rel=2e-2 if "bf" in own + precision else 1e-6)


def own_norm(size: int) -> nn.Module:
    """A batch norm that may do what it likes in ``eval()``."""
    forward = lambda self, x: nn.functional.batch_norm(x, self.mean, self.variance, training=True)
    return model_of(forward, mean=nn.Buffer(torch.zeros(size)), variance=nn.Buffer(torch.ones(size)))


class CountingNorm(nn.BatchNorm1d):
    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.seen = nn.Buffer(torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.seen.add_(1.0)
        return super().forward(x)


NORMS = {
    "statistics": nn.BatchNorm1d, "own": own_norm, "input": partial(nn.BatchNorm1d, affine=False),
    "counting": CountingNorm,
}  # fmt: skip


def drops_samples(self: Any, x: Tensor) -> Tensor:
    """Stochastic depth: a sample loses the whole branch, in training alone."""
    kept = (0.5 + torch.rand(x.shape[0], 1, dtype=x.dtype)).floor() if self.training else None
    return x if kept is None else x.div(0.5) * kept


def averages(self: Any, x: Tensor) -> Tensor:
    """Scales by a moving average that training alone moves, and then reads."""
    if self.training:
        self.average.mul_(0.9).add_(x.detach().mean())
    return x * self.average


def picks(self: Any, x: Tensor) -> Tensor:
    """Takes an element by chance in training, and else the largest, whose place training does not read."""
    values, places = x.max(1)
    places = torch.randint(0, 8, (len(x),)) if self.training else places
    return x.gather(1, places[:, None]) + values[:, None]


def two_losses(self: Any, x: Tensor) -> Tensor:
    loss = self.first(x).square().mean()
    return loss + self.second(x).abs().mean() if self.training else loss


def noisy(kind: str) -> nn.Module:
    """Dropout, or what else training and ``eval()`` may do in different ways."""
    own: dict[str, Callable[..., Any]] = {
        "doubled": lambda self, x: 2.0 * x if self.training else x,
        "dropped": lambda self, x: nn.functional.dropout(x, 0.5, self.training),
        "depth": drops_samples,
        "noise": lambda self, x: x + torch.rand_like(x),
        "drawn": lambda self, x: x * (torch.rand_like(x) < 2.0),
        "more": lambda self, x: x if self.training else x.tanh(),
        "averages": averages,
        "picks": picks,
    }

    def forward(self: Any, x: Tensor) -> Tensor:
        x = self.drop(x) if kind == "inputs" else x
        x = self.first(self.norm(x)) if kind == "input" else self.norm(self.first(x))
        return self.own(self.drop(x)).square().mean()

    torch.manual_seed(0)
    if kind == "losses":
        return model_of(two_losses, first=nn.Linear(8, 8), second=nn.Linear(8, 8))
    parts = {"own": model_of(own.get(kind, lambda self, x: x), average=nn.Buffer(torch.tensor(3.0)))}
    first = nn.utils.parametrizations.spectral_norm(nn.Linear(8, 8)) if kind == "spectral" else nn.Linear(8, 8)
    drop, norm = nn.Dropout(0.5), NORMS.get(kind, nn.Identity)(8)
    return model_of(forward, first=first, drop=drop, norm=norm, **parts)


@pytest.mark.parametrize(("kind", "opaque", "value"), [
    ("dropout", (), ""), ("dropout", ("drop",), ""), ("inputs", (), ""), ("statistics", (), ""), ("input", (), ""),
    ("own", (), "changes its buffer norm.mean in eval"), ("counting", (), "changes its buffer norm.seen in eval"), ("drawn", (), ""), ("doubled", (), ""), ("dropped", (), ""),
    ("depth", (), ""), ("losses", (), ""), ("spectral", (), ""), ("picks", (), ""), ("averages", (), ""), ("more", (), "calls aten.tanh"),
])  # fmt: skip
def test_an_evaluation_is_that_of_eval_or_says_what_it_lacks(kind: str, opaque: tuple[str, ...], value: str) -> None:
    model, batch = noisy(kind).double(), {"x": torch.randn(4, 8, dtype=torch.float64)}
    traced = api.trace(model, example_inputs=batch, opaque=opaque, global_batch_size=4, precision="fp64")
    parallel = alone(model, traced, precision=PRECISIONS["fp64"])
    if value:
        refuses(UsageError, f"cannot be evaluated.*{value}.* Put par.full_state_dict", parallel.evaluate, batch)
        return
    is_partial = kind not in ("averages",)  # its samples meet, in training
    model.eval()
    for _ in range(2):
        model.load_state_dict(parallel.full_state_dict())
        for found in (batch, {"x": batch["x"][:3]})[: 1 + is_partial]:
            assert parallel.evaluate(found).item() == pytest.approx(model(**found).item(), rel=1e-6)
        assert kind == "drawn" or parallel.train_step(batch).item() != pytest.approx(model(**batch).item(), rel=1e-3)


def test_a_gradient_that_the_trace_did_not_see_is_refused() -> None:
    """It would go back on those ranks alone whose samples have it."""
    model = Around(partial(Above, 3.0))
    batch = {"x": torch.zeros(4, 8), "y": torch.zeros(4, dtype=torch.int64)}
    parallel = alone(model, api.trace(model, example_inputs=batch, global_batch_size=4))
    parallel.train_step(batch)
    with torch.no_grad():
        for parameter in parallel.parameters():
            parameter.fill_(4.0)
    refuses(AutoparError, "a gradient that had none on the inputs of the trace", parallel.train_step, batch)


def test_every_evaluation_draws_numbers_of_its_own() -> None:
    model, batch = noisy("noise"), {"x": torch.randn(4, 8)}
    parallel = alone(model, api.trace(model, example_inputs=batch, global_batch_size=4))
    losses = {parallel.evaluate(batch).item() for _ in range(3)}
    assert len(losses) == 3


@pytest.mark.parametrize("is_frozen", [False, True])
def test_batch_norms_compute_low_by_statistics_in_the_models_dtype(is_frozen: bool) -> None:
    model, batch = noisy("statistics").train(), {"x": torch.randn(4, 8)}
    model.drop.eval()
    model.norm.train(not is_frozen)
    traced = api.trace(model, example_inputs=batch, global_batch_size=4, precision="bf16")
    parallel = alone(model, traced, precision=BF16)
    assert parallel.train_step(batch).item() == pytest.approx(model(**batch).item(), rel=2e-2)
    assert_close(parallel.full_state_dict(), model.state_dict(), 2e-2)
    assert parallel.evaluate(batch).item() == pytest.approx(model.eval()(**batch).item(), rel=2e-2)


@pytest.mark.parametrize("kind", ["statistics", "input", "exact"])
def test_a_smaller_batch_of_samples_that_depend_on_each_other_is_refused(kind: str) -> None:
    model, batch = noisy(kind), {"x": torch.randn(4, 8)}
    loss = (lambda output, given: output * len(given["x"])) if kind == "exact" else None
    traced = api.trace(model, example_inputs=batch, global_batch_size=4, loss_fn=loss)
    parallel = alone(model, traced)
    parallel.train_step(batch)
    for size, why in {
        3: r"divides 4, or none. .*drop_last=True.* or make it one of 2 or 4 samples; evaluations take any number",
        1: "of one sample a batch norm has no statistics. .*drop_last=True",
    }.items():
        why = "numbers in this model count samples. .*drop_last=True" if kind == "exact" else why
        said = rf"A batch of {size} samples is smaller than that of the plan \(4\).*{why}"
        refuses(UsageError, said, parallel.train_step, {"x": batch["x"][:size]})
    parallel.train_step(batch)


def test_a_group_that_was_saved_as_several_is_refused(parallel: ParallelModel, tmp_path: Path) -> None:
    parameters = list(parallel.parameters())
    groups = [{"params": parameters[:2], "lr": 0.5}, {"params": parameters[2:], "lr": 0.25}]
    parallel.save(tmp_path, torch.optim.SGD(groups))
    before = parallel.full_state_dict()
    halve(parallel)
    one = torch.optim.SGD(parameters, lr=1.0)
    with pytest.raises(PlanError, match=r"saved with different hyperparameters: lr 0.5 of .* and 0.25 of .*in one"):
        parallel.load(tmp_path, one)
    assert one.param_groups[0]["lr"] == 1.0
    assert all(torch.equal(value, 0.5 * before[name]) for name, value in parallel.full_state_dict().items())
    several = torch.optim.SGD([{"params": [p]} for p in parameters], lr=1.0)
    parallel.load(tmp_path, several)
    assert [group["lr"] for group in several.param_groups] == [0.5] * 2 + [0.25] * (len(parameters) - 2)


def parallelized(model: nn.Module, size: int = 4, **options: Any) -> ParallelModel:
    options = {"cluster": "cpu:1x1", "example_inputs": [torch.ones(size, 4)], "global_batch_size": size} | options
    return autopar.parallelize(model, **options)


def test_a_tensor_on_meta_that_is_no_buffer_is_refused_by_name() -> None:
    with torch.device("meta"):
        parts = {"linear": nn.Linear(4, 4), "factor": torch.arange(4.0)}
    model = model_of(lambda self, x: (self.linear(x) * self.factor).square().mean(), **parts)
    refuses(UsageError, "factor.*was made on meta and has no value", parallelized, model)


def test_a_configuration_that_cannot_be_written_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    """As by transformers, whose ``save_pretrained`` refuses generation configurations that contradict themselves."""
    model = SMALL.build()
    model.generation_config.do_sample, model.generation_config.temperature = False, 0.5
    said = r"transformers does not write the model's configuration.*Correct model\.config or"
    refuses(UsageError, said, small(model).save_pretrained, tmp_path / "weights")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("given", "said"), [
    *(({name: value}, f"{name} takes a path, but got {value!r}") for name in ("weights", "log_dir") for value in (3, "")),
    *(({"seed": value}, f"The seed is {value!r}") for value in ("x", True, 2**63)),
    *(({"collective_timeout_s": value}, f"The collective_timeout_s is {value!r}") for value in (True, "x", math.nan)),
    ({"log_dir": __file__}, "Cannot write .*autopar-run.jsonl"),
])  # fmt: skip
def test_what_no_run_can_have_is_refused(given: dict[str, Any], said: str) -> None:
    refuses(UsageError, said, parallelized, nn.Linear(4, 4), 2, loss_fn=lambda y, batch: y.mean(), **given)


def test_a_save_that_is_refused_leaves_nothing(tmp_path: Path) -> None:
    par, taken = small(SMALL.build()), tmp_path / "taken"
    taken.write_text("")
    new, other = tmp_path / "new", torch.optim.SGD(nn.Linear(2, 2).parameters())
    refuses(UsageError, "Cannot write the weights", par.save_pretrained, taken)
    for size in (0, True, -5, math.nan, None, "5 parsecs"):
        refuses(UsageError, "The max_shard_size is ", par.save_pretrained, new, max_shard_size=size)
    refuses(UsageError, "Cannot write the checkpoint", par.save, taken)
    for save, path in ((par.save, 3), (par.save, ""), (par.save_pretrained, "")):
        refuses(UsageError, f"path takes a path, but got {path!r}", save, path)
    refuses(UsageError, "no parameter of this model", par.save, new, other)
    refuses(UsageError, "The optimizer is a int", par.load, tmp_path, 3)
    assert list(tmp_path.iterdir()) == [taken]


@pytest.mark.parametrize("x", [torch.ones(2, 4, device="meta"), torch.ones(2, 4).to_sparse()], ids=["meta", "sparse"])
def test_a_batch_without_dense_values_is_refused(x: torch.Tensor) -> None:
    par = parallelized(nn.Linear(4, 4), 2, loss_fn=lambda y, batch: y.mean())
    refuses(UsageError, "Pass a dense tensor with values", par.train_step, {"input": x})


def test_a_model_that_runs_as_a_whole_is_told_with_the_line(caplog: pytest.LogCaptureFixture) -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        return self.linear(x).square().mean() * (1.0 if x.sum().item() < 1e9 else 2.0)

    parallelized(model_of(forward, linear=nn.Linear(4, 4)))
    assert "the whole model runs as it is written" in caplog.text
    assert f"test_one_rank.py:{forward.__code__.co_firstlineno + 1}" in caplog.text


def test_two_models_whose_modules_share_parameters_are_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    shared = nn.Linear(4, 4)
    one, other = (nn.Sequential(shared, nn.Linear(4, size)) for size in (2, 3))
    batch = {"input": torch.randn(2, 4)}
    given = {"cluster": "cpu:1x1", "example_inputs": batch, "loss_fn": lambda output, batch: output.sum()}
    caplog.set_level("WARNING")
    kept = [autopar.parallelize(model, **given) for model in (one, copy.deepcopy(one), one)]
    assert not caplog.text
    kept.append(autopar.parallelize(other, **given))
    assert "2 parameters of this model, such as 0.weight, are in another parallel model too" in caplog.text
    torch.save(one, io.BytesIO())  # a mark that the modules have is no part of it
    caplog.clear()
    shared.requires_grad_(False)
    kept.append(autopar.parallelize(nn.Sequential(shared, nn.Linear(4, 5)), **given))
    assert not caplog.text
