"""What is said of a refusal: of one that a test expects, or that ranks send home as a text."""

from collections.abc import Callable
from typing import Any

import pytest


def refuses(kind: type[Exception], said: str, call: Callable[..., object], *args: Any, **options: Any) -> Any:
    """The error with which the call is refused, of this kind, in whose message this pattern (empty: whatever) is found."""
    with pytest.raises(kind, match=said or None) as caught:
        call(*args, **options)
    return caught.value


def said(kind: type[Exception], call: Callable[..., object], *args: Any, **options: Any) -> str:
    """The message of the error of this kind with which a call is refused; empty where it is not."""
    try:
        call(*args, **options)
    except kind as error:
        return str(error)
    return ""
