"""The executable reference of the learner with tables, which is beside the project; tests skip where it is missing."""

from __future__ import annotations

import sys
import tempfile
from functools import cache
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Final

import pytest

REFERENCE: Final = Path(__file__).resolve().parents[3] / "shared" / "reference" / "tables-learner" / "learner.py"


def tables_reference() -> ModuleType:
    """Return the reference, which is compiled once in a process; skip the test where it cannot be had."""
    if not REFERENCE.exists():
        pytest.skip(f"the executable reference of tables is not in {REFERENCE}")
    pytest.importorskip("numba", reason="the reference is compiled by Numba")
    return _loaded()


@cache
def _loaded() -> ModuleType:
    copy = Path(tempfile.mkdtemp(prefix="streamiter-reference-")) / "reference_of_tables.py"
    copy.write_text(REFERENCE.read_text())  # Numba stores compiled code next to it, and its folder is read only.
    spec = spec_from_file_location(copy.stem, copy)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    sys.modules[copy.stem] = module
    spec.loader.exec_module(module)
    return module
