"""Finds the keys of a Hugging Face configuration that its class does not declare.

Released configurations have such keys (``head_dim`` of Qwen3-MoE). As an instance may lack such a key, the modelling code reads it by
``getattr(config, "head_dim", ...)`` or ``hasattr(config, "head_dim")``. These calls show which undeclared keys are valid. A plain
``config.head_dim`` does not: it belongs to a class that declares the key.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

Function = ast.FunctionDef | ast.AsyncFunctionDef


def optional_keys(config_class: type) -> frozenset[str]:
    """Return the keys that a configuration need not have: its modelling code reads them by getattr or hasattr.

    The result is empty if the class has no modelling module. The source is parsed, and not imported or run. If the configuration contains
    others (those of towers), only functions whose ``config`` is annotated with this class count, as others may read a contained one.
    """
    source = _modelling_source(config_class.__module__)
    if source is None:
        return frozenset()
    tree = ast.parse(source.read_text(encoding="utf-8"))
    contains_others = bool(getattr(config_class, "sub_configs", None))
    accepted = {config_class.__name__} if contains_others else {config_class.__name__, ""}
    return frozenset(name for classes, name in _optional_reads(tree) if accepted & classes)


def _modelling_source(module: str) -> Path | None:
    """Return the file ``modeling_x.py`` in the folder of the module ``configuration_x``; None if there is none."""
    file = Path(getattr(sys.modules.get(module), "__file__", None) or "")
    modelling = file.with_name(file.name.replace("configuration_", "modeling_")) if file.name else file
    return modelling if modelling != file and modelling.is_file() else None


def _optional_reads(tree: ast.Module) -> Iterator[tuple[frozenset[str], str]]:
    """Iterate over the keys that functions and methods read by getattr or hasattr, each with the annotated classes of the configuration."""
    for scope in tree.body:
        body = scope.body if isinstance(scope, ast.ClassDef) else [scope]
        functions = [node for node in body if isinstance(node, Function)]
        init = next((function for function in functions if function.name == "__init__"), None)
        for function in functions:
            classes = {"config": _annotated(function)}
            if isinstance(scope, ast.ClassDef):
                classes["self.config"] = _annotated(init)
            for node in ast.walk(function):
                match node:
                    case ast.Call(
                        func=ast.Name(id="getattr" | "hasattr"),
                        args=[ast.Name() | ast.Attribute() as owner, ast.Constant(value=str() as name), *_],
                    ) if (expression := ast.unparse(owner)) in classes:
                        yield classes[expression], name


def _annotated(function: Function | None) -> frozenset[str]:
    """Return the classes with which the argument ``config`` of a function is annotated; ``""`` if it is not."""
    arguments = () if function is None else (*function.args.args, *function.args.kwonlyargs)
    annotation = next((argument.annotation for argument in arguments if argument.arg == "config"), None)
    return frozenset({""} if annotation is None else ast.unparse(annotation).strip("'\"").split(" | "))
