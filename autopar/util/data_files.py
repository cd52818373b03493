"""Where the shipped data lies: ``profiles/`` and ``search/``, in the wheel or in the checkout."""

from __future__ import annotations

from pathlib import Path

from autopar.errors import AutoparError

_PACKAGE = Path(__file__).resolve().parents[1]


def directory(name: str) -> Path:
    """The data directory ``name``: ``autopar/_data/NAME`` when installed, ``NAME`` beside the package in a checkout.

    Raises:
        AutoparError: neither exists, so the installation is broken.

    >>> (directory("profiles") / "cpu.toml").is_file()
    True
    """
    candidates = (_PACKAGE / "_data" / name, _PACKAGE.parent / name)
    for candidate in candidates:
        if candidate.is_dir():
            return candidate
    raise AutoparError.missing(
        f"data directory '{name}' (neither {' nor '.join(str(candidate) for candidate in candidates)} is there)",
        fix="Install autopar again",
    )


def files(name: str, suffix: str = ".toml") -> dict[str, Path]:
    """The files of a data directory by stem, sorted.

    >>> "h100-sxm5-80gb" in files("profiles")
    True
    """
    return {path.stem: path for path in sorted(directory(name).glob(f"*{suffix}"))}
