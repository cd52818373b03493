"""``docs/blind.md`` to ``blind6.md``, written by ``autopar validate FILE --before JSON --markdown FILE``: runs that no fit has seen."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from autopar.errors import UsageError
from autopar.validate.figures import Score
from autopar.validate.pages.report import failures, markdown, worst
from autopar.validate.runs import Run
from autopar.validate.scores import Outcome, evaluate
from autopar.validate.session import Session

_CHANGED = """
No number was fitted to these runs. By what it changed most:

- **Software by the source's name.** A source that no site knew was taken to be eager PyTorch; NVIDIA's tables (NeMo,
  Megatron-Bridge) were predicted 57 % too slow, most of it for that, and are 3 to 9 % off with what NeMo's own files
  say of it. `profiles/sites/software.toml` now knows programs by name, and where a row names none what its columns
  tell: stored scores with split layers or stages are Megatron-LM of 2021, fused attention with these is Megatron
  Core, fp8 comes with fused kernels, MPT with llm-foundry. "With names hidden" below is what the columns alone give.
- **What one device tells of others.** Fitted parameters that all devices or all of a chip share stood only in the
  profiles of devices that fitted runs had used; V100, H200, B200, MI300X, L4 and A10G had guesses, most at the full
  memory bandwidth and without tiles. All have them now, and `--calibrate all` writes them. V100: 26 to 42 % too fast
  on one node before, within 15 % since.
- **Links by chip.** One `link_fraction` stood for the links of all nodes, at half, since BigScience's A100s ask for
  it. Now each chip has its own, and Hopper asks for all of it. Devices that no run tells of stand at the measured
  bandwidth.
- **NVLink over nodes.** 72 GB200 are one domain of links (`link_domain` in a profile): sharding over 64 of them was
  predicted up to 3.8 times too slow through network cards.
- **Sums after the last backward.** Megatron summed gradients after the last backward until 2022, nothing beside them.
- **Gathers in fp8.** torchtitan and Megatron gather parameters in one byte an element where products are fp8.
- **A number that no run told.** A100's fused attention kept the values of a fit that saw the first kernels in Triton;
  it has its prior, that of FlashAttention-2's paper, again. Bandwidth and fp8 products of MI300X are measured ones
  (Azure's benchmarking guide), not shares of the datasheet.
- **Networks that sources state.** IBM's nodes have 400 or 800 Gbit/s, OneFlow's one card of 100, Jean Zay's reached
  55 Gbit/s.
- A profile of the V100 with 16 GB was missing.
- **Whole sums.** DeepSpeed's ZeRO 1 sums whole gradients since the middle of 2021 (tr1-13B, MT-NLG; 1 %).
- **Selene's links** at what nccl-tests measure on such nodes since the [third test](blind3.md): MT-NLG is 21 % too fast, 13 before.
- The parameters' fit changed with what runs of the other table are known to have done since
  ([validation.md](validation.md)). What of a network card arrives in a step is fitted no more: nothing tells it, and with
  0.71, where the fit went, IBM's nodes with few cards were missed by 15 %.
"""

_MISSED = """
- Jean Zay's V100s: the source says that its numbers hold to 40 %. One 52B run took 125, 129, 217 and 225 s on four
  days; half of its rows are of slow days, all rows of 18B with many micro-batches too. The five rows of the largest models
  are met within 2.5 %, the others are 5 to 17 % too fast. So neither the device nor its kernels are wrong. Products were checked again
  since: the largest half precision one that mli/transformers-benchmarks measured on a V100 reaches 95 TFLOP/s of 125 (A100: 230 of
  312, the same share), and the profile gives at most 98. The runs of slow days take 2.0 to 2.4 times the predicted time whatever their micro-batch.
- DeepSpeed's pipelines: on the same V100s Megatron with DeepSpeed reaches 38 TFLOP/s at 13B (recompute
  counted; tr1-13B, 27 % too fast), Megatron alone 53 at 52B; MT-NLG (21 %) and BigScience's A100s (6 %, left out) run it as well. Looked for: what its engine does for each
  micro-batch (one synchronization, copies of inputs, parts of messages sent and gathered), its checkpoints, sums and checks of
  gradients. By its code they are worth 0.2 % here and 1.3 of BigScience's A100s, and are in the model since ([validation.md](validation.md)); none explains the rest.
- FSDP through slow network cards (IBM's A100s with 400 Gbit/s a node): 21 to 25 % too slow when compiled. Collectives
  that the network holds up take memory bandwidth and multiprocessors for less of their time than those inside a node;
  `interference` counts their whole time, as charging less makes as many other runs too fast ([validation.md](validation.md)).
- torchtitan's 405B (tensor parallelism of 8, shards over 16 nodes): 17 % too slow, and 28 % in fp8, where its
  collectives of the tensor axis are fp8 too.
- Tensor parallelism over nodes (OneFlow, 16 and 32 V100s on one card a node): 50 and 60 % of the measured time. What
  compute leaves is 49 and 61 ms for each all-reduce of 201 MB, 7.7 and 6.4 GB/s of the card's 11.6, where gradients of 1 GB
  reach 9.5 to 10 over the same card (rows 103 and 104); neither a ring nor a tree explains both.
- Small models with few micro-batches (nanoGPT, MosaicGPT of 125M): 22 and 11 % too fast: what the host takes is
  hidden by more work than there is.
- Memory of Megatron with sharded parameters on GB200 is called impossible: these recipes offload activations, which
  no column says.
- OneFlow's memory (`nvidia-smi`, 26 %): PyTorch 1.8 keeps segments that a model of live tensors does not know. Misses have
  both signs (tensor parallelism of 8: 20 to 38 % too low, of 32: 65 % too high), and the one impossible row is of a vocabulary
  on one device, whose loss Megatron computes in place.
- OneFlow's and Jean Zay's runs are old software on old devices, NVIDIA's are their maker's own best; a table of other
  runs may lie between.
"""


_CHANGED_AGAIN = """
No number was fitted to these runs, and no profile changed. What was looked for, source by source:

- **NVIDIA's recipes** (Nemotron-4 15B and 340B on H100 and GB200, GPT-3 175B on H100) were met within 4 and 5 %, TinyLlama within 5, zero bubble's pipelines within 10, FlagPerf's runs within 9 and 5: nothing was looked for below 15 %, but FlagPerf's memory was missed
  by 30 %.
- **Megatron's selective recompute** makes attention again and keeps all else, also where attention is one fused kernel; it was taken to be
  torch's, which keeps products alone (`recomputes_attention`; now what is assumed of unknown Megatron Core runs). With what FlagPerf's scripts
  say (dropout, sums after the last backward) its memory is missed by 15 %, its times by 7; since the [third test](blind3.md) sums of
  gradients over the tensor axis run beside products.
- **Whole parameters, sent one after the other.** InternEvo's ZeRO 1 gives each rank whole parameters to step, and the rank broadcasts them, after the
  step and by a collective each, whose ring has a hop for each rank: at 1024 ranks 290 rings of 1023 hops. With that
  (`broadcasts_parameters`), whole sums of gradients on every rank and the four cards of 100 Gbit/s that the source states it is missed by 11 instead of 22 %.
- **nanotron** gathers over the tensor axis and keeps what it gathered, as nothing there gathers it again in backward: memory was
  27 % too low and is missed by 4 %. It was taken for Megatron Core, with kernels that it does not have.
- One cell was mended, the vocabulary of the zero bubble runs (see [tests/data/README.md](../tests/data/README.md)): 9.8 % before, 6.8 since.
"""

_MISSED_AGAIN = """
- nanotron's runs of July 2024, 38 % too fast: on one node without a pipeline they are missed by 3 to 14 % but for one (micro-batches of 32, which took
  3.5 times the time of those of 8). All that crosses nodes is slow by what a network of 1 to 2 GB/s would cost: 3 s a step for 4.4 GB of gradients
  of 16 ranks, 50 ms for each message of 34 MB between stages, two ways. The same source's 64 devices do not wait so. Its pipelines on one node take twice
  the time: for each message the host first exchanges its shape through the device and waits (`p2p.py`), so that no kernel is queued ahead.
  What that costs nobody measured apart.
  Four further logs of 64 devices (16 data ranks with tensor parallelism of 4 and micro-batches of 8 and 16, 32 with 2 and 2 and 8) have steps of 8.7 to
  9.9 s, and one of 2.1 to 2.8 s among them, the seventh, which is what another such layout takes in all from then on (2.85 s): what is waited for comes and goes.
- InternEvo at 1024 devices (35 % too fast; 256: 15 %, 64: 5): what remains grows with the ranks as well, 7.6 us for each hop of each parameter's ring where
  NCCL's own model has 2 to 3.4 inside nodes and 4 to 14 between them, and its network has four cards for eight devices.
- InternEvo's and FlagPerf's single nodes are 9 and 8 % too fast: software that is less tuned than NVIDIA's on the same kernels.
- GB200 in bf16: 9 to 12 % too fast, in fp8 2 to 6 %. No run in the fitted table tells of its products apart from Megatron's test runs.
- GPT-3 175B in fp8: 5 to 12 % too slow, as in NVIDIA's other tables of it; in bf16 1 to 3 %.
- Zero bubble's runs of 16 and 32 devices: 10 to 12 % too slow, on one node 2 to 3 % too fast: messages over nodes stand in the stream of
  computation here, and RoCE's cards are not known.
- FlagPerf's memory: `nvidia-smi` counts what the allocator holds, and one vocabulary of 128256 takes several copies in fp32.
"""

_CHANGED_LAST = """
No number was fitted to these runs, and no profile changed. What was looked for, source by source:

- **The links of DGX A100.** Narayanan's and Korthikanti's runs were too slow by what their tensor parallelism takes, up to 30 %. An A100's
  links pass 235 GB/s of a ring all-reduce in nccl-tests; the profile lets about half of it arrive in a step, a number that
  BigScience's runs gave it. Selene's nodes now have what was measured (`link_bandwidth_bytes_per_s`): Narayanan's ten runs, from 32 to
  3072 devices, are missed by 2 instead of 11 %, Korthikanti's by 8 instead of 21. MT-NLG ran on the same nodes, with
  DeepSpeed's pipeline, and is 21 % too fast now, 13 before ([blind.md](blind.md)): what held the steps of BigScience up, also DeepSpeed's, is hardly their links.
- **Gradients summed beside products.** Megatron since the end of 2021 and Transformer Engine sum the gradient of a linear layer's input
  over the tensor axis beside the product that makes its weight's (`overlapped_gradients`): 1 to 4 % of a step. Two runs with sequence
  parallelism that were called impossible are not: such layers keep their own part of an input (`regathers`).
- **Google's recipes** say where Transformer Engine's user buffers are off and where GPT-3 has dropout; the cards of A3 Mega have 200 Gbit/s, half of
  what an H100's profile has.
- **ATorch** runs Hugging Face's operators, not Megatron's fused ones, in DeepSpeed's pipeline: 25 % too fast before, 20 since, and 8
  since its norms are chains of operators ([sixth test](blind6.md)).
- **Together's** rows with tensor parallelism had user buffers off, and its network was measured by itself at 39 GB/s a card. Its 15B is missed by 8 % before and since, its
  340B by 5 before and 26 since: two errors had cancelled.
"""

_MISSED_LAST = """
- DeepSpeed's pipelines are 8 to 27 % too fast wherever links are not fitted to them: ATorch's here (8), MT-NLG and tr1-13B in the first test. The same
  model and devices with FSDP are met within 2 %, and Megatron alone is met within 2 % on MT-NLG's nodes. BigScience's
  A100s, also DeepSpeed's, stand in the fitted table, where the share of the links' bandwidth takes that up. What its engine does in that time is not known.
- Nemotron-4 340B on B200 (26 % too slow): a quarter of the predicted step are sums and gathers over data ranks, which Megatron runs beside the last
  micro-batches and the next forwards; each second of them is priced at two thirds, what collectives beside computation cost the fitted runs.
- Nemotron-4 15B in bf16 on B200: 13 to 26 % too slow, in fp8 within 7 % but for 512 devices (11 % too fast). B200's bf16 products stand at
  an assumed share; no fitted run tells of them.
- H200 (A3 Ultra): 16 % too fast. The software is that of A3 Mega, which is met within 8; torchtitan's H200s are 9 % too fast as well. The profile
  gives an H200 the products of an H100, in fp8 4 % more.
- MLPerf's Llama 3.1 8B (Cisco): 17 and 23 % too fast. One micro-batch a step: what the optimizer, the host and sums leave uncovered is a fifth of it, and a
  step of 0.5 to 0.7 s shows all of it.
- ATorch's memory with FSDP (47 % too low): `autocast` without a policy of mixed precision keeps the stream between layers, gathered parameters and reduced
  gradients in single precision. The table of runs cannot say so: half of the 14 GiB that are missing.
- Where all sets miss the same: nanotron over nodes. Its scripts set `CUDA_DEVICE_MAX_CONNECTIONS=1` and start PyTorch of a conda environment, without the container's or any
  other plugin for the cluster's network named (huggingface/bench_cluster, template/base_bench.slurm); 1 to 2 GB/s a device would be
  sockets. No log says which it was, so nothing is assumed.
"""

_CHANGED_FOURTH = """
Profiles are as they were. No source was missed by over 15 %; one was described, as a single row of it was (22 % in fp8):

- **OLMo-core** is compiled, its loss as well, attends by torch's own FlashAttention-2 and gathers in fp8, by its files; it was taken for eager
  PyTorch in bf16, which hid that its attention is not cuDNN's, and for fused software in fp8. 5 % are missed instead of 9.

What stayed as it was, though asked: parameters are still fitted on the table of [validation.md](validation.md) alone. A fit on it and on the three
earlier tables together (654 runs) misses these rows by 11.1 % as collected, where the profiles miss 10.2: OLMo-core 9.8 instead of 8.9, Pax
15.0 instead of 14.2, PaddleNLP 8.1 instead of 5.5, only NeMo on eight B200 less (1.6 instead of 3.2). What it costs elsewhere is in
[validation.md](validation.md). Nor do Blackwell's parameters leave their priors: fitted to the 48 rows of NVIDIA, Together and Google on B200 and GB200, each of
them left out in turn, 10.5 % are missed, with the priors 7.4.
"""

_MISSED_FOURTH = """
- Pax, 5B: 14 to 36 % too fast. Under XLA attention is a chain of operators with its softmax in single precision (google/praxis, layers/attentions.py),
  where `scores` is priced as Megatron's fused softmax in half precision; that weighs most in the 5B, whose attention is also made again, and little in the 175B.
  With Transformer Engine's softmax (A100, 14 and 16 %) it is half of that; why H100s lack 30 % no file says. Nothing else here ran under XLA but MaxText, whose
  fused attention is cuDNN's, and which is met within 3 %.
- PaddleNLP's memory, 15 % too low: what PaddlePaddle keeps between its operators was not looked for.
- OLMo-core's 13B in fp8, 17 % too fast (4 % in bf16): one sample a micro-batch, and less gained by fp8 than in its 7B. Its rates are rounded to 1 to 5 %.
- B200 in bf16 is met within 4 % here (Llama 3 8B), where Together's Nemotron-4 15B was 13 to 26 % too slow and NVIDIA's on GB200 are 10 % too fast:
  it is no property of the chip that the profile lacks.
"""

_CHANGED_FIFTH = """
No number was fitted to these runs, and no profile of a device changed. By source, all of it from the source's own files:

- **KempnerForge** was taken for eager PyTorch with states in single precision. It holds parameters and states in bfloat16 (`plain_storage`), keeps whole gradients in
  single precision from micro-batch to micro-batch and reduces them at the last (`reduces_last`: 66 GiB of the 93 that its 70B takes), computes the loss in
  the logits' own dtype (`half_loss`), gathers the logits over the tensor axis, has the whole embedding on each rank of it and in pipelines the whole head
  (`whole_vocabulary`), and all rows but four are compiled. Its memory is missed by 8 % instead of 46. The four flags are new.
- **torchtitan's** shards lie over the ranks of context parallelism as well: two rows of sequences of 131 and 262 thousand tokens, which ran with 84 GiB, were
  called impossible (116 and 192 GiB). Its kernels are those of its rows in bf16, which stand in the table of [validation.md](validation.md), and one row has collectives beside products.
- **LitGPT** holds everything in bfloat16, by its `bf16-true`; Thunder joins elementwise operators. Memory of its compiled rows was 54 % too high, and is 5;
  that of its eager rows is 7 % too low and their time met within 2 since its norms are chains ([sixth test](blind6.md)), that of Thunder's with nvFuser 18, where two errors had cancelled (13 % too high before).
- **Whole gradients are gone when parameters are stepped.** FSDP has shards in place of gradients that accumulated whole before the optimizer runs; its
  temporaries were counted beside the whole ones. This is no flag: it holds for every plan that accumulates, and the 70B on eight devices needs 8 GiB less for it.
- Two kinds of cells were mended: `precision` of KempnerForge's rows with data parallelism (its gradients are reduced in single precision) and `zero` of torchtitan's row
  without data parallelism, whose shards lie over context parallelism (see [tests/data/README.md](../tests/data/README.md)).
"""

_MISSED_FIFTH = """
- The seven runs on eight A800 with Hugging Face's Llama and DeepSpeed: 27 to 36 % too fast, all alike (3.7 % with one factor), 13 of 14 pairs in order. They were 33 to 41 before
  norms were chains of operators in single precision ([sixth test](blind6.md)). The rest is not known: the source does not state its throughput's unit (only samples fit) nor how it was timed.
- KempnerForge's 175B on 360 devices: 38 % too slow. Its products alone are met (18.4 of 19.1 s): what is priced are collectives over nodes beside them, each second at
  two thirds, and that all its gathers and sums were hidden says the same of them as IBM's, torchtitan's 405B and Nemotron's runs. Its 13B with tensor parallelism, 15 to 21 % too slow in April's and June's
  software (5 % apart), is the same in part. All its four pairs are one layout measured in several months, which no prediction orders.
- KempnerForge's pipelines: 16 to 25 % too fast (33 before heads were whole). Its 70B on eight devices is 30 % too fast where 128 of the device's 140 GiB are taken; on 32 and more it is met within 6 %.
- Context parallelism of torchtitan's of 4 and 8 ranks: 24 and 27 % too fast, 2 ranks within 1 %. Its ring gathers keys and values that were repeated to
  the number of heads, and the kernels are of one part of the sequence each; priced is a ring of keys and values as they are. Its memory, 18 % too low, is
  what the allocator had reserved at most.
- YaFSDP's table of FSDP: sequences of 2048 are 22 to 29 % too fast, of 4096 and 8192 3 to 14. Network and nodes of 64 to 256 A100s are not stated; what is missing is
  0.1 to 0.25 s a step of the 7B whatever the sequence: gathers and sums that compute does not cover.
- NVIDIA's MLPerf 4.0 runs of GPT-3: 13 to 17 % too slow, alike on 512 and on 11616 devices (1.4 % with one factor); GPT-3 175B in fp8 is too slow in NVIDIA's other tables too.
"""


_CHANGED_SIXTH = """
No number was fitted to these runs, and no profile of a device changed. What holds for every source, known or not:

- **Backward of powers and means.** The gradient of `pow`, `square` and `rsqrt` is made by three kernels and that of `mean` writes a whole tensor before it is divided; each was priced as one pass
  (`cost/work.py`; counted on torch's own backward, kernel by kernel).
- **Parameters in half precision** (`bf16_true`): states and reduced gradients in bfloat16 too, which no cell of a table could say. torchtune's and universal-llm-trainer's rows say it now;
  `precision` was `bf16`, as `blind_before_6.json` has them. Their memory was 124 % too high.

By source, of its own files:

- **Chains of operators** (`operator_chains`): Hugging Face's GPT-2 has a GELU of eight operators and its Llama an RMS norm in single precision; both were priced as one kernel. DeepSpeed's, Lightning's,
  GPT2-Optimization's and Qwen's rows run them, and so do ATorch's and the eight A800s of earlier tests: ATorch's 15 % became 5 ([blind3.md](blind3.md)), the A800s' 37 became 31,
  LitGPT's 14 became 2 ([blind5.md](blind5.md)). No rank of tensor parallelism has a part of such a norm, as of one that is one operator.
- **Scores of plain torch** (`plain_scores`). A table's `scores` are those of one fused softmax, as Megatron's. Hugging Face's GPT-2, minGPT and GPT2-Optimization scale, mask and take the softmax one kernel after
  the other, keep the scaled scores' mask and the probabilities, and under autocast the softmax is in single precision. DeepSpeed's rows went from 47 to 39 % by it and the V100s of GPT2-Optimization from 23 to 18.
- **Dao-AILab's** training has fused dense layers, norms with dropout and a cross entropy: 11 % were missed, 7 since.
"""

_MISSED_SIXTH = """
- **What the host takes for eager steps** is no line of its own: a step is as long as its kernels. torch-mojo-backend's FSDP2 takes 224 ms for 64 tokens and for 1024 (the source says that
  the GPU works for some 110 of them), Qwen's steps 2.1 to 2.3 s up to 2048 tokens, Lightning's 0.74 to 0.82 s for up to eight samples of 128 tokens: 33 to 77 % too fast all of them, where the longest sequences of the
  same sources are met within 3 to 18 %. Costs of a launch are in no profile of a GPU; one fitted to these rows would be a guess for any other host.
- **Gradients before there are any.** Where a step has one micro-batch and gradients begin as `None`, blocks whose backward is still to come have none at the loss's peak; all are counted.
  universal-llm-trainer's two rows are called impossible for it (97 GiB; 83 without, 78 measured), and torchtune's are 6 to 35 % too high. The search's bounds count them as well.
- Lightning's two largest rows are called impossible on 16 GiB: what the allocator loses to whole segments, 1 to 4 GiB by the profile, is less there.
- Hugging Face's Llama on A100s: 41 % too fast here, as on the eight A800s of the [fifth test](blind5.md); its GPT-2 on V100s 8 to 35, most where ranks sum gradients and step whole parameters.
- GPT2-Optimization's memory with DeepSpeed, 48 % too low by its allocator's count: buckets of 5e8 elements, which hold all of a small model's gradients twice, are in no column.
- No run on MI300X, L4, A10G, B200 or H200 was found that states layout, batch and sequence and is in no earlier table. Those on these devices state a throughput and a picture.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Words:
    """What a page says beside its tables.

    Attributes:
        title: of the page.
        files: of its runs and of what was predicted before; the page, all by name.
        seen: what had been looked at before the first prediction.
        changed, missed: since, and still.
    """

    title: str
    files: tuple[str, str, str]
    seen: str
    changed: str
    missed: str

    @property
    def written(self) -> str:
        """How the page is made."""
        runs, before, page = self.files
        return f"Written by `autopar validate {runs} --before {before} --markdown {page}`; do not edit."


FIRST = Words(
    title="Blind test",
    files=("tests/data/blind_runs.csv", "tests/data/blind_before.json", "docs/blind.md"),
    seen="Published runs that are not in the table of [validation.md](validation.md), predicted by the shipped profiles as they\n"
    "were; then causes were looked for wherever a source was missed by over 15 %.",
    changed=_CHANGED,
    missed=_MISSED,
)
SECOND = Words(
    title="Second blind test",
    files=("tests/data/blind_runs_2.csv", "tests/data/blind_before_2.json", "docs/blind2.md"),
    seen="Published runs that are neither in the table of [validation.md](validation.md) nor in that of\n"
    "[the first blind test](blind.md), collected and predicted after all that these two taught.",
    changed=_CHANGED_AGAIN,
    missed=_MISSED_AGAIN,
)
THIRD = Words(
    title="Third blind test",
    files=("tests/data/blind_runs_3.csv", "tests/data/blind_before_3.json", "docs/blind3.md"),
    seen="Published runs that are neither in the table of [validation.md](validation.md) nor in those of the\n"
    "[first](blind.md) and the [second blind test](blind2.md), collected and predicted after all that these taught.",
    changed=_CHANGED_LAST,
    missed=_MISSED_LAST,
)
FOURTH = Words(
    title="Fourth blind test",
    files=("tests/data/blind_runs_4.csv", "tests/data/blind_before_4.json", "docs/blind4.md"),
    seen="Published runs that are neither in the table of [validation.md](validation.md) nor in those of the [first](blind.md),\n"
    "the [second](blind2.md) and the [third blind test](blind3.md), collected and predicted after all that these taught.",
    changed=_CHANGED_FOURTH,
    missed=_MISSED_FOURTH,
)
FIFTH = Words(
    title="Fifth blind test",
    files=("tests/data/blind_runs_5.csv", "tests/data/blind_before_5.json", "docs/blind5.md"),
    seen="Published runs that are neither in the table of [validation.md](validation.md) nor in those of the [first](blind.md),\n"
    "the [second](blind2.md), the [third](blind3.md) and the [fourth blind test](blind4.md), collected and predicted after all that\n"
    "these taught. Of torchtitan other rows of the same report, in bf16, are in the first of these tables.",
    changed=_CHANGED_FIFTH,
    missed=_MISSED_FIFTH,
)
SIXTH = Words(
    title="Sixth blind test",
    files=("tests/data/blind_runs_6.csv", "tests/data/blind_before_6.json", "docs/blind6.md"),
    seen="Published runs that are neither in the table of [validation.md](validation.md) nor in those of the [first](blind.md), the [second](blind2.md),\n"
    "the [third](blind3.md), the [fourth](blind4.md) and the [fifth blind test](blind5.md), collected and predicted after all that these taught. No site knew\n"
    "any of the sources, so that the first table is what people's own runs get.",
    changed=_CHANGED_SIXTH,
    missed=_MISSED_SIXTH,
)
TESTS = (FIRST, SECOND, THIRD, FOURTH, FIFTH, SIXTH)
_FIGURES = (
    "What the runs are and how cells were derived: [tests/data/README.md](../tests/data/README.md). The second table is no\n"
    "blind test any more: people had seen the first."
)


def words_of(before: Path) -> Words:
    """The words of the page for the earlier predictions in a file: those of the first test where it is of no other."""
    return next((words for words in TESTS if before.name == Path(words.files[1]).name), FIRST)


def read_before(path: Path) -> tuple[Score, ...]:
    """The scores that an earlier ``autopar validate --json`` printed; older releases called them ``scores``.

    Raises:
        UsageError: the file has none.
    """
    try:
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return tuple(Score(**score) for score in found["summary" if "summary" in found else "scores"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(
            "This is not what 'autopar validate --json' printed of these runs",
            where=str(path),
            got=str(error),
            fix="Print it with the release to compare with",
        ) from error


def hidden(runs: Sequence[Run]) -> tuple[Run, ...]:
    """The runs as if their sources were not known: each release has a number for its name."""
    numbers = {release: i + 1 for i, release in enumerate(dict.fromkeys(run.release for run in runs))}
    return tuple(replace(run, source=f"unnamed {numbers[run.release]}", name=f"row {run.line}") for run in runs)


def page(
    session: Session,
    outcome: Outcome,
    before: Sequence[Score],
    progress: Callable[[str, int, int], None] | None = None,
    words: Words = FIRST,
) -> str:
    """The page; lays out and predicts the runs once more with their names hidden."""
    unnamed = evaluate(Session(hidden(session.runs), place=session.place, progress=progress))
    lines = [
        f"# {words.title}",
        words.written,
        f"{words.seen}\n{_FIGURES}",
        "## Before anything was changed",
        markdown(before),
        "## Since",
        markdown(outcome.scores),
        "## With names hidden",
        "The same rows and profiles, no source known by name: what is predicted of a source that nobody has described.",
        markdown([replace(unnamed.scores[-1], name="all, names hidden")]),
        "## What was changed between",
        words.changed.strip(),
        "## What is still missed, and why",
        words.missed.strip(),
        "Single rows, missed most:",
        "\n".join(f"- {line}" for line in worst(session.runs, outcome.predictions)),
    ]
    missing = failures(outcome.failed, len(session.runs) + len(outcome.failed))
    if missing:
        lines += ["## Rows without a prediction", missing[0], "\n".join(missing[1:])]
    return "\n\n".join(lines) + "\n"
