"""Failures of export by the user's line, the reason and a remedy."""

from __future__ import annotations

import inspect
import linecache
import re
import sysconfig
import traceback
from pathlib import Path

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
    TypeError,
    UserWarning,
    ValueError,
)
"""What user code and torch.export raise; of warnings the one of an autocast that this machine does not have."""

NO_AUTOCAST = "Disabling autocast"
"""In torch's warning of a machine without the devices of an autocast, which takes it as off."""

OWN, TORCH = (str(Path(file).parent) for file in (Path(__file__).parent, torch.__file__))
"""Folders of this package and of torch, whose lines are none of the model's."""

EXPORTS = "The model cannot be traced by torch.export"
NO_VALUES = "depends on the values of tensors, which cannot be traced"
"""Problems that others ask an error for: the lines that have them may be mended by another batch, or in a separate module."""

_DEPENDENT = (
    *("data-dependent", "Could not guard", "Could not extract specialized integer", "unbacked", "u0"),
    *("SymInt", "SymFloat", "SymBool"),  # which no size is here: a number that code formats or hands on
    *(".numpy() is not supported", "but got FakeTensor"),  # handed to numpy, or a tensor where a number is wanted
)
_SKIPS = "Set layerdrop to 0 (in transformers: config.layerdrop, encoder_layerdrop and decoder_layerdrop), so that no layer is skipped at random"
_FACTORY = "a factory `package.module:factory` that returns (model, example inputs)"


def not_copied(error: BaseException, model: torch.nn.Module) -> TraceError:
    """Why a model cannot be traced that cannot be copied."""
    return TraceError(
        "The model cannot be copied without its weights (copy.deepcopy)",
        where=type(model).__name__,
        got=f"{type(error).__name__}: {first_line(error)}",
        fix="Keep open files, locks and tensors with history out of the model",
    )


def in_autocast(where: str) -> TraceError:
    """Why an autocast in forward is refused."""
    return TraceError(
        "A torch.autocast inside of forward cannot be traced",
        where=where,
        fix="Build the model in the dtype it computes in, or set precision in the plan",
    )


def explained(error: BaseException, model: torch.nn.Module) -> TraceError:
    """The failure by the user's line, reason and remedy."""
    text = str(error)
    place, line = user_line(error, model)
    reason = f"{type(error).__name__}: {first_line(error).removesuffix('.')}"
    if line:
        reason += f" at `{line}`"
    if NO_AUTOCAST in text:
        return in_autocast(place)
    if "FlexAttention" in text:
        return TraceError(
            "flex_attention cannot be traced",
            where=place,
            fix="Use torch.nn.functional.scaled_dot_product_attention with a mask (in transformers: attn_implementation='sdpa')",
        )
    if "DataDependent" in type(error).__name__ or any(word in text for word in _DEPENDENT):
        return TraceError(
            f"`{line}` {NO_VALUES}" if line else f"The model {NO_VALUES}",
            where=place,
            got=None if line else reason,
            fix=_SKIPS if _skips_layers(place) else "Use torch.where or a mask, or decide it outside forward",
        )
    if any(frame.name == "_call_loss_fn" for frame in traceback.extract_tb(error.__traceback__)):
        return TraceError(
            "The loss_fn fails",
            where=place,
            got=reason,
            fix="It gets the model's output and the batch, a dict: loss_fn=lambda output, batch: F.mse_loss(output, batch['target'])",
        )
    if isinstance(error, TypeError) and "argument" in text and "FakeTensor" not in text:
        return TraceError(
            "The example inputs do not fit the model's forward",
            where=place,
            got=reason,
            fix=f"Correct the example inputs, or give {_FACTORY}",
        )
    if _raised_by_the_model(error):
        return TraceError(
            "The model fails on its example inputs",
            where=place,
            got=reason,
            fix=f"Correct that line, or give inputs that it takes: {_FACTORY}",
        )
    return TraceError(
        EXPORTS,
        where=place,
        got=reason,
        fix="Check the shapes of the example inputs, or change that line until torch.export.export(model, args, kwargs, strict=False) works",
    )


def _skips_layers(place: str) -> bool:
    """Whether the line or one of the few before it speaks of LayerDrop, which skips layers at random."""
    file, _, number = place.rpartition(":")
    return bool(file) and any("layerdrop" in linecache.getline(file, int(number) - above) for above in range(6))


def _raised_by_the_model(error: BaseException) -> bool:
    """Whether the innermost line is the model's own, not one of torch or of its exporter."""
    frames = traceback.extract_tb(error.__traceback__)
    return bool(frames) and not frames[-1].filename.startswith((OWN, TORCH, "<"))


def module_of_failure(error: BaseException, model: torch.nn.Module) -> str:
    """Path of the innermost submodule of ``model`` whose code was running; empty where that is ``model`` itself."""
    paths = {id(module): path for path, module in model.named_modules()}
    seen: set[int] = set()
    failure: BaseException | None = error
    while failure is not None and id(failure) not in seen:
        seen.add(id(failure))
        found = [
            paths[id(frame.f_locals.get("self"))]
            for frame, _ in traceback.walk_tb(failure.__traceback__)
            if id(frame.f_locals.get("self")) in paths
        ]
        if found:
            return str(found[-1])
        failure = failure.__cause__ or failure.__context__
    return ""


def _exported(error: BaseException) -> list[tuple[str, int]]:
    """Lines of the operator at which an exported program failed, whose own lines are no more on the stack."""
    nodes = [
        value
        for frame, _ in traceback.walk_tb(error.__traceback__)
        if frame.f_code.co_name == "run_node"
        for value in frame.f_locals.values()
        if isinstance(value, torch.fx.Node)
    ]
    text = (nodes[-1].stack_trace or "") if nodes else ""
    return [(file, int(line)) for file, line in re.findall(r'File "([^"]+)", line (\d+)', text)]


def user_line(error: BaseException, model: torch.nn.Module) -> tuple[str, str]:
    """``file.py:12`` and its text: the last frame in the model's file, else the last outside of libraries."""
    try:
        home = inspect.getsourcefile(type(model)) or ""
    except (OSError, TypeError):  # a class of a notebook, or of a module that is not imported by its name
        home = ""
    frames = [(frame.filename, frame.lineno or 0) for frame in traceback.extract_tb(error.__traceback__)]
    frames = _exported(error) + frames
    standard = sysconfig.get_paths()["stdlib"]
    outside = [f for f in frames if not f[0].startswith((OWN, TORCH, "<"))]
    outside = [f for f in outside if "site-packages" in f[0] or not f[0].startswith(standard)]
    users = [f for f in outside if f[0] == home or ("site-packages" not in f[0] and "/lib/python" not in f[0])]
    chosen = (users or outside or [("", 0)])[-1]
    if not chosen[0]:
        return type(model).__name__, ""
    return f"{chosen[0]}:{chosen[1]}", linecache.getline(chosen[0], chosen[1]).strip()
