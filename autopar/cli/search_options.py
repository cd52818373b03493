"""The options of ``autopar search`` alone."""

from __future__ import annotations

from typing import Annotated

import typer

Space = Annotated[
    str, typer.Option(metavar="NAME|FILE", help="What may be chosen: quick, default, wide, exhaustive or a file.")
]
Trials = Annotated[int | None, typer.Option(min=1, metavar="N", help="At most so many trials.")]
Timeout = Annotated[float | None, typer.Option(min=0, metavar="S", help="At most so many seconds.")]
Storage = Annotated[
    str | None,
    typer.Option(
        metavar="URL",
        help="Optuna storage in which trials are kept, for a later search or other machines: sqlite:///study.db, "
        "postgresql://user@host/database, journal:///study.log.",
    ),
]
StudyName = Annotated[
    str | None,
    typer.Option("--study-name", metavar="NAME", help="Of the study in --storage, if not named by what it is of."),
]
Workers = Annotated[
    int | None,
    typer.Option(
        min=1,
        metavar="N",
        help="Processes; the plan is the same for any number. If not given, as many as cores, at most 4; with --storage 1.",
    ),
]
Sampler = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="tpe, cmaes or nsga2 asks for a part of the candidates, none for nothing; if not given, as the space says.",
    ),
]
Seed = Annotated[int, typer.Option(min=0, metavar="N", help="Of the sampler.")]
MaxStepTime = Annotated[
    float | None, typer.Option("--max-step-time", min=0, metavar="S", help="Slower plans do not count.")
]
Minimize = Annotated[
    str | None,
    typer.Option(
        metavar="devices|price",
        help="The smallest or cheapest cluster, up to that of --cluster, with a plan within --max-step-time.",
    ),
]
Price = Annotated[
    list[str] | None,
    typer.Option(metavar="DEVICE=P", help="With --minimize price or --pareto: of one device for an hour; repeatable."),
]
OrCluster = Annotated[
    list[str] | None,
    typer.Option(metavar="CLUSTER", help="With --minimize price or --pareto: clusters to choose from too; repeatable."),
]
Sweep = Annotated[
    str | None,
    typer.Option(
        metavar="NAME=F,F,...",
        help="Plans with a number of the cluster times each factor: link.bandwidth=0.5,1,2; also link.latency, "
        "node.bandwidth, network.bandwidth, device.memory, device.bandwidth, device.matmul, device.launch.",
    ),
]
Pareto = Annotated[
    str | None,
    typer.Option(
        metavar="A,B,...",
        help="Plans that no other one beats in all of these: time, memory (left over), devices, price (with --price).",
    ),
]
LongestSequence = Annotated[
    bool, typer.Option("--longest-sequence", help="The longest sequence with a plan, in multiples of --sequence-step.")
]
SequenceStep = Annotated[
    int | None, typer.Option(min=1, metavar="N", help="Tokens, for --longest-sequence; 1024 if not given.")
]
LargestBatch = Annotated[
    bool,
    typer.Option(
        "--largest-batch", help="The largest batch, up to --global-batch, that fits without gradient accumulation."
    ),
]
