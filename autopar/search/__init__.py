"""The search: exact inside (layouts of a block, stage cut), Optuna or branch and bound outside.

``autopar.search`` is also the public function: importing this package would hide a function of the same name, so the
package itself can be called and passes everything on to :func:`autopar.api.search`.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import Any


class _CallablePackage(ModuleType):
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return importlib.import_module("autopar.api").search(*args, **kwargs)  # api joins both wings: not imported here


sys.modules[__name__].__class__ = _CallablePackage
