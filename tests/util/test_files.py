import os
import re
from functools import partial
from pathlib import Path

import pytest

from autopar.errors import UsageError
from autopar.plan.file import load_plan, save_plan
from autopar.planner.studies.study import open_storage
from autopar.util.files import check_writable, write_text
from autopar.util.toml import Table
from tests.support.example_plans import single_plan
from tests.support.said import refuses


def test_a_file_is_replaced_as_a_whole_and_others_may_read_it(tmp_path: Path) -> None:
    path = tmp_path / "made" / "a.txt"
    write_text(path, "old", make_folder=True)
    write_text(path, "new")
    assert path.read_text() == "new"
    umask = os.umask(0)
    os.umask(umask)
    assert path.stat().st_mode & 0o777 == 0o666 & ~umask
    assert list(path.parent.iterdir()) == [path]


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("no/a.txt", "no such file"), ("file/a.txt", "not a directory"), ("folder", "is a directory"),
        (".", "is a directory"), ("..", "is a directory"),
    ],
)  # fmt: skip
def test_what_cannot_be_written_is_said_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, reason: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("")
    (tmp_path / "folder").mkdir()
    before = sorted(tmp_path.rglob("*"))
    for call in (lambda: check_writable(Path(name)), lambda: write_text(Path(name), "text")):
        refuses(UsageError, f"Cannot write .*{re.escape(name)}: {reason}.*Choose a path", call)
        assert sorted(tmp_path.rglob("*")) == before


def test_devices_streams_and_links_stay_what_they_are(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "stream")
    (tmp_path / "to_stream").symlink_to("stream")
    (tmp_path / "link").symlink_to("folder/a.txt")
    write_text(tmp_path / "link", "text")
    assert (tmp_path / "folder" / "a.txt").read_text() == "text"
    before = {path: path.lstat() for path in tmp_path.rglob("*")}
    for name in ("stream", "to_stream"):
        for call in (partial(check_writable, tmp_path / name), partial(write_text, tmp_path / name, "text")):
            refuses(UsageError, f"Cannot write .*{name}: it is a device or a stream", call)
    assert {path: path.lstat() for path in tmp_path.rglob("*")} == before
    refuses(UsageError, "it is a device or a stream", check_writable, Path("/dev/stdout"))


def test_a_mark_of_the_encoding_is_no_part_of_a_table_or_plan(tmp_path: Path) -> None:
    table, plan = tmp_path / "space.toml", tmp_path / "plan.json"
    table.write_text('name = "mine"\n', encoding="utf-8-sig")
    assert Table.load(table).text("name") == "mine"
    save_plan(single_plan(), plan)
    plan.write_text(plan.read_text(encoding="utf-8"), encoding="utf-8-sig")
    assert load_plan(plan) == single_plan()


def test_a_journal_that_is_none_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "study.log"
    path.write_text("no journal\nat all\n")
    with pytest.raises(UsageError, match=r"--storage: Cannot open the storage .*study\.log': Expecting value"):
        open_storage(f"journal:///{path}")
