"""A model that follows its topic and answers: :class:`ServedModel`."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

from streamiter.clock import Clock, SystemClock
from streamiter.errors import ModelError
from streamiter.models.follower import Follower
from streamiter.models.headers import check_model_name
from streamiter.models.linear import LinearPredictor
from streamiter.models.parameters import Parameters
from streamiter.models.update import ModelUpdate
from streamiter.models.waiting import NoModel, WaitingCalls
from streamiter.topics.topic import Topic

__all__ = ["Prediction", "ServedModel", "ServedModelStatistics"]


@dataclass(frozen=True, slots=True)
class Prediction:
    """A value (or an array, one for each row), and the update it was computed with.

    ``age_s``: seconds between the making of that update and the prediction.
    """

    value: Any
    generation: int
    version: int
    age_s: float


@dataclass(frozen=True, slots=True)
class ServedModelStatistics:
    """How serving goes.

    ``generation``, ``version``, ``age_s``: of the model that answers now, None before the first.
    ``updates``: models taken over so far. ``skipped``: older and incomplete updates. ``failed``: updates
    that could not be read or used. ``waiting``: calls that wait for the first model. ``is_following``:
    whether the topic is open now; ``last_error``: why it is not, or why the last failed update was.
    """

    generation: int | None
    version: int | None
    age_s: float | None
    updates: int
    skipped: int
    failed: int
    waiting: int
    is_following: bool
    last_error: str | None


@dataclass(frozen=True, slots=True)
class _Serving:
    """An update and its predictor, replaced together: an answer never mixes two versions."""

    update: ModelUpdate
    predict: Callable[[Any], Any]


class ServedModel:
    """Follows ``model`` in ``topic`` from its newest update on, and predicts with the latest one.

    ``predict(parameters, x)`` computes a prediction; without it the model must be linear (see
    :class:`~streamiter.models.LinearPredictor`). One task follows; it ends with the ``async with``.

    What cannot be read or used does not stop it: the last good model answers on, ``statistics()`` counts.
    While the topic does not answer it tries again. Where following ends for good, as when the topic is
    deleted, the last model answers on, :meth:`check` raises, and so does the end of the ``async with``
    unless the error was raised before. ``waiting_max``: calls that may wait for the first model at a time.

    ::

        async with ServedModel(topic("kafka://127.0.0.1:9092/models"), "ctr") as served:
            await served.ready(timeout_s=10)
            prediction = served.predict([0.3, 1.0])
            print(prediction.value, prediction.version, prediction.age_s)
    """

    def __init__(
        self,
        topic: Topic,
        model: str,
        *,
        predict: Callable[[Parameters, Any], Any] | None = None,
        waiting_max: int = 1024,
        clock: Clock | None = None,
    ) -> None:
        check_model_name(model)
        self._subject = f"model {model!r} of {topic.url}"
        self._predict = predict
        self._clock = clock or SystemClock()
        self._waiting = WaitingCalls(self._subject, waiting_max, self._clock)
        self._follower = Follower(topic, model, self._clock, self._take_over, self._following_ended)
        self._serving: _Serving | None = None
        self._taken_over = 0
        self._unusable = 0
        self._unusable_because: str | None = None
        self._is_failure_told = False

    async def __aenter__(self) -> Self:
        if self._follower.is_started:
            raise ModelError(f"{self._subject}: a ServedModel is entered once; make another one")
        self._follower.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._follower.stop()
        self._waiting.fail("it was closed while the call waited for the first model")
        if error is None and not self._is_failure_told:
            self._raise_failure()

    def predict(self, x: Any) -> Prediction:
        """The prediction for a row, or for each row of a batch, at once and all by one version.

        Raises :class:`~streamiter.models.NoModel` before the first model, ``ModelError`` for rows that
        do not fit the model; a ``predict`` function of your own raises what it raises.
        """
        serving = self._serving
        if serving is None:
            raise NoModel(f"{self._subject}: {self._why_no_model()}")
        update = serving.update
        return Prediction(serving.predict(x), update.generation, update.version, update.age_s(self._clock))

    async def ready(self, *, timeout_s: float = 30.0) -> None:
        """Return when there is a model. Raises :class:`~streamiter.models.NoModel` if none comes in time."""
        if self._serving is not None:
            return
        if not self._follower.is_started or self._follower.failure is not None:
            raise NoModel(f"{self._subject}: {self._why_no_model()}") from self._follower.failure
        await self._waiting.wait(timeout_s)

    async def predict_when_ready(self, x: Any, *, timeout_s: float = 30.0) -> Prediction:
        """As :meth:`predict`, but waits for the first model; errors as in :meth:`ready`."""
        await self.ready(timeout_s=timeout_s)
        return self.predict(x)

    def statistics(self) -> ServedModelStatistics:
        """How it goes now."""
        counts = self._follower.statistics
        update = self._serving.update if self._serving is not None else None
        return ServedModelStatistics(
            generation=update.generation if update is not None else None,
            version=update.version if update is not None else None,
            age_s=update.age_s(self._clock) if update is not None else None,
            updates=self._taken_over,
            skipped=counts.older + counts.incomplete,
            failed=counts.unreadable + self._unusable,
            waiting=len(self._waiting),
            is_following=self._follower.is_connected,
            last_error=self._trouble() or self._unusable_because or counts.last_error,
        )

    def check(self) -> None:
        """Raise ``ModelError`` if it does not follow its topic, for good or for the time being."""
        self._raise_failure()
        if self._follower.outage is not None:
            raise ModelError(
                f"{self._subject}: the topic does not answer, trying again: {self._follower.outage}"
            ) from self._follower.outage

    def _take_over(self, update: ModelUpdate) -> None:
        try:
            predict = self._predictor(update)
        except ModelError as error:
            self._unusable += 1
            self._unusable_because = str(error)
            return
        self._serving = _Serving(update, predict)
        self._taken_over += 1
        self._waiting.release()

    def _predictor(self, update: ModelUpdate) -> Callable[[Any], Any]:
        if self._predict is not None:
            return functools.partial(self._predict, update.parameters)
        subject = f"{self._subject}, update {update.generation}.{update.version}"
        return LinearPredictor(update.parameters, subject)

    def _following_ended(self, error: Exception) -> None:
        self._waiting.fail(f"no model, and it cannot be followed: {error}")

    def _raise_failure(self) -> None:
        failure = self._follower.failure
        if failure is not None:
            self._is_failure_told = True
            raise ModelError(
                f"{self._subject}: it is not followed any more, predictions grow old: {failure}"
            ) from failure

    def _trouble(self) -> str | None:
        trouble = self._follower.failure or self._follower.outage
        return str(trouble) if trouble is not None else None

    def _why_no_model(self) -> str:
        if not self._follower.is_started:
            return "it is not followed yet; use it inside `async with ServedModel(...)`"
        trouble = self._trouble() or self._unusable_because
        return "no model yet" + (f": {trouble}" if trouble is not None else "; await ready() first")
