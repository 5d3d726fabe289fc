"""Effects of ``import streamiter``."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from support.processes import LIMIT_S

# What it takes to read files, serve, draw and fit: none of it is needed to build a flow.
HEAVY = ["aiokafka", "ray", "typer", "rich", "pandas", "scipy", "uvloop", "difflib", "streamiter_kafka"]

CHECK = """
import gc, json, sys, threading, time, warnings
import numpy, msgspec, msgpack, orjson
before = set(sys.modules)
began = time.perf_counter()
import streamiter
took_s = time.perf_counter() - began
print(json.dumps({
    "modules": sorted(set(sys.modules) - before),
    "threads": threading.active_count(),
    "took_s": took_s,
}))
"""


@pytest.fixture(scope="module")
def imported() -> dict[str, object]:
    """Return the report of a fresh interpreter about the import."""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", CHECK],
        capture_output=True,
        text=True,
        check=True,
        timeout=LIMIT_S,
    )
    assert done.stderr == ""
    told: dict[str, object] = json.loads(done.stdout)
    print(f"import streamiter took {told['took_s']:.3f} s beside its libraries")
    return told


@pytest.mark.parametrize("heavy", HEAVY)
def test_it_imports_nothing_heavy(imported: dict[str, object], heavy: str) -> None:
    """A command line that takes a second to say its version, a worker that needs pandas to count clicks."""
    modules = imported["modules"]
    assert isinstance(modules, list)
    assert [name for name in modules if name == heavy or name.startswith(f"{heavy}.")] == []


def test_it_starts_nothing(imported: dict[str, object]) -> None:
    """Threads or loops made at import time break in forked workers and in notebooks."""
    assert imported["threads"] == 1


def test_the_command_line_starts_without_what_only_some_commands_need() -> None:
    """``streamiter --version`` takes twice as long for learners and layers that it does not show."""
    told = subprocess.run(
        [sys.executable, "-W", "error", "-c", "import sys, streamiter.cli.app; print(*sys.modules)"],
        capture_output=True,
        text=True,
        check=True,
        timeout=LIMIT_S,
    )
    for room in ("networks", "learn", "parameter_server"):
        assert [name for name in told.stdout.split() if name.startswith(f"streamiter.{room}")] == []
