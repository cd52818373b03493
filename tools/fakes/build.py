"""Builds the guard with the C++ compiler of the machine."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

SOURCE = Path(__file__).with_name("guard.cpp")


def compiler() -> str | None:
    """The first C++ compiler that is there."""
    return next((found for name in ("c++", "g++", "clang++") if (found := shutil.which(name))), None)


def build(folder: Path, torch_folder: Path) -> Path:
    """The guard as a library in ``folder``, by the includes and libraries of the torch that is installed."""
    made, include = folder / "guard.so", torch_folder / "include"
    command = [str(compiler()), "-shared", "-fPIC", "-std=c++20", "-O0"]
    command += [f"-I{include}", f"-I{include}/torch/csrc/api/include", str(SOURCE), "-o", str(made)]
    command += [f"-L{torch_folder}/lib", "-lc10", "-ltorch_cpu", f"-Wl,-rpath,{torch_folder}/lib"]
    subprocess.run(command, check=True, timeout=300.0)
    return made
