"""Errors of tracing that name the user's line, the reason and a remedy.

:func:`explained` turns an exception that user code or ``torch.export`` has raised into a :class:`~autopar.errors.TraceError`.
:func:`user_line` and :func:`source_of` find the line of the user's code from a traceback and from a node of the exported program.
"""

from __future__ import annotations

import inspect
import io
import linecache
import logging
import os
import re
import sysconfig
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import torch

from autopar.errors import TraceError, first_line

FAILURES = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    ImportError,
    LookupError,
    NameError,
    RuntimeError,
    StopIteration,
    TypeError,
    UserWarning,
    ValueError,
)
"""Exceptions that user code and torch.export raise. UserWarning stands for :data:`NO_AUTOCAST`, which tracing turns into an error."""

NO_AUTOCAST = "Disabling autocast"
"""A part of the warning by which torch says that it disables an autocast, because this machine lacks the device type."""

PACKAGE_FOLDER, TORCH_FOLDER = (f"{Path(file).parent}{os.sep}" for file in (Path(__file__).parent, torch.__file__))
"""Folders of autopar and of torch, with a separator at the end: torchvision's begins alike. Their lines are not lines of the model."""

EXPORTS = "The model cannot be traced by torch.export"
NO_VALUES = "depends on the values of tensors, which cannot be traced"
"""Texts by which other modules recognise an error. Another batch, or a separate module for the line, may avoid these problems."""

_DEPENDENT = (
    *("data-dependent", "Could not guard", "Could not extract specialized integer", "unbacked"),
    *("SymInt", "SymFloat", "SymBool"),  # sizes are numbers here, so this is a value that code formats or passes on
    *(".numpy() is not supported", "but got FakeTensor"),  # a tensor passed to numpy, or where a number is expected
)
"""Parts of messages by which an exception says that it needs the values of tensors; so does :data:`_UNKNOWN`."""
_UNKNOWN = re.compile(r"\bu\d+\b")
"""The name that an export gives to a number which depends on values: ``u0``."""
_SKIPS_LAYERS = "Set layerdrop to 0 (in transformers: config.layerdrop, encoder_layerdrop and decoder_layerdrop), so that no layer is skipped at random"
_FACTORY = "a factory `package.module:factory` that returns (model, example inputs)"


@contextmanager
def quiet() -> Iterator[None]:
    """Suppress warnings, logs and prints of an export, which writes unfinished graphs to stderr, and of the model that it runs."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings(), redirect_stderr(io.StringIO()), redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            # A device of the plan would not disable it.
            warnings.filterwarnings("error", f".*{NO_AUTOCAST}", UserWarning)
            yield
    finally:
        logging.disable(before)


def not_copied(error: BaseException, model: torch.nn.Module) -> TraceError:
    """Return the error for a model that ``copy.deepcopy`` cannot copy, which raised ``error``."""
    return TraceError(
        "The model cannot be copied without its weights (copy.deepcopy)",
        where=type(model).__name__,
        got=f"{type(error).__name__}: {first_line(error)}",
        fix="Keep open files, locks and tensors with history out of the model",
    )


def in_autocast(where: str) -> TraceError:
    """Return the error for a ``torch.autocast`` inside of forward, at the line ``where``."""
    return TraceError(
        "A torch.autocast inside of forward cannot be traced",
        where=where,
        fix="Build the model in the dtype it computes in, or set precision in the plan",
    )


def explained(error: BaseException, model: torch.nn.Module) -> TraceError:
    """Return the error that explains ``error`` by the user's line, the reason and a remedy.

    Args:
        error: was raised while ``model``, or a ``loss_fn``, ran or was exported.
        model: is the user's model. It decides which file the line is looked for in first.
    """
    text = str(error)
    place, line = user_line(error, model)
    reason = f"{type(error).__name__}: {first_line(error).removesuffix('.')}"
    if line:
        reason += f" at `{line}`"
    if NO_AUTOCAST in text:
        return in_autocast(place)
    if "FlexAttention" in text:
        problem, reason = "A call of flex_attention cannot be traced", ""
        fix = "Use torch.nn.functional.scaled_dot_product_attention with a mask (in transformers: attn_implementation='sdpa')"
    elif "DataDependent" in type(error).__name__ or any(word in text for word in _DEPENDENT) or _UNKNOWN.search(text):
        problem, reason = (f"`{line}` {NO_VALUES}", "") if line else (f"The model {NO_VALUES}", reason)
        values = "Use torch.where, a mask or a tensor as index, or decide it outside forward"
        fix = _SKIPS_LAYERS if _skips_layers(place) else values
    elif any(frame.name == "_call_loss_fn" for frame in traceback.extract_tb(error.__traceback__)):
        problem = "The loss_fn fails"
        fix = "It gets the model's output and the batch, a dict: loss_fn=lambda output, batch: F.mse_loss(output, batch['target'])"
    elif isinstance(error, TypeError) and "argument" in text and "FakeTensor" not in text:
        problem = "The example inputs do not fit the model's forward"
        fix = f"Correct the example inputs, or give {_FACTORY}"
    elif _raised_by_the_model(error):
        problem = "The model fails on its example inputs"
        fix = f"Correct that line, or give inputs that it takes: {_FACTORY}"
    else:
        problem = EXPORTS
        fix = "Check the shapes of the example inputs, or change that line until "
        fix += "torch.export.export(model, args, kwargs, strict=False) works"
    return TraceError(problem, where=place, got=reason, fix=fix)


def _skips_layers(place: str) -> bool:
    """Return whether the line or one of the few before it speaks of LayerDrop, which skips layers at random."""
    file, _, number = place.rpartition(":")
    return bool(file) and any("layerdrop" in linecache.getline(file, int(number) - above) for above in range(6))


def _raised_by_the_model(error: BaseException) -> bool:
    """Return whether the line that raised ``error`` is one of user code, and not of torch, of this package or of generated code."""
    frames = traceback.extract_tb(error.__traceback__)
    return bool(frames) and not frames[-1].filename.startswith((PACKAGE_FOLDER, TORCH_FOLDER, "<"))


def module_of_failure(error: BaseException, model: torch.nn.Module) -> str:
    """Return the path of the innermost submodule of ``model`` whose code was running when ``error`` was raised.

    The path is empty if that is ``model`` itself, or if no module was running. If the traceback of ``error`` names no module, those of
    its causes are searched. Where a model shares modules, an export runs stand-ins of them, which have their attributes.
    """
    path_of = {id(vars(module)): path for path, module in model.named_modules()}
    seen: set[int] = set()
    failure: BaseException | None = error
    while failure is not None and id(failure) not in seen:
        seen.add(id(failure))
        calls = (frame for frame, _ in traceback.walk_tb(failure.__traceback__) if frame.f_code.co_argcount)
        objects = (frame.f_locals.get(frame.f_code.co_varnames[0]) for frame in calls)
        running = [id(vars(own)) for own in objects if isinstance(own, torch.nn.Module)]
        paths = [path_of[own] for own in running if own in path_of]
        if paths:
            return str(paths[-1])
        failure = failure.__cause__ or failure.__context__
    return ""


def _lines_of(node: torch.fx.Node) -> list[tuple[str, int]]:
    """Return the file and the number of each line that was on the stack when ``node`` was traced, the innermost line last."""
    frames = re.findall(r'File "([^"]+)", line (\d+)', node.stack_trace or "")
    return [(file, int(line)) for file, line in frames]


def source_of(node: torch.fx.Node) -> str:
    """Return the innermost line outside of torch and of the tracer at which ``node`` was traced, as ``file.py:12``; empty if there is none.

    torch keeps the lines of functions called ``forward`` only, so that there may be none in the user's code.
    """
    for path, line in reversed(_lines_of(node)):
        # Decomposing runs generated code, whose file is "<...>".
        if not path.startswith((TORCH_FOLDER, "<", str(Path(__file__).parent))):
            return f"{path.rsplit('/', 1)[-1]}:{line}"
    return ""


def defined_at(function: Any) -> str:
    """Return the line at which the code of a function or module is defined, as ``file.py:12``; empty if it has none in Python."""
    code = getattr(getattr(function, "forward", getattr(function, "func", function)), "__code__", None)
    return "" if code is None else f"{Path(code.co_filename).name}:{code.co_firstlineno}"


def _lines_of_failed_node(error: BaseException) -> list[tuple[str, int]]:
    """Return the lines at which the node was traced that failed while an exported program ran; empty if no program ran.

    The traceback of ``error`` does not hold these lines: it shows the interpreter that ran the program.
    """
    nodes = [
        value
        for frame, _ in traceback.walk_tb(error.__traceback__)
        if frame.f_code.co_name == "run_node"
        for value in frame.f_locals.values()
        if isinstance(value, torch.fx.Node)
    ]
    return _lines_of(nodes[-1]) if nodes else []


def user_line(error: BaseException, model: torch.nn.Module | None) -> tuple[str, str]:
    """Return the line of user code that raised ``error``, as ``file.py:12`` with the full path of the file, and the text of that line.

    The line is the last frame in the file of the model's class or in another file outside of libraries. If there is none, it is the last
    frame outside of torch, of this package and of the standard library. If there is none either, it is the name of the model's class,
    or empty without a model, and the text is empty.
    """
    try:
        home = inspect.getsourcefile(type(model)) or ""
    except (OSError, TypeError):  # the class comes from a notebook, or from a module that was not imported by name
        home = ""
    frames = [(frame.filename, frame.lineno or 0) for frame in traceback.extract_tb(error.__traceback__)]
    frames = _lines_of_failed_node(error) + frames
    standard = sysconfig.get_paths()["stdlib"]
    outside = [f for f in frames if not f[0].startswith((PACKAGE_FOLDER, TORCH_FOLDER, "<"))]
    outside = [f for f in outside if "site-packages" in f[0] or not f[0].startswith(standard)]
    users = [f for f in outside if f[0] == home or ("site-packages" not in f[0] and "/lib/python" not in f[0])]
    file, line = (users or outside or [("", 0)])[-1]
    if not file:
        return "" if model is None else type(model).__name__, ""
    return f"{file}:{line}", linecache.getline(file, line).strip()
