"""Files that are no part of a package, as modules: the scripts in `docs`, which write pages, and examples."""

from __future__ import annotations

import importlib.util
import sys
from types import ModuleType

from bed.paths import ROOT


def script(name: str, folder: str = "docs") -> ModuleType:
    """Imports `<folder>/<name>.py`."""
    spec = importlib.util.spec_from_file_location(name, ROOT / folder / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # its dataclasses look there
    spec.loader.exec_module(module)
    return module
