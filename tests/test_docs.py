import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted(
    [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *ROOT.glob("*/README.md"), *ROOT.glob("*/*/README.md")]
)


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
