"""The executable reference of the learner with tables, which is beside the project; tests skip where it is missing."""

import hashlib
import os
import re
import sys
from functools import cache
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Final

import pytest
from support.amended_reference import amended
from support.maven import cache_folder

REFERENCE: Final = Path(__file__).resolve().parents[3] / "shared" / "reference" / "tables-learner" / "learner.py"


def tables_reference() -> ModuleType:
    """Return the reference, which is compiled once on a machine; skip the test where it cannot be had."""
    if not REFERENCE.exists():
        pytest.skip(f"the executable reference of tables is not in {REFERENCE}")
    pytest.importorskip("numba", reason="the reference is compiled by Numba")
    return _loaded()


@cache
def _loaded() -> ModuleType:
    copy = _copy()
    spec = spec_from_file_location(copy.stem, copy)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    sys.modules[copy.stem] = module
    spec.loader.exec_module(module)
    return module


def _copy() -> Path:
    """Return a copy that keeps its place and its time: next to it Numba stores what takes 4 s to compile.

    The folder of the reference itself is read only.
    """
    text = _without_drawn_thresholds_and_pairs(amended(REFERENCE.read_text())).encode()
    copy = cache_folder() / f"reference-{hashlib.sha256(text).hexdigest()[:12]}" / "reference_of_tables.py"
    if not copy.exists():
        copy.parent.mkdir(parents=True, exist_ok=True)
        made = copy.with_suffix(f".{os.getpid()}")
        made.write_bytes(text)
        made.replace(copy)
    return copy


def _without_drawn_thresholds_and_pairs(source: str) -> str:
    """Leave out what docs/decisions/077 replaced: thresholds at jumps of an effect, and pairs by use of columns."""
    changes = [
        (r" +jumps = self\._jumps\(\)\n +for i in weak:\n.*\n.*\n", ""),
        (r"if not self\.all_pairs:(?=\n +have)", "if False:"),
    ]
    for pattern, text in changes:
        source, count = re.subn(pattern, text, source)
        assert count == 1, f"expected one place of {pattern}, given {count}"
    return source
