"""Programs of the system that some tests need, and that `.ci/run` installs."""

from __future__ import annotations

import os
import shutil

import pytest

__all__ = ["system_program"]


def system_program(name: str, package: str) -> str:
    """Return the path of a program; without it, skip the test, but never in CI."""
    path = shutil.which(name)
    if path is not None:
        return path
    reason = f"this test needs {name}; install it with: apt-get install {package}"
    if os.environ.get("CI"):
        pytest.fail(reason)
    pytest.skip(reason)
