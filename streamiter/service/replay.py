"""Replays a log of predictions: its rows are predicted again, by any version of the model, and compared."""

from __future__ import annotations

from dataclasses import dataclass

import orjson

from streamiter.errors import ConfigurationError, ModelError
from streamiter.models import find_update
from streamiter.models.update import shown_rank
from streamiter.service.observing.prediction_log import are_same, document_of, numbers_again, served_numbers
from streamiter.service.settings.features import FeatureRows
from streamiter.service.settings.tables import ServiceSettings
from streamiter.topics import ReadRequest, topic
from streamiter.values.helpers.closing import closed_after


@dataclass
class Replay:
    """What a version predicts for the rows of a log, beside what was served.

    Of several probabilities, the largest difference counts as the difference of a row.
    """

    version: str
    rows: int = 0
    """The rows that the version predicts."""
    unreadable: int = 0
    """Records that no log of predictions has written."""
    of_other_models: int = 0
    """Records of other services that write to the same log."""
    refused: int = 0
    """The rows that the version refuses."""
    sum_of_differences: float = 0.0
    largest_difference: float = 0.0
    changed_decisions: int = 0
    """The rows with another most probable label: of one probability, on the other side of one half."""
    of_same_version: int = 0
    """The rows that the very same version has served."""
    mismatched: int = 0
    """Of these, the rows whose prediction is another one now."""

    def add(self, served: list[float], again: list[float], *, is_same_version: bool, is_probability: bool) -> None:
        """Count a row."""
        self.rows += 1
        difference = max(abs(one - other) for one, other in zip(served, again, strict=False))
        self.sum_of_differences += difference
        self.largest_difference = max(self.largest_difference, difference)
        if is_probability:
            self.changed_decisions += _decision(served) != _decision(again)
        if is_same_version:
            self.of_same_version += 1
            self.mismatched += not are_same(served, again)

    @property
    def mean_difference(self) -> float | None:
        """The mean difference; None without rows."""
        return self.sum_of_differences / self.rows if self.rows else None


def _decision(numbers: list[float]) -> int | bool:
    return numbers[0] > 0.5 if len(numbers) == 1 else max(range(len(numbers)), key=numbers.__getitem__)


async def replay_of(settings: ServiceSettings, version: str | None = None) -> Replay:
    """Predict the rows of the service's log with a version, such as ``"3.17"``; None: with the newest.

    Raises ConfigurationError for a service without a log.
    """
    if settings.predictions.log is None:
        raise ConfigurationError(
            f"replay: expected a service with a log of predictions, given {settings.source} without one; add "
            '[predictions] with log = "URL"'
        )
    update = await find_update(topic(settings.publish.topic), settings.name, version)
    predict = FeatureRows(settings.learn).predictor(update.parameters, f"model {settings.name!r}")
    found = Replay(shown_rank(update.rank))
    reader = await topic(settings.predictions.log).open_reader(ReadRequest(start="earliest", stop="latest"))
    async with closed_after(reader.close):
        while (batch := await reader.read()) is not None:
            for value in batch.values:
                try:
                    document = document_of(value)
                except (orjson.JSONDecodeError, KeyError, TypeError, AttributeError):
                    found.unreadable += 1
                    continue
                if document["model"] != settings.name:
                    found.of_other_models += 1
                    continue
                try:
                    again = numbers_again(predict, document)
                except ModelError:
                    found.refused += 1
                    continue
                served = served_numbers(document["prediction"])
                found.add(
                    served,
                    again,
                    is_same_version=(document["generation"], document["version"]) == update.rank,
                    is_probability="value" not in document["prediction"],
                )
    return found
