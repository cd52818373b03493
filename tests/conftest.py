"""Settings for every test."""

import gc
import multiprocessing
import os
import sys
from collections.abc import Callable
from functools import cache
from multiprocessing import forkserver
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from tests.support.cli_runner import run_fixture  # noqa: F401  for all tests

# one process computes with one thread: tests stay comparable on two cores, and processes that tests start inherit it
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

SLOW = [HealthCheck.too_slow]
settings.register_profile("autopar", deadline=None, max_examples=50, database=None, suppress_health_check=SLOW)
settings.load_profile("autopar")


def pytest_addoption(parser: pytest.Parser) -> None:
    """``--update-golden`` writes the expected texts anew; review the difference."""
    parser.addoption("--update-golden", action="store_true", help="write the files of tests/golden anew")


gc.set_threshold(20_000, 20, 20)  # exports make millions of objects, of which few are garbage in circles

JOBS = (
    *(f"transformers.models.{kind}.modeling_{kind}" for kind in ("gpt2", "llama", "mixtral")),
    *(f"tests.support.distributed.{name}" for name in ("checkpoints", "oddities", "returning", "scaled")),
    *(f"tests.distributed.test_{name}" for name in ("own_model", "predicted", "smaller_batches", "training")),
    *(f"tests.integrations.test_{name}" for name in ("accelerate", "hf", "lightning")),
    *("autopar.benchmark.rank_runs", "tests.support.scripts", "tools.gpus.ranks"),
)


@cache
def start_server() -> None:
    """Of worker processes: it imports once what their jobs need, for all pools of this process, whichever is the first."""
    from autopar.verification.against_one_device import PRELOAD

    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*PRELOAD, "autopar.verification.rank_pool", *JOBS])
    forkserver.ensure_running()


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Nothing is imported for tests that start no processes."""
    if item.get_closest_marker("distributed"):
        start_server()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip by name what needs a GPU where there is none."""
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked:
        return
    import torch

    if not torch.cuda.is_available():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device; 'make gpu' runs it where there is one"))


@pytest.fixture(autouse=True)
def the_same_numbers_every_time() -> None:
    """What a test draws at random does not hang on the tests before it, nor changes from run to run."""
    if torch := sys.modules.get("torch"):
        torch.manual_seed(0)


@pytest.fixture(autouse=True)
def own_cache_directory(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing that a test measures or stores reaches the user's home, or another test."""
    home = tmp_path_factory.getbasetemp() / "home"
    home.mkdir(exist_ok=True)
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.delenv("AUTOPAR_CACHE", raising=False)


@pytest.fixture
def known_machine(own_cache_directory: None) -> None:
    """This machine counts as measured, by numbers that are made up: a measurement takes half a minute of one core."""
    from autopar.hardware.machine import profile_dict, profile_path
    from autopar.util.files import write_toml
    from tests.support.measured import MEASURED

    path = profile_path()
    if path is not None and not path.exists():
        write_toml(path, profile_dict(MEASURED))


@pytest.fixture(scope="session")
def checkout() -> Path:
    return Path(__file__).resolve().parent.parent


@pytest.fixture
def golden(request: pytest.FixtureRequest, checkout: Path) -> Callable[[str, str], None]:
    def compare(name: str, text: str) -> None:
        path = checkout / "tests" / "golden" / name
        if request.config.getoption("--update-golden"):
            path.write_text(text, encoding="utf-8")
        assert path.exists(), f"{name} is missing: run pytest --update-golden and review it"
        assert text == path.read_text(encoding="utf-8"), f"{name} differs: run pytest --update-golden and review it"

    return compare
