import ast
import subprocess
import sys
from collections import Counter
from functools import cache
from pathlib import Path

import pytest

MODEL = "import autopar, torch\nmodel, batch = torch.nn.Linear(4, 4), [torch.ones(4, 4)]\n"
GIVEN = "model, example_inputs=batch, loss_fn=lambda output, batch: output.square().mean()"


@cache
def loaded(code: str, *arguments: str) -> set[str]:
    """The modules that a process has loaded after ``code``."""
    script = f"{code}\nimport sys\nprint('\\n' + ' '.join(sys.modules))"
    command = [sys.executable, "-c", script, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    return set(done.stdout.splitlines()[-1].split())


def within(modules: set[str], *packages: str) -> list[str]:
    return sorted(m for m in modules if any(m == package or m.startswith(f"{package}.") for package in packages))


def test_the_package_alone_loads_nothing_large() -> None:
    modules = loaded("import autopar")
    assert within(modules, "torch", "numpy", "optuna", "transformers", "networkx", "scipy") == []
    assert within(modules, "autopar") == ["autopar", "autopar.errors"]


@pytest.mark.slow
def test_the_verbs_are_there_before_what_they_do() -> None:
    modules = loaded("import autopar.api") - loaded("import torch")
    names = ("tracing", "rules", "cost", "planner", "lower", "runtime", "verification")
    assert within(modules, *(f"autopar.{name}" for name in names)) == []
    assert within(modules, "sympy", "spmd_types", "torch.distributed.tensor", "scipy", "networkx", "optuna") == []


@pytest.mark.slow
def test_data_and_the_planner_load_no_tracer() -> None:
    names = (
        "graph.graph", "graph.rewrites", "plan.file", "plan.text", "pins.on_modules", "hardware.read", "planner.search",
    )  # fmt: skip
    modules = loaded("".join(f"import autopar.{name}\n" for name in names)) - loaded("import torch")
    assert within(modules, "autopar.tracing", "sympy", "spmd_types", "torch.distributed.tensor") == []


@pytest.mark.slow
def test_who_has_a_plan_loads_neither_planner_nor_cost(tmp_path: Path) -> None:
    plan = tmp_path / "plan.json"
    making = f"{MODEL}plan = autopar.search({GIVEN}, cluster='cpu:1x1', global_batch_size=4)"
    assert within(loaded(f"{making}\nplan.save({str(plan)!r})"), "autopar.runtime") == []
    modules = loaded(f"{MODEL}par = autopar.parallelize({GIVEN}, plan={str(plan)!r})")
    assert within(modules, "autopar.planner", "autopar.cost") == []
    assert within(modules, "autopar.runtime.launch", "autopar.lower.program") != []


def test_help_loads_no_torch() -> None:
    shown = "try: autopar.cli.main({})\nexcept SystemExit: pass\n"
    given = (["--help"], ["search", "--help"])
    modules = loaded("import autopar.cli\n" + "".join(map(shown.format, given)))
    assert within(modules, "torch", "numpy", "autopar.api", "autopar.planner") == []


def test_packages_say_what_they_are_in_a_few_lines(checkout: Path) -> None:
    for path in sorted((checkout / "autopar").rglob("*/__init__.py")):
        docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))
        assert docstring is not None, path
        assert len(docstring.splitlines()) <= 12, path


def test_few_files_have_the_name_of_another(checkout: Path) -> None:
    names = Counter(path.name for path in (checkout / "autopar").rglob("*.py") if path.name != "__init__.py")
    assert len([name for name, times in names.items() if times > 1]) <= 8
    assert len([path for path in (checkout / "autopar").glob("*.py") if path.name != "__init__.py"]) <= 5
