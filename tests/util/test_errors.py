"""Every error of the package is written in the form that :mod:`autopar.errors` describes."""

import ast
import itertools
import pickle
import re
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest

from autopar import errors
from autopar.errors import AutoparError, InternalError, UsageError

PACKAGE = Path(errors.__file__).parent
KINDS = {name for name, kind in vars(errors).items() if isinstance(kind, type) and issubclass(kind, AutoparError)}
HELPERS = ("unknown", "unreadable", "missing", "mismatch", "unsupported")
"""They bring what to do, or ask for it by a keyword without a default."""

VALUES = ("wrong",)
"""Methods of tables and rows that say of a value what was expected, by their second argument."""

VALUE = "\N{WHITE SQUARE}"
"""Stands for what is put into a text when an error is raised."""

START = re.compile(rf"[A-Z{VALUE}\"'`]|--")
"""How a problem begins: a capital letter, a value or a name in quotes, an option of the command line."""

PRIVATE = re.compile(r"\b(laws?|typings?|at rest|found none|told|own|whole(?! numbers?\b)|mends?)\b", re.IGNORECASE)
"""Words that nobody outside of the project uses like this."""


class Call:
    """A place at which an error is made."""

    def __init__(self, file: Path, tree: ast.Module, node: ast.Call, kind: str, helper: str) -> None:
        self.place = f"{file.relative_to(PACKAGE.parent)}:{node.lineno}"
        self.kind, self.helper = kind, helper
        self.positional = node.args
        self.keywords = {keyword.arg: keyword.value for keyword in node.keywords if keyword.arg}
        self.tree = tree

    def texts(self, node: ast.expr | None) -> list[str]:
        """What an argument can come to, with :data:`VALUE` for what is not written there; nothing where it is left out."""
        return [""] if node is None else list(dict.fromkeys(self._texts(node)))

    def _texts(self, node: ast.expr) -> Iterator[str]:
        match node:
            case ast.Constant(value=value):
                yield "" if value is None else str(value)
            case ast.JoinedStr(values=parts):
                yield from map("".join, itertools.product(*map(self.texts, parts)))
            case ast.FormattedValue(value=value) if isinstance(value, ast.IfExp | ast.Constant):
                yield from self._texts(value)
            case ast.IfExp(body=body, orelse=other):
                yield from (*self._texts(body), *self._texts(other))
            case ast.BinOp(left=left, op=ast.Add(), right=right):
                yield from map("".join, itertools.product(self.texts(left), self.texts(right)))
            case ast.Name(id=name):
                written = [
                    text
                    for assigned in ast.walk(self.tree)
                    if isinstance(assigned, ast.Assign) and ast.unparse(assigned.targets[0]) == name
                    for text in self._texts(assigned.value)
                ]
                yield from written or [VALUE]
            case _:
                yield VALUE

    def errors(self) -> Iterator[AutoparError]:
        """The error, with each of the texts that its arguments can come to."""
        if self.helper in VALUES:
            for wanted in self.texts(self.positional[1]):
                yield AutoparError(f"Wrong value of {VALUE}", expected=wanted, got=VALUE, fix="Change it")
            return
        kind = InternalError if self.kind == "InternalError" else AutoparError
        make = getattr(kind, self.helper) if self.helper else kind
        names = [name for name in ("where", "expected", "got", "fix", "instead") if name in self.keywords]
        for texts in itertools.product(
            *map(self.texts, (self.positional[0], *(self.keywords[name] for name in names)))
        ):
            given = {name: text for name, text in zip(names, texts[1:], strict=True) if text}
            others = {"unknown": (texts[0], "nam", ["name"]), "unreadable": (VALUE, ValueError(VALUE))}
            yield make(*others.get(self.helper, texts[:1]), **given)


@cache
def every_call() -> list[Call]:
    """The same once for all tests, and not where none of them runs."""
    found = []
    for file in sorted(PACKAGE.rglob("*.py")):
        tree = ast.parse(file.read_text(encoding="utf-8"))
        nodes = [*ast.walk(tree)]
        classes = [node for node in nodes if isinstance(node, ast.ClassDef)]
        derived = {node.name for node in classes if {ast.unparse(base) for base in node.bases} & KINDS}
        for node in nodes:
            if not isinstance(node, ast.Call) or file.name == "errors.py":
                continue
            match node.func:
                case ast.Name(id=name) if name in KINDS | derived:
                    found.append(Call(file, tree, node, name, ""))
                case ast.Attribute(value=ast.Name(id=name), attr=helper) if name in KINDS and helper in HELPERS:
                    found.append(Call(file, tree, node, name, helper))
                case ast.Attribute(attr=helper) if helper in VALUES:
                    found.append(Call(file, tree, node, "", helper))
    return found


@cache
def every_error() -> list[tuple[str, AutoparError]]:
    """With its place, likewise."""
    return [(call.place, error) for call in every_call() for error in call.errors()]


def test_they_are_found() -> None:
    assert len(every_call()) > 300
    assert {call.helper for call in every_call()} == {"", *HELPERS, *VALUES}
    assert {call.kind for call in every_call()} >= KINDS - {"PlanFileError"}  # which is made of a PlanError


def no_remedy(error: AutoparError) -> list[str]:
    return [] if error.fix or isinstance(error, InternalError) else [str(error)]


def no_sentences(error: AutoparError) -> list[str]:
    return [text for text in (error.problem, error.fix) if not START.match(text)]


def more_than_three_sentences(error: AutoparError) -> list[str]:
    return [str(error)] if len(re.findall(r"(?<!\.)[.?!](?=\s|$)", str(error))) > 3 else []


def private_words(error: AutoparError) -> list[str]:
    return [f"{word[0]}: {error}" for word in PRIVATE.finditer(str(error))]


@pytest.mark.parametrize("faults", [no_remedy, no_sentences, more_than_three_sentences, private_words])
def test_each_says_what_to_do_in_plain_sentences(faults: Callable[[AutoparError], list[str]]) -> None:
    assert not {f"{place}: {text}" for place, error in every_error() for text in faults(error)}


@pytest.mark.parametrize("error", [
    UsageError("No plan", where="here", expected="one", got=0, fix="Search one"),
    UsageError("No plan", got="lost", fix="Search one"),
    InternalError("No loss"),
])  # fmt: skip
def test_an_error_crosses_processes_as_it_is(error: AutoparError) -> None:
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is type(error)
    assert (str(again), vars(again)) == (str(error), vars(error))


def test_an_error_takes_another_place_or_kind_and_keeps_the_rest() -> None:
    error = UsageError("No plan", where="here", expected="one", got=0, fix="Search one")
    assert str(error.within("there")) == "there: here: No plan. Expected one, got 0. Search one."
    moved = error.becoming(InternalError, where="", fix="Report it")
    assert (type(moved), str(moved)) == (InternalError, "No plan. Expected one, got 0. Report it.")
