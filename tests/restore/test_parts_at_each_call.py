"""Parts of learners and loops that resume from their state between any two calls.

The flows of the other cases are cut at some places only, where most of these fields have their first values.
"""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from operators.operator_harness import Driven
from restore.learner_cases import classifier, extract, table

from streamiter.learn import Examples
from streamiter.learn.gradients.gradient import Gradient
from streamiter.learn.gradients.offline_workers import ReplayedExamples
from streamiter.learn.gradients.training import BroadcastSteps, EpochSteps, GradientSum, ParameterOwner
from streamiter.learn.model_owner import OwnerOptions
from streamiter.learn.online.gradient_workers import OnlineWorker, OnlineWorkerOptions
from streamiter.learn.quality.validation_step import MeanComparison
from streamiter.learn.server_training import Versions

Calls = list[Callable[[Any], Any]]


def report(worker: int, number: float, starts: int = 0) -> dict[str, Any]:
    gradient = Gradient(np.full(3, number), number, 1.0, 1, 3)
    return {"gradient": gradient.to_record(), "loss": number, "worker": worker, "starts": starts, "steps": 0}


def epoch_steps() -> tuple[Callable[[], Any], Calls]:
    """Return synchronous steps: reports of one epoch, and of the next one."""
    added = [(1, 0.1, 1), (0, 0.7, 1), (1, 0.2, 2)]
    calls: Calls = [
        lambda steps, given=given: steps.add(report(*given[:2]), given[2])  # type: ignore[misc]
        for given in added
    ]
    return EpochSteps, [*calls, lambda steps: _sums(steps.end_epoch(1)), lambda steps: list(map(_sums, steps.rest()))]


def _sums(sums: GradientSum | None) -> Any:
    return None if sums is None else sums.to_record()


def replayed_examples() -> tuple[Callable[[], Any], Calls]:
    """Return a round of more rows than a block has."""
    model, random = classifier(), np.random.default_rng(1)
    rows = [model.checked_examples(Examples(random.normal(size=(800, 3)), np.arange(800) % 2)) for _ in range(3)]
    adds: Calls = [lambda examples, given=given: examples.add(given, model) for given in rows]  # type: ignore[misc]
    return lambda: ReplayedExamples(2_000), [*adds, lambda examples: _sums(examples.take_round(model))]


def mean_comparison() -> tuple[Callable[[], Any], Calls]:
    """Return thousands of rows whose loss is far above that of the mean, which is told once."""
    rows: Any = {"task": "classification", "targets": np.arange(1_000) % 2, "weights": np.ones(1_000)}
    return MeanComparison, [lambda comparison: comparison.far_above(rows, 90_000.0)] * 4


class StartsAgain(ParameterOwner):
    """Has a rollback to take over in its first step, and reads no topic."""

    def open(self, context: Any) -> None:  # type: ignore[override]
        self._context, self._published_at_s = context, 0.0

    def take_over_rollback(self) -> bool:
        return not self._starts


def owner_after_a_rollback() -> tuple[Callable[[], Any], Calls]:
    """Return an owner and gradients of the parameters before the rollback and after it."""

    def make() -> Driven:
        driven = Driven(StartsAgain(classifier, BroadcastSteps(), OwnerOptions()))
        driven.operator._is_started = True
        return driven

    return make, [_fed(report(0, number, starts)) for number, starts in ((0.1, 0), (0.2, 0), (0.3, 1), (0.4, 1))]


def worker_after_a_rollback() -> tuple[Callable[[], Any], Calls]:
    """Return a worker that gets the parameters behind a second rollback between its mini-batches."""
    answer = {"weights": np.zeros(3), "intercept": 0.0, "contained": {}, "starts": 2, "steps": 5}
    mini_batch = _fed(table(2), "process_examples")
    options = OnlineWorkerOptions(classifier, extract, synchronous=False)
    return lambda: Driven(OnlineWorker(options)), [mini_batch, _fed(answer, "process_model"), mini_batch, mini_batch]


def _fed(record: Any, method: str = "process") -> Callable[[Driven], Any]:
    def feed(driven: Driven) -> Any:
        driven.batches.clear()
        getattr(driven.operator, method)(record, driven.out)
        driven.out.flush()
        return driven.records

    return feed


IN_STEP: Any = SimpleNamespace(is_in_step=True, metric="loss", definition=dict)


def versions(workers: int = 2) -> tuple[Callable[[], Any], Calls]:
    """Return versions of a training in step, whose workers are one clock apart."""

    def learned(worker: int, clock: int) -> Any:
        return _fed({"worker": worker, "clock": clock, "loss": 0.5 * clock, "records": 3, "waited_s": 0.0})

    def parameters(clock: int) -> Any:
        return _fed({"parameters": {"weights": np.full(2, clock)}, "clock": clock})

    calls = [learned(0, 1), parameters(1), learned(1, 1), learned(1, 2), learned(0, 2), parameters(2)]
    none: Any = None
    return lambda: Driven(Versions(IN_STEP, none, workers, "train")), calls


PARTS = {
    "epoch_steps": (epoch_steps, ["epochs"]),
    "replayed_examples": (replayed_examples, ["sums", "seen", "waiting"]),
    "mean_comparison": (mean_comparison, ["all", "is told"]),
    "owner_after_a_rollback": (owner_after_a_rollback, ["starts"]),
    "worker_after_a_rollback": (worker_after_a_rollback, ["starts", "steps"]),
    "versions": (versions, ["clocks", "waiting", "learned", "records"]),
}


def resumed(make: Callable[[], Any], calls: Calls, cut: int, lost: str | None) -> str:
    """Return all results where another object resumes before a call; ``lost``: without one entry of the state."""
    part = make()
    before = [call(part) for call in calls[:cut]]
    other = make()
    old, new = (getattr(each, "operator", each) for each in (part, other))
    state, first = (getattr(each, "snapshot", getattr(each, "state", None))() for each in (old, new))
    new.restore(state if lost is None else {**state, lost: first[lost]})
    return repr([*before, *(call(other) for call in calls[cut:])])


@pytest.mark.parametrize("name", PARTS)
def test_a_part_resumes_between_any_two_calls(name: str) -> None:
    """Each of these entries of a state could be lost, and no case of a flow was cut where that shows."""
    make_case, entries = PARTS[name]
    make, calls = make_case()
    expected = resumed(make, calls, 0, None)
    assert {resumed(make, calls, cut, None) for cut in range(len(calls) + 1)} == {expected}
    for entry in entries:
        assert any(resumed(make, calls, cut, entry) != expected for cut in range(len(calls))), entry


def test_versions_of_fewer_workers_do_not_wait_for_the_others() -> None:
    """With the clocks of workers that are no longer there, no version was made any more."""
    (make_two, calls), (make_one, _) = versions(2), versions(1)
    two, one = make_two(), make_one()
    for call in (*calls[:3], calls[4], calls[3]):
        call(two)
    one.operator.restore(two.operator.snapshot())
    calls[4](one)
    assert [version.records for version in calls[5](one)] == [5 * 3]
