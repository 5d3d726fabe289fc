"""Functions are compiled where Numba is installed, also where the compiled code cannot be stored."""

from __future__ import annotations

import pytest

from streamiter.compiled import compiled


def twice(number: float) -> float:
    return 2 * number


def test_functions_are_compiled_where_no_directory_can_be_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """A job in a container without a writable directory failed when the compiled code was needed."""
    caching = pytest.importorskip("numba.core.caching")
    monkeypatch.setattr(caching.CompileResultCacheImpl, "_locator_classes", [])
    assert compiled(twice)(1.5) == 3.0
