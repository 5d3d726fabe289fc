"""Importing the names of streamiter imports nothing heavy and starts nothing; a follower of models imports less."""

import json
import subprocess
import sys
from typing import Any

import pytest
from support.waiting import PATIENCE_S

import streamiter

# These modules read files, serve, draw and fit; the building of a flow needs none of them.
HEAVY = [
    *("aiokafka", "obstore", "ray", "rocksdict", "typer", "rich", "pandas", "scipy", "uvloop", "difflib"),
    "streamiter_kafka",
]

CHECK = """
import json, sys, threading
import numpy, msgspec, msgpack, orjson
before = set(sys.modules)
import streamiter
alone = set(sys.modules) - before
calls = 0
def count(frame, event, argument):
    global calls
    # Python's own import makes more calls where no bytecode is stored.
    calls += event == "call" and "importlib" not in frame.f_code.co_filename
sys.setprofile(count)
from streamiter import *  # All names: each is imported when it is first used.
sys.setprofile(None)
print(json.dumps({
    "alone": sorted(alone),
    "calls": calls,
    "modules": sorted(set(sys.modules) - before),
    "threads": threading.active_count(),
}))
"""


@pytest.fixture(scope="module")
def imported() -> dict[str, Any]:
    """Import streamiter in a fresh interpreter, and return the report of the effects."""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", CHECK], capture_output=True, text=True, check=True, timeout=PATIENCE_S
    )
    assert done.stderr == ""
    report: dict[str, Any] = json.loads(done.stdout)
    return report


@pytest.mark.parametrize("heavy", HEAVY)
def test_it_imports_nothing_heavy(imported: dict[str, object], heavy: str) -> None:
    """A command needed a second to print its version, and a worker needed pandas to count clicks."""
    modules = imported["modules"]
    assert isinstance(modules, list)
    assert [name for name in modules if name == heavy or name.startswith(f"{heavy}.")] == []


# 161 modules (19 are faces of rooms) in 40,390 calls of functions on Python 3.11, and in 37,539 on 3.14. The time of an
# import depends on the machine, these numbers do not. Raise a limit only for names that users import.
MODULES_MAX = 170
CALLS_MAX = 44_000


def test_it_imports_no_more_than_its_names_need(imported: dict[str, Any]) -> None:
    """A table that was computed when its module was imported made each command a tenth of a second slower."""
    helpers = ["streamiter.values", "streamiter.values.helpers"]
    assert imported["alone"] == ["streamiter", *helpers, "streamiter.values.helpers.lazy"]
    own = [name for name in imported["modules"] if name.partition(".")[0] == "streamiter"]
    assert len(own) <= MODULES_MAX
    others = {name.partition(".")[0] for name in imported["modules"]} - sys.stdlib_module_names
    assert others == {"numpy", "safetensors", "streamiter"}
    assert imported["calls"] <= CALLS_MAX


def test_it_starts_nothing(imported: dict[str, object]) -> None:
    """A thread or a loop was started by the import, and broke forked workers and notebooks."""
    assert imported["threads"] == 1


def test_the_command_line_does_not_import_rooms_that_only_some_commands_need() -> None:
    """``streamiter --version`` took twice as long, because it imported learners and layers."""
    report = subprocess.run(
        [sys.executable, "-W", "error", "-c", "import sys, streamiter.cli.app; print(*sys.modules)"],
        capture_output=True,
        text=True,
        check=True,
        timeout=PATIENCE_S,
    )
    for room in ("networks", "learn", "parameter_server"):
        assert [name for name in report.stdout.split() if name.startswith(f"streamiter.{room}")] == []


def test_names_are_known_before_they_are_imported() -> None:
    """An editor offered no names, and a misspelt one was answered with the error of another module."""
    assert set(streamiter.__all__) <= set(dir(streamiter))
    with pytest.raises(AttributeError, match="module 'streamiter' has no attribute 'Flwo'"):
        streamiter.Flwo  # noqa: B018


FOLLOWS = """
import sys
from streamiter.models import ServedModel, model_updates
from streamiter.topics import topic
print(*sys.modules)
"""


def test_a_follower_of_models_imports_nothing_of_the_engine() -> None:
    """A web service that only predicts loaded the whole engine, and each of its workers started half a second later."""
    report = subprocess.run(
        [sys.executable, "-W", "error", "-c", FOLLOWS], capture_output=True, text=True, check=True, timeout=PATIENCE_S
    )
    modules = report.stdout.split()
    rooms = {name.split(".")[1] for name in modules if name.startswith("streamiter.")}
    engine = ["engine", "flow", "iteration", "learn", "networks", "parameter_server", "operators"]
    assert rooms.isdisjoint([*engine, "cli", "service", "testing"])
