import json
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from autopar.cost.operators.work_record import Work
from autopar.errors import UsageError
from autopar.hardware.device import MatmulRate
from autopar.hardware.read import known_devices, load_profile
from autopar.validate import parameters as free
from autopar.validate.foreign_kernels import is_filled
from autopar.validate.practice import PLAIN, Site, cluster_of, load_sites, site_of
from autopar.validate.runs import Run
from autopar.validate.scores import evaluate
from autopar.validate.session import Session
from tests.support.practices import doing
from tests.support.published import NEEDS_PUBLISHED, OWN, PUBLISHED, at_sites, parameter_values, read_runs
from tests.support.said import refuses
from tools.evidence import blind as blind_page
from tools.evidence.blind import TESTS, hidden, page, read_before, read_figures

ROOT = Path(__file__).parents[2]
DATA = ROOT / "tests" / "data"


@cache
def table(test: str) -> tuple[Run, ...]:
    return read_runs(DATA / TESTS[test].replace("before", "runs").replace(".json", ".csv"))


def named(test: str, name: str) -> Run:
    return next(run for run in table(test) if run.name == name)


@pytest.mark.parametrize(("test", "least"), [*zip(TESTS, (0, 25, 40, 30, 30, 50), strict=True)])
def test_every_blind_row_has_a_device_and_was_predicted_before_and_its_source_is_new(test: str, least: int) -> None:
    runs = table(test)
    known = {name: load_profile(name) for name in {run.device for run in runs}}
    for run in runs:
        assert known[run.device].device.rate("float16" if run.precision == "fp16" else "bfloat16")
    before = json.loads((DATA / TESTS[test]).read_text())
    assert [(r["row"], r["name"]) for r in before["runs"]] == [(run.line, run.name) for run in runs]
    for r, run in zip(before["runs"], runs, strict=True):
        assert r["step_time_s"] == (run.step_time_s and pytest.approx(run.step_time_s, rel=1e-3))
    others = [run for earlier in list(TESTS)[: list(TESTS).index(test)] for run in table(earlier)]
    assert len(runs) >= least and (not others or len({run.publisher for run in runs}) >= 5)
    assert {run.publisher for run in runs}.isdisjoint(run.publisher for run in others)
    assert {_facts(run) for run in runs}.isdisjoint(_facts(run) for run in others)


@NEEDS_PUBLISHED
@pytest.mark.parametrize("test", TESTS)
def test_no_blind_row_is_in_the_calibration_table(test: str) -> None:
    known = read_runs(PUBLISHED)
    assert {_facts(run) for run in table(test)}.isdisjoint(_facts(run) for run in known)
    if test not in ("first", "second"):
        assert {run.publisher for run in table(test)}.isdisjoint(run.publisher for run in known)


def test_names_of_sites_are_those_of_rows() -> None:
    """A name that no row has would leave a site's facts unused."""
    for site in load_sites():
        for runs in (table("third"), table("sixth"), [r for r in table("fifth") if site.source != "torchtitan"]):
            rows = {run.name for run in runs if site.source and site.source.lower() in run.source.lower()}
            assert not rows or rows.issuperset(site.names)


def test_a_site_states_the_bandwidth_of_links_and_of_cards() -> None:
    run, profile = read_runs(OWN)[3], load_profile("a100-sxm4-80gb")
    own = cluster_of(run, profile, PLAIN).groups[0]
    site = replace(PLAIN, link_bandwidth_bytes_per_s=2e11, nic_bandwidth_bytes_per_s=2e10, provenance="measured")
    stated = cluster_of(run, profile, site).groups[0]
    assert (stated.intra_node.bandwidth_bytes_per_s, stated.nic.bandwidth_bytes_per_s) == (2e11, 2e10)
    assert stated.intra_node.step_fraction == stated.nic.step_fraction == 1.0
    assert own.intra_node.step_fraction < 1.0 and own.intra_node.latency_s == stated.intra_node.latency_s
    topology = replace(run, source="BigScience BLOOM A100 topology benchmarks", name="bloom-181B#46")
    assert site_of(topology, load_sites()).nic_bandwidth_bytes_per_s > 0  # as a collective reached its cards in place
    assert not any("nic" in parameter.name for parameter in free.PARAMETERS)  # so that no fit is laid over that


def test_what_is_hidden_costs_less_and_what_is_late_more() -> None:
    """Sums of gradients over the tensor axis beside products; sums after the last backward, and gathers in fp8."""
    run = replace(read_runs(OWN)[0], source="x")
    ways = (doing(), doing(overlapped_gradients=True), doing(overlapped_tensor_parallel=True))
    spent = [found.breakdown.tensor_parallel_s for found in at_sites(run, *ways)]
    assert spent[0] > spent[1] > spent[2]
    run = replace(read_runs(OWN)[3], recompute="none", precision="fp8", device="h100-sxm5-80gb", zero=3, source="x")
    ways = (doing(late_reductions=True), doing(), doing(quantized_gathers=True))
    times = [found.step_time_s for found in at_sites(run, *ways)]
    assert times[0] > times[1] > times[2]


def test_shards_over_context_let_long_sequences_fit() -> None:
    """torchtitan's 262 thousand tokens on eight devices took 84 GiB; whole states on each would be 192."""
    run = named("fifth", "Llama-3.1-8B#39")
    site = site_of(run, load_sites())
    assert (run.cp, run.dp, run.zero, "shards_over_context" in site.practices) == (8, 1, 3, True)
    found = at_sites(run, site, doing(site, shards_over_context=False))
    held = [sum(m.parameters + m.gradients + m.optimizer for m in one.memory) for one in found]
    assert held[1] > 7 * held[0]


def test_what_a_site_keeps_in_half_precision_whole_or_to_the_last_micro_batch() -> None:
    """A small KempnerForge: by hand, bytes of an element of the states, and products of the head."""
    run = replace(named("fifth", "Llama-7B#7"), layers=2, source="x")
    found = at_sites(run, doing(), doing(plain_storage=True), doing(reduces_last=True))
    full, half, last = (one.memory[0] for one in found)
    shard = full.parameters / 4
    assert (full.gradients / shard, full.optimizer / shard) == pytest.approx((4, 8))
    assert (half.parameters / shard, half.optimizer / shard) == pytest.approx((2, 4))
    assert last.gradients / shard == pytest.approx(4 * run.dp, rel=0.01)  # whole, in single precision
    assert found[2].breakdown.data_parallel_s < found[0].breakdown.data_parallel_s


def test_a_whole_vocabulary_has_whole_logits_and_in_pipelines_a_whole_head() -> None:
    run = replace(named("fifth", "Llama-7B#7"), layers=2, source="x")
    plain, whole = doing(), doing(whole_vocabulary=True)
    for sequence_parallel, factor in ((True, 1), (False, run.tp)):
        row = replace(run, sequence_parallel=sequence_parallel)
        works = [Session([row], sites=[site]).structures[0][0].works for site in (plain, whole)]
        heads = [sum(done.flops for done in found[-1].works) for found in works]
        assert heads[1] == pytest.approx(factor * heads[0], rel=0.01)
        tables = [max(p.numel for p in found[0].shape.parameters) for found in works]
        assert tables[1] == pytest.approx(run.tp * tables[0], rel=0.01)
        kept = [found[-1].shape.saved_bytes for found in works]
        assert kept[1] > 2 * kept[0]
    half = Session([row], sites=[doing(whole, half_loss=True)]).structures[0][0].works
    assert kept[1] - half[-1].shape.saved_bytes == pytest.approx(2 * row.micro_batch * row.seq * row.vocab, rel=0.01)


def _facts(run: Run) -> tuple[object, ...]:
    return (run.family, run.layers, run.hidden, run.seq, run.device.lower(), run.devices, run.tp, run.pp,
            run.global_batch, run.precision, run.step_time_s)  # fmt: skip


def test_shipped_profiles_agree_on_what_all_devices_or_a_chip_share() -> None:
    values: dict[str, float] = {}
    for name in known_devices():
        profile = load_profile(name)
        if profile.device.kind == "cuda":
            for key, value in parameter_values(profile).items():
                if not key.startswith("float8"):
                    assert values.setdefault(key, value) == value, f"{name}: {key}"
    assert {"launch_s", "kernel_fraction", "wave_loss", "attention@ampere", "fill_depth@hopper"} <= set(values)


def test_what_no_run_saw_stands_at_its_prior() -> None:
    priors = {p.key: p.prior for p in free.PARAMETERS}
    ampere, blackwell = (parameter_values(load_profile(device)) for device in ("a100-sxm4-80gb", "gb200"))
    for key in ("attention@ampere", "attention_backward@ampere"):
        assert ampere[key] == priors[key]
    assert blackwell["link_fraction@blackwell"] == priors["link_fraction@blackwell"]


def _unnamed(**columns: object) -> Run:
    return replace(read_runs(OWN)[0], source="nobody's runs", **columns)


def test_columns_tell_what_software_an_unknown_source_ran_and_names_that_of_a_known_one() -> None:
    sites = load_sites()
    old = site_of(_unnamed(tp=4, pp=2, zero=1, attention="scores", family="gpt"), sites)
    assert {"late_reductions", "dropout"} <= old.practices and "overlapped_reductions" not in old.practices
    new = site_of(_unnamed(tp=4, pp=2, zero=None, attention="flash", family="llama", precision="bf16"), sites)
    assert {"overlapped_reductions", "fused_projections"} <= new.practices and "dropout" not in new.practices
    sharded = _unnamed(tp=8, pp=1, zero=3, attention="flash", family="llama", precision="bf16")
    assert site_of(sharded, sites) == PLAIN
    assert "fused_elementwise" in site_of(replace(sharded, precision="fp8"), sites).practices
    assert "triton_attention" in site_of(_unnamed(tp=1, pp=1, zero=3, attention="flash", family="mpt"), sites).practices
    run = replace(_unnamed(tp=1, pp=1, zero=1, attention="flash"), source="runs of NVIDIA NEMO (1.0); somewhere")
    assert "overlapped_tensor_parallel" in site_of(run, sites).practices
    assert "blocking_launches" in site_of(replace(run, source="BigScience BLOOM A100, nemo"), sites).practices


def test_nodes_of_one_link_domain_are_one() -> None:
    rack = load_profile("gb200")
    assert (rack.group(16, 4).num_nodes, rack.group(16, 4).devices_per_node) == (1, 64)
    assert (rack.group(64, 4).num_nodes, rack.group(64, 4).nics_per_node) == (4, 64)
    assert load_profile("h100-sxm5-80gb").group(16, 8).num_nodes == 16


def test_megatrons_selective_recompute_makes_fused_attention_again() -> None:
    run = replace(read_runs(OWN)[3], recompute="selective", device="h100-sxm5-80gb", tp=4, zero=1, source="x")
    ways = ((replace(run, recompute="none"), doing()), (run, doing(recomputes_attention=True)), (run, doing()))
    works = [Session([one], sites=[site]).structures[0][0].works for one, site in ways]
    attention = [sum("attention" in w.ops[i].target for w in some for i in w.again) for some in works]
    assert attention == [0, sum("attention" in op.target for w in works[1] for op in w.ops), 0]
    kept = [sum(w.shape.saved_bytes for w in some) for some in works]
    assert kept[2] < kept[1] <= kept[0]


def works_of(run: Run, **facts: bool) -> dict[str, list[Work]]:
    """The works of an inner layer of a run at a source with these facts, by operator."""
    (structure,) = Session([run], sites=[doing(**facts)]).structures[0]
    found: dict[str, list[Work]] = {}
    for op, work in zip(structure.works[2].ops, structure.works[2].works, strict=True):
        found.setdefault(op.target, []).append(work)
    return found


def test_scores_of_torchs_operators_are_scaled_and_masked_by_kernels_of_their_own() -> None:
    """Where a site says so: a division and a mask over [4, 12, 512, 512] in float16 besides; a table's `scores` are fused."""
    row = replace(table("sixth")[25], source="x")
    assert (row.micro_batch, row.heads, row.seq, row.precision, row.attention) == (4, 12, 512, "fp16", "scores")
    scores, mask = 2 * 4 * 12 * 512 * 512, 512 * 512
    plain = works_of(row, plain_scores=True)
    (scaled,), (masked,), (softmax,) = (plain[f"aten.{n}"] for n in ("div.Tensor", "masked_fill.Scalar", "softmax.int"))
    assert (scaled.num_bytes, scaled.backward_bytes) == (2 * scores, 2 * scores)
    assert (masked.num_bytes, masked.backward_bytes) == (2 * scores + mask, 2 * scores + mask)
    assert (softmax.num_bytes, softmax.backward_bytes) == (2 * scores, 3 * scores)
    single = works_of(row, plain_scores=True, autocast=True)["aten.softmax.int"][0]  # autocast: a softmax in float32
    assert single.num_bytes == 2 * 2 * scores
    assert "aten.masked_fill.Scalar" not in works_of(row)


def test_chains_of_operators_move_what_each_of_them_reads_and_writes() -> None:
    """GELU of [4, 512, 3072] in float16 and an RMS norm of [2, 512, 4096] in float32, counted operator by operator."""
    gelu = works_of(replace(table("sixth")[25], source="x", attention="flash"), operator_chains=True)
    assert "aten.gelu.default" not in gelu
    n = 2 * 4 * 512 * 3072
    (half,), (power,), (tanh,) = (gelu[f"aten.{o}"] for o in ("div.Tensor", "pow.Tensor_Scalar", "tanh.default"))
    inner = [w for w in (*gelu["aten.mul.Tensor"], *gelu["aten.add.Tensor"]) if w.num_bytes >= 2 * n]
    chain = (half, power, tanh, *inner)
    assert len(chain) == 8
    assert sum(w.num_bytes for w in chain) == (2 * 6 + 3 * 2) * n  # two of them read two tensors
    assert (power.backward_bytes, power.backward_launches) == (7 * n, 3)
    row = replace(table("sixth")[51], source="x", seq=512, recompute="none")
    assert (row.micro_batch, row.hidden, row.precision) == (2, 4096, "bf16_true")
    norm = works_of(row, operator_chains=True)
    wide = 4 * 2 * 512 * 4096
    assert "aten.rms_norm.default" not in norm
    assert [w.num_bytes for w in norm["aten.pow.Tensor_Scalar"]] == [2 * wide, 2 * wide]
    assert [w.num_bytes for w in norm["aten.to.dtype"]] == 4 * [wide + wide // 2]
    token = 4 * 2 * 512
    assert [w.backward_bytes for w in norm["aten.mean.dim"]] == 2 * [wide + token]  # the expanded gradient, divided


def test_no_rank_has_a_part_of_the_rows_or_weights_of_a_norms_chain() -> None:
    """With ``tp`` 2 all ranks have whole norms, as where a norm is one operator; blocks keep no part of their inputs."""
    run = replace(named("third", "Llama-2-7B#33"), source="x", pp=1)
    assert (run.tp, run.sequence_parallel, run.recompute) == (2, False, "full")
    sites = [doing(operator_chains=chained) for chained in (False, True)]
    whole, chain = (Session([run], sites=[site]).predictions()[0].memory[0] for site in sites)
    assert chain.parameters == whole.parameters and chain.activations >= whole.activations


def test_a_run_wholly_in_bfloat16_holds_eight_bytes_a_parameter() -> None:
    """torchtune's ``bf16``, Lightning's ``bf16-true``: parameter, gradient and both of AdamW's states in two bytes each."""
    row = replace(table("sixth")[44], source="x")
    assert row.precision == "bf16_true"
    h, f, v = row.hidden, row.ffn, row.vocab
    layer = 2 * h * h + 2 * h * (h // 3) + 3 * h * f + 2 * h  # 8 of 24 heads have keys
    parameters = row.layers * layer + 2 * v * h + h
    for precision, size in (("bf16_true", 2), ("bf16", 4)):
        memory = Session([replace(row, precision=precision)], sites=[doing()]).predictions()[0].memory[0]
        assert memory.gradients == size * parameters
        assert memory.optimizer == pytest.approx(2 * size * parameters, rel=1e-6)


def test_the_page_is_what_its_command_writes_from_the_figures_that_are_kept() -> None:
    text = page(DATA, read_figures(DATA))
    assert text == (ROOT / "docs" / "evidence" / "blind.md").read_text(encoding="utf-8")
    assert list(read_figures(DATA)) == list(TESTS)
    assert text.count("**all, names hidden**") == len(TESTS)


def test_a_test_that_is_run_again_takes_the_place_of_its_figures(tmp_path: Path) -> None:
    runs = read_runs(OWN)[3:4]
    session = Session(runs, place="runs.csv")
    found = blind_page.figures(session, evaluate(session))
    assert [run.source for run in hidden([*runs, runs[0]])] == ["unnamed 1", "unnamed 1"]
    kept = read_figures(DATA) | {"third": found}
    blind_page.write_figures(tmp_path, kept)
    assert read_figures(tmp_path) == kept
    text = page(DATA, kept)
    assert f"third {found.revision}" in text and found.worst[0] in text
    assert read_figures(DATA)["third"].worst[0] not in text
    assert read_figures(DATA)["fourth"].worst[0] in text


def test_unknown_tests_and_files_without_scores_are_refused(tmp_path: Path) -> None:
    refuses(UsageError, "Unknown blind test 'seventh'", blind_page.main, ["seventh"])
    path = tmp_path / "before.json"
    path.write_text('{"runs": []}')
    refuses(UsageError, r"before\.json", read_before, path)


# --- runs that add up in one order

MEGATRON = doing(fused_elementwise=True, fused_projections=True)
ORDERED = doing(MEGATRON, deterministic=True)
RUN = replace(read_runs(OWN)[1], source="x", seq=4096)


def rate(site: Site) -> MatmulRate:
    return cluster_of(RUN, load_profile(RUN.device), site).groups[0].device.rate("bfloat16")


def test_backward_of_attention_alone_is_slower_in_one_order() -> None:
    plain, ordered = rate(MEGATRON), rate(ORDERED)
    assert ordered.attention_backward_fraction == plain.attention_backward_fraction * plain.ordered_fraction
    assert 0 < plain.ordered_fraction < 1
    assert ordered.attention_fraction == plain.attention_fraction
    older = rate(doing(ORDERED, flash2_attention=True))
    assert older.attention_fraction == plain.flash2_fraction
    assert older.attention_backward_fraction == plain.flash2_backward_fraction * plain.ordered_fraction


def test_every_kernel_of_transformer_engine_fills_what_it_makes_once() -> None:
    plain, ordered = (Session([RUN], sites=[site]).structures[0][0] for site in (MEGATRON, ORDERED))
    assert plain.members == ordered.members
    inner = plain.members.index(max(plain.members))
    before, after = plain.works[inner], ordered.works[inner]
    assert after.works[:-1] == before.works
    fills = after.works[-1]
    rows, hidden, ffn = RUN.micro_batch * RUN.seq, RUN.hidden // RUN.tp, RUN.ffn // RUN.tp
    keys = hidden * RUN.kv_heads // RUN.heads
    whole = rows * RUN.hidden
    # two norms; query, key, value; attention; its projection; up, down
    made = 2 * whole + rows * (hidden + 2 * keys) + rows * hidden + whole + rows * ffn + whole
    assert fills.num_bytes == 2 * made and fills.launches == 9 == sum(is_filled(op) for op in before.ops)
    assert fills.flops == fills.backward_flops == 0


def test_rings_alone_are_no_faster_than_the_best() -> None:
    profile = load_profile(RUN.device)
    free, rings = (cluster_of(RUN, profile, doing(ring_collectives=r)).library for r in (False, True))
    assert {a.name for a in rings.algorithms} == {"ring"} < {a.name for a in free.algorithms}
    assert rings.name != free.name


def test_megatrons_tests_ran_so_and_on_gb200_by_flash_attention_2() -> None:
    sites = load_sites()
    ci = replace(RUN, source="Megatron-LM CI golden values; x")
    names = ("gpt/gpt3_7b_tp4_pp1_memory_speed#898", "gpt/gpt3_7b_tp4_pp1_memory_speed#899")
    found = [site_of(replace(ci, name=name), sites) for name in names]
    assert [{"deterministic", "ring_collectives"} <= site.practices for site in found] == [True, True]
    assert ["flash2_attention" in site.practices for site in found] == [True, False]
