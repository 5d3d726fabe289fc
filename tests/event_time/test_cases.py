"""Windows and joins do what each case says, also if they resume from their state after every action."""

from __future__ import annotations

import pytest
from event_time.cases import Case, read_cases
from event_time.pure_runs import Run

from streamiter.operators.keyed_state import KeyedStates

# The other cases are about watermarks and timers of the engine.
CASES = [case for case in read_cases() if case.number not in (16, 17, 25)]


@pytest.mark.parametrize("restarts", [False, True])
@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.number}-{case.kind}")
def test_each_action_causes_what_the_case_says(case: Case, restarts: bool, backend: KeyedStates | None) -> None:
    run = Run(case, backend)
    for action in case.actions:
        assert run.act(action) == list(action.expected), action
        if restarts:
            run.kept.restart()
    if case.kind != "asof":  # A table keeps the last version of each key.
        assert not run.kept.states()
