import multiprocessing
import os
import pickle
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import optuna
import pytest
from optuna.trial import FrozenTrial, TrialState
from sqlalchemy.pool import NullPool

from autopar import api
from autopar.errors import UsageError
from autopar.graph.graph import Graph
from autopar.plan.plan import FP32, Plan, SearchRecord
from autopar.planner.branch_and_bound.frontier import Result
from autopar.planner.planner import Planner
from autopar.planner.search import Limits
from autopar.planner.space.space import load_space, with_sampler
from autopar.planner.studies import workers
from autopar.planner.studies.study import StudyLedger
from autopar.planner.studies.workers import Job, identity, study_name
from autopar.util import files
from tests.support.cli_runner import Run
from tests.support.planner.graphs import mlp
from tests.support.planner.tasks import CLUSTER, task_of
from tests.support.said import refuses

LIMIT_S = 250
SAMPLED = 9
"""Trials of a search with a sampler."""
RECORD = SearchRecord(wall_time_s=0.0, candidates=0, evaluated=0, lower_bound_s=0.0, gap=0.0)


@pytest.fixture(scope="module")
def graph() -> Graph:
    return mlp(layers=5, batch=2, width=64, hidden=256)


@pytest.fixture(scope="module")
def planner(graph: Graph) -> Planner:
    return Planner(task_of(graph))


@pytest.fixture(scope="module")
def alone(graph: Graph) -> Plan:
    return search(graph)


def search(graph: Graph, **options: Any) -> Plan:
    return api.search(graph, cluster=CLUSTER, global_batch_size=16, space="quick", **options)


def same(one: Plan, other: Plan) -> bool:
    """Equal but for the record of how it was found."""
    return replace(one, search=RECORD) == replace(other, search=RECORD) and one.search.gap == other.search.gap


def study_of(planner: Planner, url: str) -> StudyLedger:
    return StudyLedger(planner.pool, storage=url, name=study_name(planner.task), identity=identity(planner.task))


def trials_of(url: str) -> list[FrozenTrial]:
    storage = optuna.storages.RDBStorage(url, engine_kwargs={"poolclass": NullPool})
    (summary,) = optuna.get_all_study_summaries(storage)
    return optuna.load_study(study_name=summary.study_name, storage=storage).trials


@pytest.fixture(params=["sqlite", "journal"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return f"{request.param}:///{tmp_path / 'study'}"


def test_outcomes_come_back_as_they_were_told(planner: Planner, url: str) -> None:
    told = [Result(time_s=0.1 + 0.2, peak_memory_bytes=7), Result(at_least_s=1 / 3)]
    told += [Result(reason="memory: needs 2 GiB", needs_bytes=2**31)]
    one, other = study_of(planner, url), study_of(planner, url)
    for index, outcome in enumerate(told):
        one.claim(index, 0.25)
        other.read()
        assert other.is_claimed(index)
        one.record(index, outcome)
    one.claim(3, 0.25)
    one.release(3)
    other.read()
    assert (other.results, other.incumbent_s) == (dict(enumerate(told)), told[0].time_s)
    assert not any(other.is_claimed(index) for index in range(5))


def test_a_trial_says_what_it_is_and_why(planner: Planner, url: str) -> None:
    one, other = study_of(planner, url), study_of(planner, url)
    one.claim(0, 0.25)
    other.read()
    other.claim(0, 0.25)  # one was slow: both end the same trial
    other.record(0, Result(time_s=0.5))
    one.record(0, Result(time_s=0.5))
    (trial,) = one.storage.get_all_trials(one.id)
    assert (trial.state, trial.value, trial.intermediate_values) == (TrialState.COMPLETE, 0.5, {0: 0.25})
    assert trial.params["tp"] == planner.pool[0].mesh.tp
    assert trial.user_attrs["candidate"] == str(planner.pool[0])


def test_what_experts_would_try_waits_until_a_search_comes_to_it(planner: Planner, url: str) -> None:
    one, other, told = study_of(planner, url), study_of(planner, url), {3: "rule", 5: "another", 7: "third"}
    for ledger in (one, other):
        ledger.expect(told)
    trials = one.storage.get_all_trials(one.id)
    assert [(t.state, t.user_attrs["rule"]) for t in trials] == [(TrialState.WAITING, rule) for rule in told.values()]
    assert trials[0].params == trials[0].system_attrs["fixed_params"]
    one.read()
    one.claim(3, 0.25)
    other.claim(3, 0.25)  # it was not yet seen that one had
    one.record(3, Result(time_s=0.5))
    other.record(3, Result(time_s=0.5))
    other.finish({5: 0.75, 7: float("inf")}.get)
    trials = one.storage.get_all_trials(one.id)
    ended = [(TrialState.COMPLETE, 0.5), (TrialState.PRUNED, 0.75), (TrialState.FAIL, None)]
    assert [(trial.state, trial.value) for trial in trials] == ended
    assert trials[0].intermediate_values == {0: 0.25}
    assert trials[2].user_attrs["reason"] == "memory: fits in no layout, by a bound"


def test_a_trial_of_the_dead_is_ended_where_others_have_told_of_its_candidate(planner: Planner, url: str) -> None:
    dead, one = study_of(planner, url), study_of(planner, url)
    dead.claim(0, 0.25)
    one.claim(0, 0.25)  # before it could read that it was claimed
    one.record(0, Result(time_s=0.5))
    one.finish({}.get)
    assert [(t.state, t.value) for t in one.storage.get_all_trials(one.id)] == [(TrialState.COMPLETE, 0.5)] * 2


def test_a_search_goes_on_from_a_study_and_leaves_nothing_waiting(graph: Graph, alone: Plan, tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'study.db'}"
    first = search(graph, storage=url, trials=1)
    waiting = [trial for trial in trials_of(url) if trial.state == TrialState.WAITING]
    assert first.search.evaluated == 1 and len(waiting) >= 2
    assert same(search(graph, storage=url), alone)
    ended = {trial.number: trial for trial in trials_of(url)}
    for trial in waiting:
        own = ended[trial.number]
        assert own.state.is_finished() and (own.value is None or own.value >= alone.predicted.step_time_s)
    assert len({trial.user_attrs["candidate"] for trial in ended.values()}) == len(ended) > 2
    assert same(search(graph, storage=url), alone)
    assert len(trials_of(url)) == len(ended)


def test_an_outcome_is_kept_where_the_trial_was_ended_without_one(planner: Planner, url: str) -> None:
    one, other = study_of(planner, url), study_of(planner, url)
    one.claim(0, 0.25)
    other.read()
    other.claim(0, 0.25)
    one.release(0)
    other.record(0, Result(time_s=0.5))
    one.read()
    assert one.results == {0: Result(time_s=0.5)}


def test_the_name_of_a_study_says_all_that_its_times_depend_on(graph: Graph) -> None:
    base = task_of(graph)
    others = [
        task_of(mlp(layers=3, batch=2, width=64, hidden=256)), task_of(graph, cluster="cpu:1x4?memory=1e9"),
        task_of(graph, global_batch_size=32), task_of(graph, precision=replace(FP32, reduce="bfloat16")),
        task_of(graph, optimizer="sgd"), task_of(graph, "tp=2"), task_of(graph, space="default"),
    ]  # fmt: skip
    changed = [[key for key, text in identity(base).items() if identity(other)[key] != text] for other in others]
    assert changed == [["model"], ["cluster"], ["global batch"], ["precision"], ["optimizer"], ["pins"], ["space"]]
    assert len({study_name(task) for task in (base, *others)}) == 1 + len(others)
    moved = replace(graph, ops=tuple(replace(op, source="/elsewhere/model.py:3") for op in graph.ops))
    assert study_name(task_of(moved)) == study_name(base)


def test_a_study_has_the_version_of_all_code_that_prices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    copy = tmp_path / "autopar"
    shutil.copytree(files.PACKAGE, copy, ignore=shutil.ignore_patterns("__pycache__"))
    shipped = files.sources()
    monkeypatch.setattr(files, "PACKAGE", copy)
    assert files.sources() == shipped
    for name in ("cost/model.py", "graph/graph.py", "planner/planner.py", "cli/app.py"):
        before, path = files.sources(), copy / name
        path.write_text(path.read_text() + "# changed\n")
        assert (files.sources() != before) == (name != "cli/app.py")


def test_a_storage_that_cannot_be_opened_is_said(graph: Graph) -> None:
    refuses(UsageError, "unable to open database file", search, graph, storage="sqlite:////no/such/folder/study.db")
    said = "psycopg" if find_spec("psycopg") is None else r"me:\*\*\*@"
    assert "secret" not in str(refuses(UsageError, said, search, graph, storage="postgresql://me:secret@localhost:1/x"))


@pytest.mark.slow
def test_without_a_storage_optuna_is_not_loaded(checkout: Path) -> None:
    script = (
        "import sys\nfrom autopar import api\nfrom tests.support.planner.graphs import mlp\n"
        "api.search(mlp(), cluster='cpu:1x2', global_batch_size=4, space='quick')\n"
        "print('optuna' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=LIMIT_S, check=False,
                          cwd=checkout, env={**os.environ, "PYTHONPATH": str(checkout)})  # fmt: skip
    assert done.stdout.rstrip() == "False", done.stderr


def test_the_command_names_a_study_and_one_of_something_else_is_refused(run: Run, tmp_path: Path) -> None:
    model = ("gpt:layers=1,hidden=32,heads=2,vocab=64,seq=8", "--cluster", CLUSTER, "--global-batch", 16)
    url = f"sqlite:///{tmp_path / 'study.db'}"
    study = ("--space", "quick", "--trials", 2, "--storage", url, "--study-name", "mine")
    study += ("--sampler", "nsga2", "--sampler-seed", 2)
    assert run("search", *model, *study).code == 0
    said = run("search", *model, *study, "--pin", "tp=1").error
    assert "The study 'mine' was made with other pins. Take another name" in said
    (summary,) = optuna.get_all_study_summaries(url)
    assert (summary.study_name, summary.user_attrs["autopar global batch"]) == ("mine", "16")


# --- processes


class Doomed(StudyLedger):
    """Kills its process in the middle of its n-th word to the storage."""

    words = 1

    def _new(self, *args: Any, **kwargs: Any) -> int:
        made = super()._new(*args, **kwargs)
        self._count()
        return made

    def _end(self, *args: Any) -> bool:
        self._count()
        return super()._end(*args)

    def _count(self) -> None:
        self.words -= 1
        if self.words == 0:
            os.kill(os.getpid(), signal.SIGKILL)


def work_in_processes(planner: Planner, url: str, words: Sequence[int], **limits: int) -> list[int | None]:
    """One process for each number of words after which it is killed (0: never); all begin at once. Gives exit codes."""
    study_of(planner, url).close()
    context = multiprocessing.get_context("fork")
    begin = context.Barrier(len(words))

    def work(count: int) -> None:
        ledger = Doomed(planner.pool, storage=url, name=study_name(planner.task), identity=identity(planner.task))
        ledger.words = count
        begin.wait(LIMIT_S)
        planner.branch_and_bound(Limits(**limits), ledger=ledger).work()

    processes = [context.Process(target=work, args=(count,)) for count in words]
    for process in processes:
        process.start()
    for process in processes:
        process.join(LIMIT_S)
        process.kill()
        process.join()
    return [process.exitcode for process in processes]


@pytest.fixture
def postgresql() -> Iterator[str]:
    """URL of a database of its own, which listens on a socket alone."""
    if find_spec("psycopg") is None:
        pytest.skip("needs psycopg: pip install 'autopar[postgresql]'")
    paths = [os.environ.get("PATH", ""), *map(str, sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True))]
    control = shutil.which("pg_ctl", path=os.pathsep.join(paths))
    if control is None:
        pytest.skip("needs PostgreSQL: Debian's package postgresql")
    owner: dict[str, Any] = {}
    folder = Path(tempfile.mkdtemp(prefix="pg"))
    try:
        if os.getuid() == 0:  # the server refuses to run as root
            try:
                shutil.chown(folder, "postgres")
            except LookupError:
                pytest.skip("needs a user 'postgres', or not to be root, to start PostgreSQL")
            owner = {"user": "postgres"}

        def call(*command: str) -> None:
            done = subprocess.run(command, cwd=folder, timeout=LIMIT_S, check=False, capture_output=True, text=True,
                                  stdin=subprocess.DEVNULL, **owner)  # fmt: skip
            assert done.returncode == 0, done.stdout + done.stderr

        data = str(folder / "data")
        call(control, "-D", data, "-s", "-o", "-A trust -U postgres --no-sync --no-locale -E UTF8", "initdb")
        options = f"-k {folder} -c listen_addresses= -c fsync=off"
        call(control, "-D", data, "-s", "-w", "-o", options, "-l", str(folder / "log"), "start")
        try:
            yield f"postgresql://postgres@/postgres?host={folder}"
        finally:
            call(control, "-D", data, "-s", "-m", "immediate", "stop")
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(params=["sqlite", "postgresql"])
def shared(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    file = f"sqlite:///{tmp_path / 'study.db'}"
    return file if request.param == "sqlite" else request.getfixturevalue("postgresql")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_processes_with_a_sampler_give_the_plan_of_one_and_survive_deaths(graph: Graph, shared: str) -> None:
    """A search that asks a sampler and ends before bounds say that it may; two processes die."""
    planner = Planner(task_of(graph, space=with_sampler(load_space("default"), "tpe"), sampler_seed=3))
    options: dict[str, Any] = {"sampler": "tpe", "sampler_seed": 3, "trials": SAMPLED}
    opened = shared.replace("postgresql:", "postgresql+psycopg:")
    alone = api.search(graph, cluster=CLUSTER, global_batch_size=16, **options)
    assert len(planner.pool) > SAMPLED + 20
    assert work_in_processes(planner, shared, [1, 4], trials=SAMPLED) == [-signal.SIGKILL, -signal.SIGKILL]
    assert TrialState.RUNNING in [trial.state for trial in trials_of(opened)]
    assert work_in_processes(planner, shared, [0] * 4, trials=SAMPLED) == [0] * 4
    before = trials_of(opened)
    assert TrialState.RUNNING not in [trial.state for trial in before]
    found = api.search(graph, cluster=CLUSTER, global_batch_size=16, storage=shared, **options)
    assert same(found, alone)
    assert len(trials_of(opened)) == len(before)  # the last one has nothing left to evaluate
    assert len({trial.user_attrs["candidate"] for trial in before if trial.state.is_finished()}) >= SAMPLED


@pytest.mark.slow
def test_a_worker_does_a_whole_search(graph: Graph, alone: Plan, tmp_path: Path, checkout: Path) -> None:
    task, url = task_of(graph), f"sqlite:///{tmp_path / 'study.db'}"
    job = Job(task=task, rules={}, limits=Limits(), storage=url, study_name=study_name(task), identity=identity(task),
              durable=True, parent=os.getpid())  # fmt: skip
    (tmp_path / "job").write_bytes(pickle.dumps(job))
    command = [sys.executable, "-m", "autopar.planner.studies.worker_main", str(tmp_path / "job")]
    environment = {**os.environ, "PYTHONPATH": str(checkout), "PYTHONHASHSEED": "7"}
    done = subprocess.run(command, env=environment, timeout=LIMIT_S, check=False, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    trials = trials_of(url)
    assert same(search(graph, storage=url), alone)
    assert len(trials_of(url)) == len(trials)


@pytest.mark.slow
def test_workers_end_with_a_search(graph: Graph, alone: Plan, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    started, start = [], workers._start
    monkeypatch.setattr(workers, "_start", lambda *given: started.append(start(*given)) or started[-1])
    assert same(search(graph, workers=3, storage=f"sqlite:///{tmp_path / 'study.db'}"), alone)
    assert [worker.poll() is not None for worker in started] == [True, True]
    assert not list(tmp_path.glob("autopar-*"))


def test_a_worker_that_failed_is_told_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "worker1.log").write_text("Traceback\nKeyError: 'x'\n")
    failed = subprocess.Popen([sys.executable, "-c", "raise SystemExit(1)"])
    failed.wait()
    workers._stop([failed], tmp_path)
    assert caplog.messages == ["worker 1 of the search ended early with code 1: KeyError: 'x'"]
