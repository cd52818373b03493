import re
import runpy
import shlex
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import typer

import autopar
from autopar.cli.app import app
from autopar.verification.rank_pool import WorkerPool
from tests.support.cli_runner import Run
from tests.support.lower.against_model import check
from tests.support.scripts import run_script
from tests.support.small_models import calling

ROOT = Path(__file__).resolve().parent.parent
GUIDES = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
RUN_BY_A_TEST = {"README.md": 1, "tutorial.md": 2, "parallel-model.md": 1}
"""How many blocks of Python that are no doctests each guide has; tests below run each of them."""
TEXTS = {"README.md": 0, "reading-a-plan.md": 1, "tour.md": 1}
"""How many blocks of plain text: listings, drawings."""


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)


def commands(page: Path) -> list[list[str]]:
    """The lines of shell blocks as words, without remarks."""
    lines = "".join(blocks(page, "sh")).replace("\\\n", " ").splitlines()
    return [words for words in (shlex.split(line, comments=True) for line in lines) if words]


@pytest.mark.parametrize("page", GUIDES, ids=lambda page: page.name)
def test_each_block_is_of_a_kind_that_some_test_looks_at(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    kinds = re.findall(r"^```(\w*)$", text, flags=re.MULTILINE)[::2]
    assert set(kinds) <= {"python", "sh", "toml", "text"}, kinds
    plain = [block for block in blocks(page, "python") if ">>>" not in block]
    assert len(plain) == RUN_BY_A_TEST.get(page.name, 0)
    assert kinds.count("text") <= TEXTS.get(page.name, 0)


def test_what_a_user_reads_is_short() -> None:
    pages = [*GUIDES, *(ROOT / "docs" / "reference").glob("*.md")]
    assert sum(page.stat().st_size for page in pages) <= 60 * 1024
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 100


@pytest.mark.parametrize("page", GUIDES, ids=lambda page: page.name)
def test_the_shell_reads_every_command_of_a_guide(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for words in commands(page):
        for word in words:
            if Path(word).suffix in {".json", ".toml"}:
                Path(word).touch()
        if words[0] == "autopar":
            read(words[1:])


def read(words: Sequence[str]) -> None:
    """Parses a command as the shell does, without running it: an unknown verb or option is an error."""
    command: Any = typer.main.get_command(app)
    rest = list(words)
    while hasattr(command, "get_command"):
        inner = command.get_command(None, rest[0])
        assert inner is not None, f"no command {rest[0]}"
        command, rest = inner, rest[1:]
    command.make_context(command.name, rest)


def namespace(**precision: Any) -> dict[str, Any]:
    """What a guide takes for granted: a model, batches, and a parallel model of it."""
    model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1), torch.nn.Flatten(0))
    mean = torch.nn.Sequential(model, calling(lambda x: x.square().mean()))
    batch = {"input": torch.ones(4, 8) / 100}
    found = {"autopar": autopar, "torch": torch, "model": mean, "batch": batch, "loader": [batch, batch]}
    if precision:
        found["par"] = autopar.parallelize(mean, cluster="cpu:1x1", example_inputs=batch, **precision)
        found["optimizer"] = torch.optim.AdamW(found["par"].parameters(), lr=3e-4)
    return found


def test_the_quick_start_trains() -> None:
    (code,) = (block for block in blocks(ROOT / "README.md", "python") if ">>>" not in block)
    assert len(code.splitlines()) <= 6
    names = namespace()
    names["loader"] = [{"input": torch.ones(4, 8)}] * 3
    exec(code.replace("h100-sxm5-80gb:1x8", "cpu:1x1").replace("=512", "=4"), names)
    assert names["par"].step_count == 3


def test_the_loop_of_float16_steps() -> None:
    (code,) = (block for block in blocks(ROOT / "docs" / "parallel-model.md", "python") if ">>>" not in block)
    names = namespace(precision="fp16")
    before = {name: value.clone() for name, value in names["par"].full_state_dict().items()}
    made, loop = code.split("\n", 1)
    exec(made, names)
    for _ in range(6):  # the first scale is too large, so that first steps are skipped
        exec(loop, names)
    after = names["par"].full_state_dict()
    assert names["scaler"].is_enabled()
    assert any(not torch.equal(before[name], after[name]) for name in before)


@pytest.mark.slow
@pytest.mark.distributed
def test_the_tutorial_trains_and_goes_on(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = ROOT / "docs" / "tutorial.md"
    model, script = blocks(page, "python")
    (tmp_path / "my_model.py").write_text(model)
    planning = [words[1:] for words in commands(page) if words[:1] == ["autopar"] and "my_model:build" in words]
    assert [words[0] for words in planning] == ["trace", "search", "verify"]
    for words in planning:
        assert run(*({"local": "cpu:1x2", "16": "4"}.get(word, word) for word in words)).text
    assert any(words[0] == "torchrun" for words in commands(page))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    for long, short in (
        ("STEPS, WARM_UP = 16, 12, 4", "STEPS, WARM_UP = 4, 6, 2"),
        ("step_count % 6", "step_count % 3"),
    ):
        assert long in script
        script = script.replace(long, short)
    halves = tmp_path / "halves"
    halves.mkdir()
    for name in ("plan.json", "my_model.py"):
        (halves / name).write_bytes((tmp_path / name).read_bytes())
    with WorkerPool(2) as pool:

        def steps(folder: Path, last: str = "STEPS") -> list[str]:
            """What the script prints that ends with a step, started in a folder."""
            path = folder / f"train{last}.py"
            path.write_text(script.replace("par.step_count, STEPS)", f"par.step_count, {last})"))
            return pool.run(run_script, str(path), (), None, str(folder))[0].splitlines()

        first, parts = steps(tmp_path), [steps(halves, "3"), steps(halves)]
    losses = [float(line.split()[3]) for line in first]
    assert losses[-1] < losses[0]
    assert [len(part) for part in (first, *parts)] == [6, 3, 3]
    again = [*parts[0], *parts[1]]
    assert [line.split()[-1] for line in again] == [line.split()[-1] for line in first]
    assert [float(line.split()[3]) for line in again] == pytest.approx(losses, rel=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "count"), [("README.md", 3), ("mixed-clusters.md", 1)])
def test_plans_of_the_guides_are_found(run: Run, name: str, count: int, tmp_path: Path) -> None:
    """Commands that plan a model that is written out, of fewer layers, with the first plan they come to; those with MODEL are read alone, and
    ``verify`` is run by the tutorial."""
    page = ROOT / name if name == "README.md" else ROOT / "docs" / name
    for text in blocks(page, "toml"):
        (tmp_path / f"{tomllib.loads(text)['name']}.toml").write_text(text)
    chosen = [w for w in commands(page) if w[0] == "autopar" and w[1] in ("search", "show", "explain")]
    assert len(chosen) == count
    for words in chosen:
        smaller = [word.replace("layers=32", "layers=4") for word in words[1:]]
        assert "mesh" in run(*smaller, *(["--trials", "1"] if words[1] == "search" else [])).text


@pytest.mark.slow
def test_the_plan_that_is_explained_is_the_one_that_is_found(run: Run) -> None:
    """Each line of the listing is one of the plan's text; figures may change with profiles and bounds."""
    page = ROOT / "docs" / "reading-a-plan.md"
    (words,) = (words for words in commands(page) if words[:2] == ["autopar", "search"])
    found = shapes(run(*words[1:]).text)
    (listing,) = blocks(page, "text")
    assert [line for line in shapes(listing) if line not in found] == []


def shapes(text: str) -> list[str]:
    """Lines with ``#`` for each number and its unit."""
    lines = (line.strip() for line in text.splitlines() if line.strip())
    return [re.sub(r"[\d][\d.,]*( m?s\b)?", "#", line) for line in lines]


def test_errors_that_are_looked_up_exist() -> None:
    """Each text of the table stands in the code; ``...`` for what differs."""
    table = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
    quoted = re.findall(r"^\| `([^`]+)`", table, flags=re.MULTILINE)
    assert len(quoted) > 15
    code = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "autopar").rglob("*.py"))
    assert [text for text in quoted for part in text.split("...") if part.strip() not in code] == []


# --- all pages, and examples

PAGES = sorted({*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("*/README.md"), *ROOT.glob("*/*/README.md")})


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_leads_somewhere(page: Path) -> None:
    targets = re.findall(r"\]\(([^)#\s]+)[^)]*\)", page.read_text(encoding="utf-8"))
    local = [target for target in targets if "://" not in target]
    assert [target for target in local if not (page.parent / target).exists()] == []


def test_the_tour_names_every_package_and_no_file() -> None:
    text = (ROOT / "docs" / "tour.md").read_text(encoding="utf-8")
    packages = {path.parent.name for path in (ROOT / "autopar").glob("*/__init__.py")}
    assert [name for name in sorted(packages) if f"`{name}/`" not in text] == []
    assert ".py" not in text
    assert len(text.splitlines()) <= 60


def test_the_decisions_are_numbered_without_gaps() -> None:
    names = sorted(path.name for path in (ROOT / "docs" / "adr").glob("*.md"))
    assert [int(name[:4]) for name in names] == list(range(1, len(names) + 1))
    for name in names:
        text = (ROOT / "docs" / "adr" / name).read_text(encoding="utf-8")
        assert text.startswith(f"# {int(name[:4])}. "), name
        assert re.match(r"(Accepted|Superseded), \d{4}-\d\d", text.splitlines()[2]), name
        assert [part for part in ("Context", "Decision", "Consequences") if f"## {part}" not in text] == [], name


def test_every_make_target_that_the_readme_names_exists() -> None:
    heads = re.findall(r"^([a-z -]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), flags=re.MULTILINE)
    targets = {name for head in heads for name in head.split()}
    named = set(re.findall(r"make ([a-z-]+)", (ROOT / "README.md").read_text(encoding="utf-8")))
    assert {"setup", "demo", "test", "test-fast", "lint", "bench", "gpu"} <= targets
    assert {"test", "test-fast"} <= named <= targets


def example(name: str) -> dict[str, Any]:
    return runpy.run_path(str(ROOT / "examples" / f"{name}.py"))


def test_the_operator_of_the_example_is_split_and_computes_what_one_device_does() -> None:
    made = example("custom_op")
    assert "example.squash.default has no declared rule: found by execution" in "\n".join(made["main"]().notes)
    batch = {"x": torch.randn(4, 16, 64), "labels": torch.randint(0, 10, (4, 16))}
    plan = check(made["Model"](), batch, ["tp=2", "up.*=tp:S(0)", "down.*=tp:S(1)"])
    assert any("split f" in typing.strategies for layout in plan.layouts for typing in layout.typings[1:])


def test_the_experts_of_the_example_stand_on_data_ranks() -> None:
    made = example("own_moe")["main"]()
    assert (made.mesh.ep, made.mesh.ep_data, made.num_micro_batches) == (4, 4, 1)
    notes = "\n".join(made.notes)
    assert "mixtures of experts (2): experts spread and tokens sent over 4 data ranks" in notes
    assert "statistics over the global batch" in notes


def test_the_language_model_around_the_tower_of_the_example_is_split() -> None:
    made = example("image_tower")
    pins = ["tp=2", "pp=2", "*up_proj.weight=tp:S(0)", "*gate_proj.weight=tp:S(0)", "*down_proj.weight=tp:S(1)"]
    plan = check(made["Model"](), made["batch"](4), pins)
    assert [note for note in plan.notes if note.startswith("opaque") and "known roughly: tower;" in note]
