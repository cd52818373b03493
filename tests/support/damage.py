"""Random damage to the folder of a checkpoint, and a forgery."""

import os
import random
from pathlib import Path
from typing import Any

KINDS = ("bit", "bits", "zeros", "truncated", "deleted", "swapped", "of another", "index of another")


class Touch:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


def damage(folder: Path, other: Path, seed: int) -> tuple[str, str]:
    """Damages a checkpoint in one way, drawn by ``seed``: the kind, and what was done; ``other`` is of another step of its job."""
    draw = random.Random(seed)
    kind = KINDS[seed % len(KINDS)]
    names = sorted(path.name for path in folder.iterdir() if path.is_file())
    data = [name for name in names if name.startswith("data-")]
    file = folder / draw.choice(names)
    match kind:
        case "bit" | "bits" | "zeros":
            content = bytearray(file.read_bytes())
            place = draw.randrange(len(content))
            if kind == "bit":
                content[place] ^= 1 << draw.randrange(8)
            elif kind == "bits":
                for _ in range(draw.randrange(2, 400)):
                    content[draw.randrange(len(content))] ^= draw.randrange(1, 256)
            else:
                stop = min(place + draw.randrange(1, 4096), len(content))
                content[place:stop] = bytes(stop - place)
            file.write_bytes(content)
            return kind, f"{file.name} at {place}"
        case "truncated":
            content = file.read_bytes()
            file.write_bytes(content[: draw.randrange(len(content))])
        case "deleted":
            file.unlink()
        case "swapped" if len(data) > 1:
            one, two = (folder / name for name in draw.sample(data, 2))
            first, second = one.read_bytes(), two.read_bytes()
            one.write_bytes(second)
            two.write_bytes(first)
            return kind, f"{one.name} and {two.name}"
        case "index of another":
            file = folder / "checkpoint.json"
            file.write_bytes((other / file.name).read_bytes())
            return kind, "data-"  # found where its sums differ
        case _:
            kind, file = "of another", folder / draw.choice(data)
            file.write_bytes((other / file.name).read_bytes())
    return kind, file.name
