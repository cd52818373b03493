"""``autopar doctor``: what this machine and this torch can do, and what to do about the rest."""

from __future__ import annotations

from dataclasses import asdict

import typer

from autopar.cli.console import cache_dir, print_json, print_text
from autopar.cli.options import Json


def doctor(as_json: Json = False) -> None:
    """Say what this machine and this torch can do; exits with 1 when something that autopar needs is missing."""
    from autopar.hardware.detect.this_machine import examine

    checks = list(examine(cache_dir()))
    healthy = all(check.ok for check in checks if check.needed)
    if as_json:
        print_json({"ok": healthy, "checks": [asdict(check) for check in checks]})
    else:
        width = max(len(check.name) for check in checks)
        for check in checks:
            word = "ok" if check.ok else "missing" if check.needed else "absent"
            remedy = "" if check.ok or not check.remedy else f"; {check.remedy}"
            print_text(f"{word:<8} {check.name:<{width}}  {check.found}{remedy}")
        print_text("\neverything that autopar needs is here" if healthy else "\nautopar cannot run here: see 'missing'")
    if not healthy:
        raise typer.Exit(1)
