"""Tests can use a small disk; ``tests/conftest.py`` makes the fixture known to all tests."""

import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.waiting import PATIENCE_S

__all__ = ["small_disk"]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[tuple[Path, Callable[[], bool]]]:
    """Return the folder of a disk of 3 MiB, and a function that enlarges the disk."""
    disk = tmp_path / "disk"
    disk.mkdir()
    if not _mount("-o", "size=3m", "tmpfs", str(disk)):
        pytest.skip("a small disk can only be mounted by root")
    yield disk, lambda: _mount("-o", "remount,size=40m", "tmpfs", str(disk))
    subprocess.run(["umount", "--lazy", str(disk)], check=True, timeout=PATIENCE_S)


def _mount(*arguments: str) -> bool:
    """Mount a disk in memory; return whether this worked."""
    if os.geteuid() != 0:
        return False
    return subprocess.run(["mount", "-t", "tmpfs", *arguments], capture_output=True, timeout=PATIENCE_S).returncode == 0
