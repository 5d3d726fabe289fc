"""Records, results and dead letters for tests of ``train_online`` with the model that learns row by row."""

from typing import Any

import numpy as np
from flow.test_topics_in_flows import content, made
from iteration.iteration_support import cut_items, run
from learn.frozen_states import frozen

from streamiter import Flow
from streamiter.learn import DelayedLabels, OnlineTraining, train_online
from streamiter.models import ModelSnapshot
from streamiter.topics import MemoryBroker

Record = dict[str, Any]


def trips(count: int, seed: int = 0) -> list[Record]:
    """Return records with numbers, texts, missing values, a field that comes later, a weight and three labels."""
    random = np.random.default_rng(seed)
    towns = ["Rome", "Kyiv", "Oslo", None]
    records = []
    for n, (km, wind, noise) in enumerate(random.normal(size=(count, 3)).tolist()):
        score = 2 * km - wind * (2 if n % 4 == 1 else 1) + noise
        records.append(
            {
                "id": n,
                "km": 1_000 * km + 5_000,
                "wind": None if n % 11 == 3 else wind,
                "town": towns[n % 4],
                "weight": 0.5 + n % 3,
                "late": score > 0.5,
                "minutes": 30 * score + 100,
                "kind": "early" if score < -1 else "late" if score > 1 + n / count else "on time",
            }
            | ({"new": km - wind} if n > count / 2 else {})
        )
    return records


LABELS = ("late", "minutes", "kind")


FEATURES = ["km", "wind", "town", "new"]


class Result:
    """The versions and the last metrics of a training; the statistics of its job after ``trained``."""

    statistics: Any = None

    def __init__(self, training: OnlineTraining) -> None:
        self._models, self._metrics = training.models.collect(), training.validation.collect()

    @property
    def models(self) -> list[ModelSnapshot]:
        return self._models.items

    @property
    def records(self) -> list[int]:
        """The number of records of each version."""
        return [model.records for model in self.models]

    @property
    def last(self) -> Any:
        """The bits of the last version."""
        return frozen(self.models[-1].parameters)

    @property
    def metrics(self) -> dict[str, float]:
        metrics: dict[str, float] = self._metrics.items[-1]
        return metrics


def trained(
    records: Any,
    *,
    seed: int | None = None,
    parallelism: int = 1,
    limits: Any = None,
    initial: Any = None,
    **options: Any,
) -> Result:
    """Run a training to its end; with a seed, the schedule and the transport batches are its own.

    Several subtasks of the source have its schedule only. ``initial`` has the records of the stream of that name.
    """
    flow = Flow("f")
    is_cut = seed is not None and parallelism == 1
    stream = cut_items(flow, records, seed=seed or 0) if is_cut else flow.from_items(records, parallelism=parallelism)
    if initial is not None:
        options["initial"] = flow.from_items(initial)
    result = Result(train_online(stream, **{"report_every": 100_000, **options}))
    result.statistics = flow.run() if seed is None else run(flow, seed=seed, limits=limits)
    return result


def without(row: Record, *names: str) -> Record:
    return {name: value for name, value in row.items() if name not in names}


def chosen(rows: list[Record], *names: str) -> list[Record]:
    return [{name: row[name] for name in names if name in row} for row in rows]


def delayed(features: Any, answer: str = "answer", *, key: str = "id", **options: Any) -> DelayedLabels:
    """Return the labels of events with a field ``answer``, for the questions with the same ``key``."""
    return DelayedLabels(
        key_of=lambda event: event[key],
        is_answer=lambda event: answer in event,
        features=features,
        target_of=lambda event: event[answer],
        **options,
    )


DELAYED = delayed(FEATURES, waiting_max=15)


async def letters_of(records: list[Any], **options: Any) -> tuple[list[tuple[str, str, bytes]], Result]:
    """Return step, error and record of each dead letter, and the result."""
    dead = await made(MemoryBroker(), "dead")
    flow = Flow("f")
    stream = flow.from_items(records, parallelism=1)
    result = Result(train_online(stream, dead_letter=dead, workers=1, report_every=100_000, **options))
    await (await flow.start()).wait()
    found = [
        (dict(letter.headers)["step"].decode(), dict(letter.headers)["error"].decode(), letter.value or b"")
        for letter in await content(dead)
    ]
    return found, result


BINARY = "expected a label that is 0, 1 or a truth value, like the first label, given"
