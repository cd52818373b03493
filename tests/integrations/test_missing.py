"""Where a library is not installed one error says how to install it; autopar itself needs none of them."""

from __future__ import annotations

import importlib
import sys

import pytest

from autopar.errors import UsageError

NEEDS = {
    "autopar.integrations.accelerate": ("accelerate", "autopar[hf]"),
    "autopar.integrations.hf": ("transformers", "autopar[hf]"),
    "autopar.integrations.lightning": ("lightning", "autopar[lightning]"),
    "autopar.runtime.data": ("torchdata", "autopar[data]"),
}


@pytest.mark.parametrize("module", NEEDS)
def test_a_missing_package_is_named(module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    package, extra = NEEDS[module]
    for name in [name for name in sys.modules if name == module or name.split(".")[0] == package]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)  # type: ignore[arg-type]
    with pytest.raises(UsageError) as caught:
        importlib.import_module(module)
    assert package in str(caught.value)
    assert f'Run: pip install "{extra}"' in str(caught.value)
