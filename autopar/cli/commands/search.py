"""``autopar search``: the fastest plan, or another question of the same search."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from autopar.cli import search_options as only
from autopar.cli.make_plan import Output, check_output, give, make_plan, save
from autopar.cli.options import (
    ClusterOption,
    GlobalBatch,
    Json,
    Model,
    Opaque,
    Optimizer,
    Pin,
    PrecisionOption,
    Sequence_,
    split_pins,
)
from autopar.errors import UsageError

if TYPE_CHECKING:
    from autopar.cli.commands.questions import Question


def search(
    model: Model,
    cluster: ClusterOption,
    global_batch: GlobalBatch,
    seq: Sequence_ = None,
    precision: PrecisionOption = "fp32",
    optimizer: Optimizer = "adamw",
    pin: Pin = None,
    opaque: Opaque = None,
    space: only.Space = "default",
    trials: only.Trials = None,
    timeout: only.Timeout = None,
    storage: only.Storage = None,
    study_name: only.StudyName = None,
    workers: only.Workers = None,
    sampler: only.Sampler = None,
    seed: only.Seed = 0,
    max_step_time: only.MaxStepTime = None,
    minimize: only.Minimize = None,
    price: only.Price = None,
    or_cluster: only.OrCluster = None,
    sweep: only.Sweep = None,
    pareto: only.Pareto = None,
    longest_sequence: only.LongestSequence = False,
    sequence_step: only.SequenceStep = None,
    largest_batch: only.LargestBatch = False,
    output: Output = None,
    as_json: Json = False,
) -> None:
    """Find the fastest plan that fits; exits with 3 and names the conflict when there is none.

    One of --minimize, --sweep, --pareto, --longest-sequence and --largest-batch asks another question of the same search.
    """
    from autopar.cli.commands.questions import Question

    check_output(output)
    question = Question(
        minimize=minimize, prices=tuple(price or ()), others=tuple(or_cluster or ()), sweep=sweep, pareto=pareto,
        longest_sequence=longest_sequence, sequence_step=sequence_step, largest_batch=largest_batch,
    )  # fmt: skip
    question.check()
    common: dict[str, Any] = {
        "cluster": cluster, "global_batch_size": global_batch, "sequence": seq, "precision": precision,
        "optimizer": optimizer, "pins": split_pins(pin or ()), "opaque": opaque or [],
    }  # fmt: skip
    options = {"trials": trials, "timeout_s": timeout, "storage": storage, "study_name": study_name, "workers": workers,
               "sampler": sampler, "seed": seed or None}  # fmt: skip
    if not question.asked:
        from autopar.planner.branch_and_bound.process_group import cores  # numpy is slow to import

        own = cores() if storage is None else 1
        options |= {
            "seed": seed,
            "space": space,
            "max_step_time_s": max_step_time,
            "workers": own if workers is None else workers,
        }
        give(make_plan("search", model, **common, options=options), output, as_json)
        return
    _check_alone(options, question, output is not None)
    from autopar.cli.commands.questions import answer

    plan = answer(question, model, **common, space=space, max_step_time_s=max_step_time, as_json=as_json)
    if output is not None and plan is not None:
        save(plan, output)


def _check_alone(options: dict[str, Any], question: Question, has_output: bool) -> None:
    """Refuse options of the search for the fastest plan beside another question, which would not heed them.

    Raises:
        UsageError: names them.
    """
    given = [name for name, value in options.items() if value is not None]
    if given:
        raise UsageError(
            f"--{given[0].removesuffix('_s').replace('_', '-')} does not go with {question.asked[0]}",
            fix="Leave it out: --trials, --timeout, --storage, --study-name, --workers, --sampler and --seed are for the search for "
            "the fastest plan",
        )
    if has_output and question.sweep is not None:
        raise UsageError(
            "--output cannot take the plans of --sweep, one for each factor",
            fix="Leave --output out, or search with that cluster alone",
        )
