"""Keys that the code of a Hugging Face model reads of its configuration although the configuration's class does not declare them.

Released configurations have such keys (``head_dim`` of Qwen3-MoE). As an object of the class may lack them, the code asks by
``getattr(config, "head_dim", ...)`` or ``hasattr(config, "head_dim")``: a plain ``config.head_dim`` is of another class.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

Function = ast.FunctionDef | ast.AsyncFunctionDef


def optional_keys(config_class: type) -> frozenset[str]:
    """Names that the modelling module beside a configuration's class asks for; empty: there is no such module.

    By its source alone, nothing of which is imported or run. A configuration that holds others (of towers) is only what is
    annotated as this class: the rest may be about those that it holds.
    """
    source = _modelling_source(config_class.__module__)
    if source is None:
        return frozenset()
    tree = ast.parse(source.read_text(encoding="utf-8"))
    holds_others = bool(getattr(config_class, "sub_configs", None))
    meant = {config_class.__name__} if holds_others else {config_class.__name__, ""}
    return frozenset(name for about, name in _asked(tree) if meant & about)


def _modelling_source(module: str) -> Path | None:
    """The file ``modeling_x.py`` beside the one of ``configuration_x``."""
    file = Path(getattr(sys.modules.get(module), "__file__", None) or "")
    found = file.with_name(file.name.replace("configuration_", "modeling_")) if file.name else file
    return found if found != file and found.is_file() else None


def _asked(tree: ast.Module) -> Iterator[tuple[frozenset[str], str]]:
    """Each name that is asked for, with the classes of the configuration as annotated; ``""``: it is not annotated."""
    for node in tree.body:
        if isinstance(node, Function):
            yield from _asked_in(node, {"config": _annotated(node)})
        elif isinstance(node, ast.ClassDef):
            functions = [part for part in node.body if isinstance(part, Function)]
            kept = next(
                (_annotated(function) for function in functions if function.name == "__init__"), frozenset({""})
            )
            for function in functions:
                yield from _asked_in(function, {"config": _annotated(function), "self.config": kept})


def _annotated(function: Function) -> frozenset[str]:
    arguments = (*function.args.args, *function.args.kwonlyargs)
    found = next((argument.annotation for argument in arguments if argument.arg == "config"), None)
    return frozenset({""} if found is None else ast.unparse(found).strip("'\"").split(" | "))


def _asked_in(function: Function, known: dict[str, frozenset[str]]) -> Iterator[tuple[frozenset[str], str]]:
    for node in ast.walk(function):
        match node:
            case ast.Call(
                func=ast.Name(id="getattr" | "hasattr"),
                args=[ast.Name() | ast.Attribute() as owner, ast.Constant(value=str() as name), *_],
            ) if (place := ast.unparse(owner)) in known:
                yield known[place], name
