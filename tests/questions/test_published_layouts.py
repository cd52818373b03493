import json
import re
from pathlib import Path

import pytest

from autopar.errors import UsageError
from autopar.hardware.cluster import Cluster
from autopar.hardware.describe import scaled
from autopar.planner.space.candidates import candidates
from autopar.planner.space.constraints import Problem
from autopar.planner.space.pins import Pins
from autopar.planner.space.space import load_space
from autopar.questions.comparisons import cluster_of, load_study, run_study, study_files
from tests.support.cli_runner import Run
from tests.support.said import refuses

SMALL = """
title = "small"
source = "made up"
unsure = ["everything"]
cluster = "cpu:2x4?memory=1GB"
global_batch = 16
sequence = 32
precision = "fp32"
pins = {pins}

[scale]
"link.bandwidth" = 0.5

[model]
family = "{family}"
layers = 4
hidden = 64
ffn = 256
heads = 4
vocabulary = 128
attention = "flash"
"""


def test_the_studies_of_the_mission_are_shipped_and_listed(run: Run) -> None:
    names = " ".join(study_files())
    wanted = "gpt3-175b gpt-1t bloom-176b opt-175b mt-nlg-530b llama3-405b deepseek-v3 mixtral-8x22b"
    assert [name for name in wanted.split() if name not in names] == []
    listed = run("published").text
    assert all(name in listed for name in study_files())


@pytest.mark.parametrize("name", study_files())
def test_the_published_layout_is_a_candidate(name: str) -> None:
    study = load_study(name)
    cluster, pins = cluster_of(study), Pins.parse(study.pins)
    assert len(study.source) > 50
    layers, heads = (56, 48) if isinstance(study.model, str) else (study.model[1], study.model[0].heads)
    problem = Problem(
        world_size=cluster.world_size, devices_per_node=cluster.devices_per_node, global_batch_size=study.global_batch_size,
        num_blocks=layers + 2, heads=(heads,), key_heads=(8,), sequences=(study.sequence,),
        experts=(256,) if "deepseek" in name else (8,) if "mixtral" in name else (), space=load_space("default"),
    )  # fmt: skip
    assert candidates(problem, pins)


@pytest.mark.slow
@pytest.mark.parametrize("pins", ['["tp=2", "pp=2", "zero=1"]', '["recompute=full"]'])
def test_ours_is_beside_the_published_one_and_no_worse(run: Run, tmp_path: Path, pins: str) -> None:
    path = tmp_path / "small.toml"
    path.write_text(SMALL.format(pins=pins, family="gpt"))
    found = run("published", path, "--space", "quick", "--json").json
    assert found["published_over_autopar"] >= 1
    theirs, ours = found["published"], found["autopar"]
    assert theirs["predicted"]["step_time_s"] / ours["predicted"]["step_time_s"] == found["published_over_autopar"]
    assert "link.bandwidth x 0.5" in json.dumps(ours)


def test_a_layout_that_does_not_fit_is_said(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "small.toml"
    text = SMALL.format(pins='["tp=1", "pp=1", "zero=0", "micro_batch=2", "recompute=none"]', family="gpt")
    path.write_text(text.replace("1GB", "421MB"))
    said = run("published", path, "--space", "quick").text
    assert "the published layout has no plan under this cost model" in said and "not sure    everything" in said


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (('family = "gpt"', 'family = "gbt"'), "Unknown family 'gbt'"),
        (("link.bandwidth", "link.bandwith"), "Did you mean 'link.bandwidth'"),
        (('title = "small"', ""), "key 'title'"),
        (("layers = 4", "layers = 4\nlayer = 4"), "Unknown key 'layer'. Did you mean 'layers'?"),
        (("cpu:2x4", "cpuu:2x4"), "Did you mean 'cpu'"),
        (("[]", '["tpp=2"]'), "Unknown pin 'tpp'"),
    ],
)
def test_a_malformed_study_says_where_before_the_model_is_traced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: tuple[str, str], message: str
) -> None:
    path = tmp_path / "small.toml"
    path.write_text(SMALL.format(pins="[]", family="gpt").replace(*change))
    monkeypatch.setattr("autopar.questions.comparisons.graph_of", None)
    refuses(UsageError, re.escape(message), lambda: run_study(load_study(str(path))))


def test_an_unknown_study_is_told_the_known_ones(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    refuses(UsageError, "bloom-176b", load_study, "blom")
    # a space is looked for before the model is traced
    monkeypatch.setattr("autopar.questions.comparisons.run_study", None)
    assert "Unknown space 'vast'" in run("published", "bloom-176b", "--space", "vast").error


def test_scaling_touches_what_it_names() -> None:
    cluster = Cluster.parse("h100-sxm5-80gb:2x8")
    faster = scaled(cluster, {"device.matmul": 2.0, "device.memory": 0.5})
    (before,), (after,) = cluster.groups, faster.groups
    assert after.device.rate("bfloat16").ceiling_flops_per_s == 2 * before.device.rate("bfloat16").ceiling_flops_per_s
    assert after.device.memory_bytes == round(before.device.memory_bytes / 2)
    assert (after.nic, after.intra_node) == (before.nic, before.intra_node)
    late = scaled(cluster, {"link.latency": 3.0})
    assert late.library.algorithms[0].base_s == 3 * cluster.library.algorithms[0].base_s
    assert late.groups[0].device == before.device
    for numbers in ({"nic.bandwidth": 2.0}, {"link.bandwidth": 0.0}):
        refuses(UsageError, "", scaled, cluster, numbers)
