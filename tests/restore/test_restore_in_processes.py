"""The cases of the restore suite in one to three processes, which are stopped and go on in another number of them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from checkpoints_jobs.parallelism_support import Stops
from iteration.iteration_support import run_shuffled
from restore import iteration_cases, learner_cases, operator_cases
from restore.case import Case

from streamiter import Flow, Stream
from streamiter.models.update import ModelSnapshot
from streamiter.testing.restore.driving import _by_name, _plain_form

PARALLELISM = 3
TURNS = 40
"""Most cases take a little longer, in turns of the event loop."""

SPEED_DECIDES = {
    "keyed_reduce",
    "stateful_map",
    "timers_of_a_step",
    "event_time",
    "event_time_over_channels",
    "timed_windows",
    "timed_joins",
    "awaited_steps",
    "online_training-asynchronous",
    "online_training_from_a_start",
    "online_training_with_delayed_labels",
    "online_training_behind_a_join-asynchronous",
    "online_training_by_rows-asynchronous",
    "online_training_by_rows_with_delayed_labels-asynchronous",
    "online_training_with_labels_in_event_time-asynchronous",
    "offline_training-asynchronous",
    "comparison-asynchronous",
    "comparison-synchronous",
    "scaling",
    "clustering",
    "clustering_from_a_start",
}
"""With several sources, their results depend on the order of arrival or on the clock, in one process too."""
CASES = {
    case.name: case
    for case in (*operator_cases.CASES, *iteration_cases.CASES, *learner_cases.CASES)
    if case.name not in SPEED_DECIDES and not case.name.startswith("parameter_server")
}
"""Without parameter servers: their restores are in tests/parameter_server/flows/test_several_processes.py."""


def result(case: Case, parallelisms: list[int], seed: int) -> Any:
    """Return the records of all outputs in any order, of a run that is stopped between these parallelisms."""
    made: list[tuple[Flow, dict[str, Any]]] = []

    def make_flow(parallelism: int) -> Flow:
        flow = Flow("case", parallelism=parallelism)
        flow.register(ModelSnapshot)
        with flow.graph.adapting(lambda step: replace(step, has_lasting_name=True)):
            outputs = _by_name(case.build(flow))
            # The windows of validations follow the order of arrival.
            collected = {
                name: each.collect()
                for name, each in outputs.items()
                if isinstance(each, Stream) and name != "validation"
            }
        made.append((flow, collected))
        return flow

    run_shuffled(Stops(seed).run(make_flow, parallelisms, turns=TURNS), seed)
    flow, collected = made[-1]
    return {
        name: sorted(flow.plain_data.encode(_plain_form(record)) for record in each.items)
        for name, each in collected.items()
    }


@pytest.mark.parametrize("name", CASES)
def test_a_case_that_resumes_in_other_processes_has_the_result_of_one_process(name: str) -> None:
    """The state of a step was in a process that the next run did not have, or its records were on their way."""
    case, first = CASES[name], 6 * list(CASES).index(name)
    expected = result(case, [PARALLELISM], seed=0)
    assert any(expected.values())
    for seed in (first + 1, first + 2):  # In 2, 1 and 3 processes, and in 3, 2 and 1.
        assert result(case, [PARALLELISM] * 3, seed) == expected
