import configparser
import subprocess
import sys
import tomllib
import zipfile
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
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False
    )
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
