"""Labels that come later than their questions: what the default model learns from them, wherever batches are cut."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest

from streamiter import Flow
from streamiter.learn import DelayedLabels, train_online

LABELS = DelayedLabels(
    key_of=lambda event: event["id"],
    is_answer=lambda event: "label" in event,
    features=["sky", "km"],
    target_of=lambda answer: answer["label"],
)


def trained(events: list[dict[str, Any]], mini_batch: int) -> tuple[list[Any], list[Any]]:
    """Return the last version, and the metrics."""
    flow = Flow("late")
    training = train_online(
        flow.from_items(events), labels=LABELS, mini_batch=mini_batch, mode="synchronous", report_every=100
    )
    models, metrics = training.models.collect(), training.validation.collect()
    flow.run()
    return models.items, metrics.items


def groups(count: int, size: int) -> list[dict[str, Any]]:
    """Return groups of questions, each followed by its answers; all answers of a group are one flip of a coin."""
    random = Random(1)
    events: list[dict[str, Any]] = []
    for group in range(count):
        ids = range(group * size, (group + 1) * size)
        label = random.random() < 0.5
        events += [{"id": n, "sky": random.choice("ab"), "km": random.random()} for n in ids]
        events += [{"id": n, "label": label} for n in ids]
    return events


def test_experts_are_judged_by_the_predictions_that_were_made() -> None:
    """The expert that learns the label of a group from its first answers had the best loss; it predicted no group."""
    _, metrics = trained(groups(400, 10), 1_000)
    # That of a coin is 0.69; judged when the answers come, it is above 2.
    assert metrics[-1]["loss"] < 0.9


@pytest.mark.parametrize(
    "label_of",
    [lambda x: x > 0.5, lambda x: 10.0 * x, lambda x: "red" if x < 0.4 else "blue" if x < 0.9 else "green"],
    ids=["binary", "numbers", "classes"],
)
def test_where_mini_batches_are_cut_does_not_matter(label_of: Any) -> None:
    """The scores of a question that waits for the next mini-batch were lost, or were those of other classes."""
    random = Random(1)
    rows = [{"id": n, "sky": random.choice("ab"), "km": random.random()} for n in range(600)]
    answers = [{"id": row["id"], "label": label_of(row["km"])} for row in rows]
    late = 37
    events = rows[:late]
    for n, answer in enumerate(answers):
        events += rows[n + late : n + late + 1]
        events.append(answer)
    [first, *others] = [trained(events, size) for size in (2_000, 100, 13, 1)]
    for models, metrics in others:
        assert metrics[-1] == pytest.approx(first[1][-1], rel=1e-9)
        assert models[-1].parameters.keys() == first[0][-1].parameters.keys()
        for name, value in models[-1].parameters.items():
            assert str(value) == str(first[0][-1].parameters[name]), name
