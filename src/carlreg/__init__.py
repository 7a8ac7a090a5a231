"""Equivariant image registration: CARL in Python.

The public names are listed once, in `__init__.pyi`. They are imported on first use, so that `import carlreg` is fast.
"""

from __future__ import annotations

import ast
import importlib
from pathlib import Path
from typing import Any

__version__ = "0.1.0"

_STUB = ast.parse(Path(__file__).with_suffix(".pyi").read_text(encoding="utf-8"))
_MODULE_OF = {name.name: node.module for node in _STUB.body if isinstance(node, ast.ImportFrom) for name in node.names}
__all__ = sorted(_MODULE_OF)


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'carlreg' has no attribute {name!r}")
    return getattr(importlib.import_module(str(_MODULE_OF[name])), name)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
