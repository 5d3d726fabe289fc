"""Programs and packages that some tests need, and that `.ci/run` installs."""

import os
import shutil
from typing import NoReturn

import pytest

__all__ = ["missing", "system_program"]


def missing(reason: str) -> NoReturn:
    """Skip the test, but never in CI."""
    if os.environ.get("CI"):
        pytest.fail(reason)
    pytest.skip(reason)


def system_program(name: str, package: str) -> str:
    """Return the path of a program; without it, skip the test, but never in CI."""
    if (path := shutil.which(name)) is None:
        missing(f"this test needs {name}; install it with: apt-get install {package}")
    return path
