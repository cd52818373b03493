"""The commands of the shell, the parsing of the command line, and the exit codes and messages of errors."""

from __future__ import annotations

import errno
import os
import sys
import traceback
import warnings
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Annotated

import typer

from autopar.cli import machines, measurements, plan_files, plans
from autopar.cli.options import StrictCommand, json_alone
from autopar.errors import AutoparError, UsageError, reason

INTERRUPTED = 130
"""The exit code of a command that Ctrl-C ended: 128 plus the number of the signal, as in shells."""

_FULL = (errno.ENOSPC, errno.EDQUOT)
"""Error numbers of a full disk or quota."""

app = typer.Typer(
    name="autopar",
    help="Find, read, check and run the parallelization plan of a PyTorch model.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("search")(plans.search)
app.command("estimate")(plans.estimate)
app.command("smallest-cluster")(plans.smallest_cluster)
app.command("cheapest-cluster")(plans.cheapest_cluster)
app.command("longest-sequence")(plans.longest_sequence)
app.command("largest-batch")(plans.largest_batch)
app.command("sweep")(plans.sweep)
app.command("pareto")(plans.pareto)
app.command("published")(plans.published)
app.command("show")(plan_files.show)
app.command("explain")(plans.explain)
app.command("compare")(plan_files.compare)
app.command("run", context_settings=plan_files.RUN_SETTINGS)(plan_files.run)
app.command("verify")(plan_files.verify)
app.command("trace")(plan_files.trace)
app.command("validate")(measurements.validate)
app.add_typer(machines.app, name="profile")
app.add_typer(measurements.app, name="benchmark")
app.command("devices")(machines.devices)
app.command("pins")(machines.pins)
app.command("doctor")(machines.doctor)
for group in (app, machines.app, measurements.app):
    for command in group.registered_commands:
        command.cls = StrictCommand


def _print_version(value: bool) -> None:
    if value:
        from autopar import __version__

        sys.stdout.write(f"autopar {__version__}\n")
        raise typer.Exit


@app.callback()
def root(
    _version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
    _debug: Annotated[bool, typer.Option("--debug", help="Print tracebacks and warnings; works anywhere.")] = False,
) -> None:
    """Find, read, check and run the parallelization plan of a PyTorch model."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command and exit: 0 done, 2 usage, 3 no feasible plan, 130 interrupted without a result, 1 other.

    Raises:
        SystemExit: always.
    """
    sys.stdout = sys.stdout or open(os.devnull, "w")  # noqa: PTH123, SIM115  None where the caller has closed it
    sys.stderr = sys.stderr or open(os.devnull, "w")  # noqa: PTH123, SIM115
    words = list(sys.argv[1:] if arguments is None else arguments)
    end = words.index("run") if "run" in words else len(words)  # the rest may belong to the script that is run
    debug = "--debug" in words[:end]
    words = [argument for argument in words[:end] if argument != "--debug"] + words[end:]
    if not debug:
        warnings.simplefilter("ignore")  # torch and transformers warn about themselves
        os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    try:
        if "" not in sys.path and (folder := _folder()) not in sys.path:
            sys.path.insert(0, folder)  # 'package.module:factory' is imported from here
        is_json = "--json" in words[:end] and not {"--help", "-h"} & set(words)
        with json_alone() if is_json else nullcontext():
            app(words, prog_name="autopar")
    except SystemExit as stop:
        if stop.code == INTERRUPTED:
            sys.stderr.write("interrupted before there was a result\n")
        raise
    except Exception as error:  # noqa: BLE001  all other errors are reported as defects
        if debug:
            traceback.print_exc()
        sys.stderr.write(f"error: {_message(error)}\n")
        sys.exit(error.exit_code if isinstance(error, AutoparError) else 1)
    sys.exit(0)


def _folder() -> str:
    """Return the folder in which the command is started.

    Raises:
        UsageError: it has been removed meanwhile.
    """
    try:
        return os.getcwd()  # noqa: PTH109  sys.path holds strings
    except OSError as error:
        raise UsageError("The folder of this shell is not there", got=reason(error), fix="Change to another") from error


def _message(error: Exception) -> str:
    """Return the message of an error in sentences."""
    if isinstance(error, AutoparError):
        return str(error)
    if isinstance(error, OSError) and error.errno in _FULL:
        where = "" if error.filename is None else f" at {error.filename}"
        return f"{error.strerror}{where}. Free some space, or choose another path."
    defect = f"A defect of autopar: {type(error).__name__}: {' '.join(str(error).split())[:300]}."
    return f"{defect} Please report it with what 'autopar --debug ...' and 'autopar doctor' print."
