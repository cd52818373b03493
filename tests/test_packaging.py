import ast
import configparser
import subprocess
import sys
import tomllib
import zipfile
from collections import Counter
from functools import cache
from pathlib import Path

import pytest

import autopar


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory, checkout: Path) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(folder)]
    done = subprocess.run(command, cwd=checkout, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    (path,) = folder.glob("*.whl")
    return path


@pytest.mark.slow
def test_the_wheel_holds_every_module_and_data_file(wheel: Path, checkout: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    expected = {str(path.relative_to(checkout)) for path in (checkout / "autopar").rglob("*.py")}
    for folder in ("profiles", "search"):
        found = {f"autopar/_data/{path.relative_to(checkout)}" for path in (checkout / folder).rglob("*.toml")}
        expected |= found
    assert any(name.startswith("autopar/_data/profiles/links/") for name in expected)
    assert expected | {"autopar/py.typed"} <= names
    assert not [name for name in names if name.startswith(("tests/", "tools/", "examples/")) or "__pycache__" in name]


@pytest.mark.slow
def test_the_wheel_gives_the_command_and_the_licence(wheel: Path) -> None:
    archive = zipfile.ZipFile(wheel)
    (entry_points,) = (name for name in archive.namelist() if name.endswith("entry_points.txt"))
    scripts = configparser.ConfigParser()
    scripts.read_string(archive.read(entry_points).decode())
    assert scripts["console_scripts"]["autopar"] == "autopar.cli:main"
    (licence,) = (name for name in archive.namelist() if name.endswith("licenses/LICENSE"))
    assert "Version 2.0, January 2004" in archive.read(licence).decode()
    (metadata,) = (name for name in archive.namelist() if name.endswith("METADATA"))
    text = archive.read(metadata).decode()
    assert "Requires-Dist: torch>=2.11" in text
    assert "License-Expression: Apache-2.0" in text


@pytest.mark.slow
def test_the_data_is_found_from_the_unpacked_wheel(wheel: Path, tmp_path: Path) -> None:
    zipfile.ZipFile(wheel).extractall(tmp_path)
    code = (
        "import autopar, pathlib\n"
        "from autopar.util.files import data_directory\n"
        "assert pathlib.Path(autopar.__file__).is_relative_to(pathlib.Path.cwd()), autopar.__file__\n"
        "print(data_directory('profiles').relative_to(pathlib.Path.cwd()).as_posix())\n"
        "print(autopar.Cluster.parse('h100-sxm5-80gb:4x8').world_size)\n"
    )
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False)
    assert done.stdout.split() == ["autopar/_data/profiles", "32"], done.stderr


def test_the_public_names_are_few_and_all_there() -> None:
    assert len([name for name in autopar.__all__ if not name.endswith("Error")]) <= 15
    assert autopar.__all__ == sorted(autopar.__all__)
    for name in autopar.__all__:
        assert getattr(autopar, name).__name__ == name
        assert callable(getattr(autopar, name)), name
    assert set(autopar.__all__) <= set(dir(autopar))
    with pytest.raises(AttributeError, match="public names"):
        autopar.searc  # noqa: B018


def test_the_version_and_the_constraints_agree_with_the_project(checkout: Path) -> None:
    project = tomllib.loads((checkout / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert project["version"] == autopar.__version__
    assert f"## [{autopar.__version__}]" in (checkout / "CHANGELOG.md").read_text(encoding="utf-8")
    lines = (checkout / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pinned = {line.partition("==")[0] for line in lines if line and not line.startswith("#")}
    extras = (item for extra in project["optional-dependencies"].values() for item in extra)
    bare = {name.partition(">")[0] for name in (*project["dependencies"], *extras)}
    assert bare - {"psycopg[binary]"} == pinned - {"psycopg", "psycopg-binary"}
    assert {"psycopg", "psycopg-binary"} <= pinned  # what the extra of that one is made of


def test_the_make_targets_need_no_index_and_ci_calls_them(checkout: Path) -> None:
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        assert "index-url" not in (checkout / name).read_text(encoding="utf-8"), name
    script = checkout / ".ci" / "run"
    assert script.stat().st_mode & 0o111
    assert "make test" in script.read_text(encoding="utf-8")


# --- what an import loads

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
