"""What is said of a refusal: of one that a test expects, or that ranks send home as a text."""

from collections.abc import Callable
from typing import Any

import pytest


def refuses(kind: type[Exception], said: str, call: Callable[..., object], *args: Any, **options: Any) -> None:
    """The call is refused with an error of this kind, in whose message this pattern is found."""
    with pytest.raises(kind, match=said):
        call(*args, **options)


def said(kind: type[Exception], call: Callable[..., object], *args: Any, **options: Any) -> str:
    """The message of the error of this kind with which a call is refused; empty where it is not."""
    try:
        call(*args, **options)
    except kind as error:
        return str(error)
    return ""
