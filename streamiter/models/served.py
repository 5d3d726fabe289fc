"""A model that follows its topic and answers: :class:`ServedModel`."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType, TracebackType
from typing import Any, Final, Self

import numpy as np

from streamiter.clock import Clock, SystemClock
from streamiter.errors import ModelError, OffsetOutOfRange, TopicNotFound, TopicUnavailable
from streamiter.models.reader import ModelUpdates, UpdateStatistics, model_updates
from streamiter.models.update import ModelUpdate, Parameters, Rank, check_model_name
from streamiter.numbers import Floats
from streamiter.sparse_rows import SparseRows
from streamiter.tables import as_floats
from streamiter.topics.topic import Topic

__all__ = [
    "LinearPredictor",
    "NoModel",
    "Prediction",
    "ServedModel",
    "ServedModelStatistics",
    "rows_to_predict",
]


def _sigmoid(score: Floats) -> Floats:
    # exp of a positive number overflows beyond 709; of a negative one it only becomes 0.
    small = np.exp(-np.abs(score))
    probability: Floats = np.where(score >= 0, 1.0, small) / (1.0 + small)
    return probability


_LINKS: Final[Mapping[str, Callable[[Floats], Floats]]] = MappingProxyType(
    {"identity": lambda score: score, "logit": _sigmoid}
)


class LinearPredictor:
    """``link(weights · x + intercept)`` for one row, or for each of many.

    Parameters: ``{"weights": (d,), "intercept": number, "link": "identity" | "logit"}``, of which only the
    weights are needed, or the bare weights. ``"logit"`` gives probabilities. Rows: an array of ``d``
    features gives one float, one of ``(n, d)``, or a table of ``d`` columns, an array of n. A sparse row is the tuple
    ``(indices, values)``, where features that it does not name are 0; a list of such tuples gives an array, and so do
    ``SparseRows``, some ten times as fast.

    Raises :class:`~streamiter.errors.ModelError` for parameters it cannot use and rows that do not fit.

    >>> predict = LinearPredictor({"weights": np.array([1.0, -1.0]), "intercept": 0.5})
    >>> predict([2.0, 1.0]), predict([[2.0, 1.0], [0.0, 0.5]]), predict(([1], [1.0]))
    (1.5, array([1.5, 0. ]), -0.5)
    """

    def __init__(self, parameters: Parameters, subject: str = "model") -> None:
        fields = parameters if isinstance(parameters, dict) else {"weights": parameters}
        self._subject = subject
        self._weights = _weights(fields, subject)
        self._intercept = _intercept(fields, subject)
        self._link = _link(fields, subject)

    def __call__(self, x: object) -> Any:
        rows, is_single = rows_to_predict(self._subject, x, len(self._weights))
        scores = rows.dot(self._weights) if isinstance(rows, SparseRows) else rows @ self._weights
        values = self._link(scores + self._intercept)
        return float(values[0]) if is_single else values


def rows_to_predict(subject: str, x: object, features: int) -> tuple[SparseRows | Floats, bool]:
    """What predictors take, as rows, and whether it is a single one.

    One row is an array of ``features`` numbers or the tuple ``(indices, values)``. Several are a matrix, a table of as
    many columns, a list of such tuples or ``SparseRows``. Raises ModelError for what does not fit.

    >>> rows_to_predict("model", ([1], [2.0]), 3)
    (SparseRows(1 rows of width 3, 1 values), True)
    """
    if isinstance(x, SparseRows):
        if x.width != features:
            raise ModelError(
                f"{subject}: expected sparse rows of width {features}, given width {x.width}; make them with the "
                "hasher that the model was trained with"
            )
        return x, False
    if isinstance(x, tuple):
        return _sparse_rows(subject, [x], features), True
    if isinstance(x, list) and x and isinstance(x[0], tuple):
        return _sparse_rows(subject, x, features), False
    rows = as_floats(subject, "rows", x)
    if rows.ndim not in (1, 2) or rows.shape[-1] != features:
        raise ModelError(
            f"{subject}: expected rows of {features} features, as ({features},) or (n, {features}), given shape "
            f"{rows.shape}"
        )
    return np.atleast_2d(rows), rows.ndim == 1


def _sparse_rows(subject: str, pairs: list[Any], features: int) -> SparseRows:
    for pair in pairs:
        if not isinstance(pair, tuple) or len(pair) != 2:
            raise ModelError(
                f"{subject}: expected sparse rows as tuples (indices, values), given {pair!r:.100}; a dense row is a "
                "list or an array"
            )
    try:
        return SparseRows.from_rows(pairs, features)
    except (TypeError, ValueError, ModelError) as error:
        raise ModelError(f"{subject}: expected sparse rows as tuples (indices, values): {error}") from error


def _weights(fields: dict[str, Any], subject: str) -> Floats:
    weights = fields.get("weights")
    if not isinstance(weights, np.ndarray) or weights.ndim != 1 or weights.dtype.kind not in "iuf":
        shape = f"shape {weights.shape}" if isinstance(weights, np.ndarray) else f"{type(weights).__name__}"
        raise ModelError(
            f"{subject}: parameters {', '.join(map(repr, fields))}: expected 'weights' as numbers of shape (d,), given"
            f" {shape}; other parameters need a predictor of their own, predict=f(parameters, x)"
        )
    return weights.astype(np.float64)


def _intercept(fields: dict[str, Any], subject: str) -> float:
    intercept = np.asarray(fields.get("intercept", 0.0))
    if intercept.size != 1 or intercept.dtype.kind not in "biuf":
        raise ModelError(f"{subject}: expected 'intercept' as one number, given {fields['intercept']!r}")
    return float(intercept.item())


def _link(fields: dict[str, Any], subject: str) -> Callable[[Floats], Floats]:
    name = fields.get("link", "identity")
    if not isinstance(name, str) or name not in _LINKS:
        raise ModelError(f"{subject}: expected 'link' as one of {', '.join(_LINKS)}, given {name!r}")
    return _LINKS[name]


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


# A server that comes back is found within this time; one that stays away is asked once a second.
_RETRY_S: Final = 1.0


class Follower:
    """Begins with the newest update of ``model``; ``on_update`` is called with each that is newer still.

    ``on_end`` is called once if following ends by an error. A topic that does not answer for a while is
    tried again, and so is one whose retention has overtaken the follower: then it goes on with the newest.
    A topic that was deleted, and created again or not, ends following.

    One task that follows a model and hands on each newer update, through outages of its topic.
    """

    def __init__(
        self,
        topic: Topic,
        model: str,
        clock: Clock,
        on_update: Callable[[ModelUpdate], None],
        on_end: Callable[[Exception], None],
    ) -> None:
        self._topic = topic
        self._model = model
        self._clock = clock
        self._on_update = on_update
        self._on_end = on_end
        self._task: asyncio.Task[None] | None = None
        self._updates: ModelUpdates | None = None
        self._past = UpdateStatistics()
        self._rank: Rank = (0, 0)
        self._identities: Mapping[int, str] = {}
        """Those of the topic when it was connected to last."""
        self.outage: Exception | None = None
        self.failure: Exception | None = None

    @property
    def is_started(self) -> bool:
        """Whether ``start`` was called."""
        return self._task is not None

    @property
    def is_connected(self) -> bool:
        """Whether the topic is open now."""
        return self._updates is not None

    @property
    def statistics(self) -> UpdateStatistics:
        """The counts of all connections; ``updates`` counts one again that a later connection began with."""
        return self._past if self._updates is None else self._past.plus(self._updates.statistics())

    def start(self) -> None:
        """Begin to follow, in a task of the running loop."""
        self._task = asyncio.create_task(self._run(), name=f"follow model {self._model}")

    async def stop(self) -> None:
        """End the task and let go of the topic."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])

    async def _run(self) -> None:
        try:
            while True:
                await self._follow_until_outage()
                await self._clock.sleep(_RETRY_S)
        except Exception as error:
            self.failure = error
            self._on_end(error)

    async def _follow_until_outage(self) -> None:
        updates = model_updates(
            self._topic, self._model, start="latest_model", on_error="skip", clock=self._clock
        )
        try:
            async with updates:
                self._connected_to(updates)
                async for update in updates:
                    self._hand_on(update)
        except (TopicUnavailable, OffsetOutOfRange) as error:
            self.outage = error
        finally:
            self._past, self._updates = self.statistics, None

    def _connected_to(self, updates: ModelUpdates) -> None:
        self._updates, self.outage = updates, None
        found = updates.identities
        if any(self._identities.get(number, identity) != identity for number, identity in found.items()):
            raise TopicNotFound(
                f"topic {self._topic.url} was deleted and created again, so that what it has now may be of another "
                "training; follow it again to begin with its newest update"
            )
        self._identities = found

    def _hand_on(self, update: ModelUpdate) -> None:
        if update.rank > self._rank:  # it begins with the newest one again after an outage
            self._rank = update.rank
            self._on_update(update)


class NoModel(ModelError):
    """There is no model to answer with.

    Calls that wait for the first model: a bounded number of them, each for a bounded time.
    """


_RELEASED: Final = "released"


class WaitingCalls:
    """Holds calls back until they are released, or fail together."""

    def __init__(self, subject: str, calls_max: int, clock: Clock) -> None:
        self._subject = subject
        self._calls_max = calls_max
        self._clock = clock
        self._futures: dict[asyncio.Future[str], None] = {}

    def __len__(self) -> int:
        return len(self._futures)

    async def wait(self, timeout_s: float) -> None:
        """Return when released. Raises :class:`NoModel` after ``timeout_s``, if too many wait, on failure."""
        if len(self._futures) >= self._calls_max:
            raise NoModel(f"{self._subject}: no model yet, and {self._calls_max} calls wait for it already")
        future: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._futures[future] = None
        timer = self._clock.call_later(timeout_s, lambda: _resolve(future, f"no model after {timeout_s:g} s"))
        try:
            outcome = await future
        finally:
            timer.cancel()
            del self._futures[future]
        if outcome != _RELEASED:
            raise NoModel(f"{self._subject}: {outcome}")

    def release(self) -> None:
        """Let all go on."""
        self._resolve_all(_RELEASED)

    def fail(self, reason: str) -> None:
        """All that wait now get :class:`NoModel` with ``reason``."""
        self._resolve_all(reason)

    def _resolve_all(self, outcome: str) -> None:
        for future in self._futures:
            _resolve(future, outcome)


def _resolve(future: asyncio.Future[str], outcome: str) -> None:
    if not future.done():
        future.set_result(outcome)
