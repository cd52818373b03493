"""Runs that add up in one order: slower attention backward, filled tensors, rings alone."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autopar.hardware.device_rates import MatmulRate
from autopar.hardware.read import load_profile
from autopar.validate.express import predict
from autopar.validate.foreign_kernels import is_filled
from autopar.validate.practice import Site, cluster_of, load_sites, site_of
from autopar.validate.runs import Run
from autopar.validate.session import Session
from tests.support.practices import doing
from tests.support.published import OWN, read_runs

MEGATRON = doing(fused_elementwise=True, fused_projections=True)
ORDERED = doing(MEGATRON, deterministic=True)


@pytest.fixture(scope="module")
def run() -> Run:
    found = read_runs(OWN)[1]
    return replace(found, source="x", seq=4096)


def rate(run: Run, site: Site) -> MatmulRate:
    return cluster_of(run, load_profile(run.device), site).groups[0].device.rate("bfloat16")


def test_backward_of_attention_alone_is_slower_in_one_order(run: Run) -> None:
    plain, ordered = rate(run, MEGATRON), rate(run, ORDERED)
    assert ordered.attention_backward_fraction == plain.attention_backward_fraction * plain.ordered_fraction
    assert 0 < plain.ordered_fraction < 1
    assert ordered.attention_fraction == plain.attention_fraction
    older = rate(run, doing(ORDERED, flash2_attention=True))
    assert older.attention_fraction == plain.flash2_fraction
    assert older.attention_backward_fraction == plain.flash2_backward_fraction * plain.ordered_fraction


def test_every_kernel_of_transformer_engine_fills_what_it_makes_once(run: Run) -> None:
    plain, ordered = (Session([run], sites=[site]).structures[0][0] for site in (MEGATRON, ORDERED))
    assert plain.members == ordered.members
    inner = plain.members.index(max(plain.members))
    before, after = plain.works[inner], ordered.works[inner]
    assert after.works[:-1] == before.works
    fills = after.works[-1]
    rows, hidden, ffn = run.micro_batch * run.seq, run.hidden // run.tp, run.ffn // run.tp
    keys = hidden * run.kv_heads // run.heads
    whole = rows * run.hidden
    # two norms; query, key, value; attention; its projection; up, down
    made = 2 * whole + rows * (hidden + 2 * keys) + rows * hidden + whole + rows * ffn + whole
    assert fills.num_bytes == 2 * made
    assert fills.launches == 9 == sum(is_filled(op) for op in before.ops)
    assert fills.flops == fills.backward_flops == 0


def test_a_deterministic_run_is_slower_for_both_reasons(run: Run) -> None:
    sessions = [Session([run], sites=[site]) for site in (MEGATRON, ORDERED)]
    cluster = cluster_of(run, load_profile(run.device), MEGATRON)
    filled = predict(run, sessions[1].structures[0], cluster, ORDERED).step_time_s
    plain, both = (session.predictions()[0].step_time_s for session in sessions)
    assert plain < filled < both


def test_rings_alone_are_no_faster_than_the_best(run: Run) -> None:
    profile = load_profile(run.device)
    free, rings = (cluster_of(run, profile, doing(ring_collectives=r)).library for r in (False, True))
    assert {a.name for a in rings.algorithms} == {"ring"} < {a.name for a in free.algorithms}
    assert rings.name != free.name


def test_megatrons_tests_ran_so_and_on_gb200_by_flash_attention_2(run: Run) -> None:
    sites = load_sites()
    ci = replace(run, source="Megatron-LM CI golden values; x")
    names = ("gpt/gpt3_7b_tp4_pp1_memory_speed#898", "gpt/gpt3_7b_tp4_pp1_memory_speed#899")
    found = [site_of(replace(ci, name=name), sites) for name in names]
    assert [{"deterministic", "ring_collectives"} <= site.practices for site in found] == [True, True]
    assert ["flash2_attention" in site.practices for site in found] == [True, False]
