"""What is said of a refusal, which ranks send home as a text."""

from collections.abc import Callable
from typing import Any


def said(kind: type[Exception], call: Callable[..., object], *args: Any, **options: Any) -> str:
    """The message of the error of this kind with which a call is refused; empty where it is not."""
    try:
        call(*args, **options)
    except kind as error:
        return str(error)
    return ""
