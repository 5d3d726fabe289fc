"""Whatever keeps state in this package goes on from a snapshot as if nothing had happened, bit for bit."""

from __future__ import annotations

import functools
import inspect
import importlib
import pkgutil
from typing import Any

import pytest
import streamiter_files
import streamiter_kafka
import streamiter_sqlite
from restore import iteration_cases, learner_cases, operator_cases
from restore.case import Case

import streamiter
from streamiter.testing import RestoreProcess, check_flow_restore

CASES: list[Case] = [*operator_cases.CASES, *iteration_cases.CASES, *learner_cases.CASES]

ASKED = ("snapshot", "state", "positions")
"""The methods that give state."""


def asked_of(kind: type[Any]) -> str | None:
    """The method by which a class, itself, gives its state."""
    return next((name for name in ASKED if inspect.isfunction(vars(kind).get(name))), None)


def count_calls(kind: type[Any], monkeypatch: pytest.MonkeyPatch) -> list[None]:
    """One entry for each time that its state is asked for."""
    name = asked_of(kind)
    assert name is not None, f"{kind.__name__} keeps nothing"
    original, calls = vars(kind)[name], []

    @functools.wraps(original)
    def counted(*arguments: Any) -> Any:
        calls.append(None)
        return original(*arguments)

    monkeypatch.setattr(kind, name, counted)
    return calls


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.name}-{case.options.get('cut_at', 'records')}")
def test_a_restored_run_is_the_run_that_went_on(
    case: Case, restore_process: RestoreProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Outputs, weights, slots, versions, epochs and callbacks: what a snapshot forgets is lost without a word."""
    calls = {kind: count_calls(kind, monkeypatch) for kind in case.covers}
    check_flow_restore(case.build, process=restore_process, **case.options)
    assert [kind.__name__ for kind, counted in calls.items() if not counted] == []


EXEMPT: dict[str, str] = {}


def test_nothing_that_keeps_state_is_without_a_case() -> None:
    """A new operator whose state nobody restores in a test is the next one that forgets a slot."""
    covered = {kind for case in CASES for kind in case.covers}
    keeping = {kind for package in PACKAGES for kind in classes_in(package) if asked_of(kind) is not None}
    names = {f"{kind.__module__}.{kind.__qualname__}" for kind in keeping - covered}
    assert sorted(names - EXEMPT.keys()) == [], "add a case, or say in EXEMPT why it needs none"
    known = {f"{kind.__module__}.{kind.__qualname__}" for kind in keeping}
    assert sorted(EXEMPT.keys() - known) == [], "no longer there"


PACKAGES = (streamiter, streamiter_sqlite, streamiter_files, streamiter_kafka)


def classes_in(package: Any) -> list[type[Any]]:
    """All classes of a package, but those for tests."""
    classes: list[type[Any]] = []
    for found in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
        if found.name.startswith("streamiter.testing") or found.name.endswith("__main__"):
            continue
        module = importlib.import_module(found.name)
        classes += [kind for kind in vars(module).values() if inspect.isclass(kind) and kind.__module__ == found.name]
    return classes
