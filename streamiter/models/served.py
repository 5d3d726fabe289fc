"""Serving a model: ``ServedModel`` follows the updates of a model in a topic, and predicts with the newest one.

A :class:`Follower` reads the updates in a task of its own, also through outages of the topic. Calls that arrive before
the first model wait in :class:`WaitingCalls`. :class:`LinearPredictor` predicts if no other function is given.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import os
import weakref
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Self

import msgspec
import numpy as np

from streamiter.errors import (
    ConfigurationError,
    ModelError,
    OffsetOutOfRange,
    StorageFull,
    TopicNotFound,
    TopicUnavailable,
)
from streamiter.models.documents import EMBEDDINGS, Parameters, members_in
from streamiter.models.intake import UpdateStatistics, Wanted
from streamiter.models.reader import ModelUpdates
from streamiter.models.update import NO_RANK, ModelUpdate, check_model_name, shown_rank
from streamiter.topics.topic import Topic
from streamiter.values.helpers.clock import Clock, SystemClock
from streamiter.values.helpers.closing import closed_after
from streamiter.values.helpers.files import in_thread
from streamiter.values.helpers.importing import need_package
from streamiter.values.helpers.notebooks import html_facts
from streamiter.values.times import Seconds, in_seconds

if TYPE_CHECKING:  # Many followers rank nothing.
    from streamiter.models.catalogue import ApproximateIndex, Catalogue
    from streamiter.models.linear_predictor import LinearPredictor
    from streamiter.models.model_folder import ModelFolder
    from streamiter.models.ranking import Candidates, RankedCandidate
    from streamiter.models.stored_rows import PartPath

_log = logging.getLogger("streamiter.models")


@dataclass(frozen=True, slots=True)
class Prediction:
    """A prediction, and the update it was computed with."""

    value: Any
    """The value, or an array with a value for each row."""
    generation: int
    """The generation of the update."""
    version: int
    """The version of the update."""
    age_s: float
    """Seconds between the creation of the update and the prediction."""
    classes: list[Any] | None = None
    """The labels of the probabilities, in order; one more probability, the last, is for a class that has not come yet.
    None if a row has one number."""
    positive: Any = None
    """The label whose probability the value is, if there are two labels and they are no truth values."""


@dataclass(frozen=True, slots=True)
class ServedModelStatistics:
    """The state of a served model."""

    generation: int | None
    """The generation of the model that answers now; None before the first model."""
    version: int | None
    """The version of the model that answers now; None before the first model."""
    age_s: float | None
    """Seconds since the creation of that model; None before the first model."""
    updates: int
    """The number of models taken over so far."""
    skipped: int
    """The number of older and incomplete updates."""
    failed: int
    """The number of updates that could not be read or used."""
    waiting: int
    """The number of calls that wait for the first model."""
    is_following: bool
    """Whether the topic is open now."""
    last_error: str | None
    """Why the topic is not open, or why the last failed update failed."""


class NoModel(ModelError):
    """No model to predict with has arrived (yet)."""


class ServedModel:
    """Follows ``model`` in ``topic`` from its newest update on, and predicts with the latest update.

    ``predict(parameters, x)`` computes a prediction; or ``load(parameters)``, called once for each update, returns the
    function that does. Without both the model must be linear (see :class:`~streamiter.models.LinearPredictor`). A task
    follows the topic; it ends with the ``async with``.

    An update that cannot be read or used is counted in ``statistics()``, and the last good model continues to answer.
    While the topic does not answer, the task tries again. If following ends for good, for instance because the topic
    is deleted, the last model continues to answer, :meth:`check` raises, and the end of the ``async with`` raises
    unless the error was raised before. At most ``waiting_max`` calls wait for the first model at a time.

    With ``folder``, a path on a local disk, the vectors of embeddings are there, in RocksDB (extra ``[rocks]``), not in
    memory. Predictions are the same to the last bit. After a restart or a crash, following continues with the version
    in the folder. One process uses a folder at a time. Predictions end with the ``async with``.

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
        load: Callable[[Parameters], Callable[[Any], Any]] | None = None,
        folder: str | os.PathLike[str] | None = None,
        waiting_max: int = 1024,
        clock: Clock | None = None,
    ) -> None:
        check_model_name(model)
        if predict is not None and load is not None:
            raise ConfigurationError("ServedModel: expected one of predict= and load=, given both; leave one out")
        self.topic = topic
        """The topic of the updates."""
        self.model = model
        """The name of the model."""
        self._subject = f"model {model!r} of {topic.url}"
        self._predict = predict
        self._load = load
        self._clock = clock or SystemClock()
        self._waiting = WaitingCalls(self._subject, waiting_max, self._clock)
        self._folder = None if folder is None else self._model_folder(folder)
        # The state of the learner would only take memory.
        self._follower = Follower(
            topic, model, self._clock, self._take_over, self._following_ended, state=False, folder=self._folder
        )
        self._serving: ServedVersion | None = None
        self._catalogues: weakref.WeakSet[Catalogue] = weakref.WeakSet()
        self._taken_over = 0
        self._unusable = 0
        self._unusable_because: str | None = None
        self._is_failure_told = False

    def __repr__(self) -> str:
        return f"ServedModel({self._subject})"

    def _repr_html_(self) -> str:
        """Return a table of the model that answers now, for notebooks."""
        return html_facts(self._subject, asdict(self.statistics()))

    async def __aenter__(self) -> Self:
        if self._follower.is_started:
            raise ModelError(f"{self._subject}: a ServedModel is entered once; make another one")
        if self._folder is not None:
            await in_thread(self._folder.open)
        self._follower.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._follower.stop()
        if self._folder is not None:
            await in_thread(self._folder.close)
        self._waiting.fail("the ServedModel was closed while the call waited for the first model")
        if error is None and not self._is_failure_told:
            self._raise_failure()

    @property
    def update(self) -> ModelUpdate | None:
        """The update that answers now; None before the first one."""
        return None if self._serving is None else self._serving.update

    def predict(self, x: Any) -> Prediction:
        """Return the prediction for a row, or for each row of a batch, all by one version of the model.

        Raises :class:`~streamiter.models.NoModel` before the first model, ``ModelError`` for rows that do not fit the
        model, and the errors of your own ``predict`` function.
        """
        serving = self.version_now()
        update = serving.update
        classes, positive = (getattr(serving.predict, name, None) for name in ("classes", "positive"))
        age_s = update.age_s(self._clock)
        return Prediction(serving.predict(x), update.generation, update.version, age_s, classes, positive)

    def top_k(self, row: Mapping[str, Any], candidates: Candidates, k: int = 10) -> list[RankedCandidate]:
        """Return the ``k`` best candidates for a row, all by one version, see ``LinearPredictor.top_k``.

        Raises :class:`~streamiter.models.NoModel` before the first model, and ``ModelError`` for a model with another
        predictor.
        """
        return self._ranker("top_k").top_k(row, candidates, k)

    def catalogue(self, candidates: Candidates, *, approximate: ApproximateIndex | None = None) -> Catalogue:
        """Return candidates to rank for many rows: ``catalogue.top_k(row, k)`` is :meth:`top_k`, many times as fast.

        The candidates' features are found once for each version, before it answers, while the version before goes on
        answering. With ``approximate="faiss"`` (extra ``[faiss]``), an index of these vectors finds candidates, and
        some of the best may be missing.
        """
        from streamiter.models.catalogue import Catalogue

        found = Catalogue(self._subject, candidates, lambda: self._ranker("catalogue"), approximate)
        self._catalogues.add(found)
        return found

    def _ranker(self, method: str) -> LinearPredictor:
        """Return the predictor that answers now. Raises ``ModelError`` for one that does not rank."""
        from streamiter.models.linear_predictor import LinearPredictor

        serving = self.version_now()
        if not isinstance(serving.predict, LinearPredictor):
            raise ModelError(
                f"{serving.subject}: {method}: expected a LinearPredictor, given a predictor of your own; rank its "
                "predictions"
            )
        return serving.predict

    def version_now(self) -> ServedVersion:
        """Return the version that answers now: several calls of its predictor are of one version.

        Raises :class:`~streamiter.models.NoModel` before the first model.
        """
        if self._serving is None:
            raise NoModel(f"{self._subject}: {self._why_no_model()}")
        return self._serving

    async def ready(self, *, timeout_s: Seconds = 30.0) -> None:
        """Wait for the first model. Raises :class:`~streamiter.models.NoModel` if no model arrives in time."""
        if self._serving is not None:
            return
        if not self._follower.is_started or self._follower.failure is not None:
            raise NoModel(f"{self._subject}: {self._why_no_model()}") from self._follower.failure
        await self._waiting.wait(in_seconds(timeout_s))

    @property
    def is_searching(self) -> bool:
        """Whether the topic has not been searched for a model yet."""
        return self._follower.is_started and not self._follower.is_searched

    async def searched(self, *, timeout_s: Seconds = 30.0) -> None:
        """Wait until the topic was searched for a model, or cannot be followed; at most for this time."""
        await self._follower.searched(in_seconds(timeout_s))

    async def predict_when_ready(self, x: Any, *, timeout_s: Seconds = 30.0) -> Prediction:
        """Wait for the first model, then :meth:`predict`; it raises the errors of :meth:`ready` and ``predict``."""
        await self.ready(timeout_s=timeout_s)
        return self.predict(x)

    def statistics(self) -> ServedModelStatistics:
        """Return the current state."""
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
        """Raise ``ModelError`` if following is interrupted, or has ended."""
        self._raise_failure()
        if (outage := self._follower.outage) is not None:
            what = "its disk is full" if isinstance(outage, StorageFull) else "the topic does not answer"
            raise ModelError(f"{self._subject}: {what}, trying again: {outage}") from outage

    async def _take_over(self, update: ModelUpdate) -> None:
        is_large = self._load is None and members_in(update.parameters, EMBEDDINGS) is not None
        try:
            predict = await in_thread(self._predictor, update) if is_large else self._predictor(update)
        except Exception as error:  # The user's ``load`` may raise anything.
            self._unusable += 1
            is_own = isinstance(error, ModelError)
            self._unusable_because = str(error) if is_own else f"{self._subject_of(update)}: load has raised {error!r}"
            return
        await self._find_candidates(predict)
        self._serving = ServedVersion(self._subject_of(update), update, predict)
        self._taken_over += 1
        self._waiting.release()

    async def _find_candidates(self, predict: Callable[[Any], Any]) -> None:
        for catalogue in [*self._catalogues]:
            from streamiter.models.linear_predictor import LinearPredictor

            if isinstance(predict, LinearPredictor):
                with contextlib.suppress(ModelError):  # Each answer of the catalogue raises it.
                    await in_thread(catalogue.find, predict)

    def _subject_of(self, update: ModelUpdate) -> str:
        return f"{self._subject}, update {shown_rank(update.rank)}"

    def _predictor(self, update: ModelUpdate) -> Callable[[Any], Any]:
        if self._load is not None:
            return self._load(update.parameters)
        if self._predict is not None:
            return functools.partial(self._predict, update.parameters)
        from streamiter.models.linear_predictor import LinearPredictor  # Many followers predict in their own way.

        return LinearPredictor(update.parameters, self._subject_of(update))

    def _model_folder(self, folder: str | os.PathLike[str]) -> ModelFolder:
        if self._predict is not None or self._load is not None:
            raise ConfigurationError(
                f"{self._subject}: expected folder= without predict= and load=, which get whole arrays; leave one out"
            )
        need_package(f"{self._subject}, folder=", "rocksdict", "rocks", "; without folder= it is in memory")
        from streamiter.models.model_folder import ModelFolder  # Most followers have the model in memory.

        return ModelFolder(Path(folder), self._subject, (self.topic.url, self.model), self._stored_parts)

    def _stored_parts(self, parameters: Parameters) -> list[PartPath]:
        """Return the paths of the arrays whose rows belong on disk."""
        from streamiter.models.stored_rows import belongs_on_disk

        experts = (members_in(parameters, EMBEDDINGS) or {}).get("experts")
        paths: list[PartPath] = []
        for number, expert in enumerate(experts if isinstance(experts, list) else ()):
            if isinstance(expert, Mapping) and belongs_on_disk(expert.get("vectors"), np.dtype(np.float32)):
                paths.append((EMBEDDINGS, "experts", number, "vectors"))
        return paths

    def _following_ended(self, error: Exception) -> None:
        _log.error("%s: following has ended, so predictions become outdated: %s", self._subject, error)
        self._waiting.fail(f"no model, and the topic cannot be followed: {error}")

    def _raise_failure(self) -> None:
        failure = self._follower.failure
        if failure is not None:
            self._is_failure_told = True
            raise ModelError(
                f"{self._subject}: following has ended, so predictions become outdated: {failure}"
            ) from failure

    def _trouble(self) -> str | None:
        trouble = self._follower.failure or self._follower.outage
        return str(trouble) if trouble is not None else None

    def _why_no_model(self) -> str:
        if not self._follower.is_started:
            return "following has not begun; use the model inside `async with ServedModel(...)`"
        trouble = self._trouble() or self._unusable_because
        return "no model yet" + (f": {trouble}" if trouble is not None else "; await ready() first")


class ServedVersion(msgspec.Struct, frozen=True):
    """An update and its predictor, replaced together: an answer never mixes two versions."""

    subject: str
    """The beginning of messages about a row: the model, its topic and the update."""
    update: ModelUpdate
    """The update that answers."""
    predict: Callable[[Any], Any]
    """Returns the prediction for a row, or for each of several rows."""


# A topic that is available again is opened within this time; an unavailable topic is tried once a second.
_RETRY_S: Final = 1.0


class Follower:
    """Follows a model in a task: calls ``on_update`` with the newest update, then with each newer one.

    A topic that does not answer is opened again after a second. A topic whose retention has deleted unread records is
    opened again, too; then following continues with the newest update. If the topic was deleted, following ends, also
    if it was created again. ``on_end`` is called once if following ends by an error. After the newest update only the
    ``wanted`` ones are read. Without ``state``, parameters do not have the state of the learner. With ``folder``, the
    version there is the first to continue from; a full disk is an outage.
    """

    def __init__(
        self,
        topic: Topic,
        model: str,
        clock: Clock,
        on_update: Callable[[ModelUpdate], Awaitable[None] | None],
        on_end: Callable[[Exception], None],
        wanted: Wanted | None = None,
        *,
        state: bool = True,
        folder: ModelFolder | None = None,
    ) -> None:
        self._topic = topic
        self._model = model
        self._state = state
        self._folder = folder
        self._clock = clock
        self._on_update = on_update
        self._on_end = on_end
        self._wanted = wanted
        self._task: asyncio.Task[None] | None = None
        self._updates: ModelUpdates | None = None
        self._past = UpdateStatistics()
        self._rank = NO_RANK
        self._identities: Mapping[int, str] = {}
        """The identities of the topic's partitions at the last connection."""
        self.outage: Exception | None = None
        """Why the topic is not open now; None while it is open."""
        self.failure: Exception | None = None
        """Why following has ended; None while it continues."""
        self.is_searched = False
        """Whether the newest update was found, or the topic was searched and has none."""
        self._searched_or_late = asyncio.Event()

    async def searched(self, timeout_s: float) -> None:
        """Wait until the newest update was found, or the topic was searched and has none; at most for this time."""
        async with closed_after(self._clock.call_later(timeout_s, self._searched_or_late.set).cancel):
            await self._searched_or_late.wait()

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
        """The counts of all connections; the first update of a later connection is counted again."""
        return self._past if self._updates is None else self._past.plus(self._updates.statistics())

    def start(self) -> None:
        """Start the task in the running event loop."""
        self._task = asyncio.create_task(self._run(), name=f"follow model {self._model}")

    async def stop(self) -> None:
        """End the task and close the topic."""
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
            self._searched_or_late.set()

    async def _follow_until_outage(self) -> None:
        updates = ModelUpdates(
            self._topic, self._model, "latest_model", True, "skip", self._clock, self._wanted, self._state, self._folder
        )
        try:
            async with updates:
                self._connected_to(updates)
                async for update in updates:
                    await self._hand_on(update)
        except (TopicUnavailable, OffsetOutOfRange, StorageFull) as error:
            self.outage = error
        finally:
            self._past, self._updates = self.statistics, None

    def _connected_to(self, updates: ModelUpdates) -> None:
        self._updates, self.outage, self.is_searched = updates, None, True
        self._searched_or_late.set()
        found = updates.identities
        if any(self._identities.get(number, identity) != identity for number, identity in found.items()):
            raise TopicNotFound(
                f"topic {self._topic.url} was deleted and created again, so its updates may be of another "
                "training; follow it again to start from its newest update"
            )
        self._identities = found

    async def _hand_on(self, update: ModelUpdate) -> None:
        if update.rank > self._rank:  # After an outage the newest update is read again.
            self._rank = update.rank
            if (taking_over := self._on_update(update)) is not None:
                await taking_over


_RELEASED: Final = "released"


class WaitingCalls:
    """Calls that wait for the first model: a bounded number, each for a bounded time; all are released together."""

    def __init__(self, subject: str, calls_max: int, clock: Clock) -> None:
        self._subject = subject
        self._calls_max = calls_max
        self._clock = clock
        self._futures: dict[asyncio.Future[str], None] = {}

    def __len__(self) -> int:
        return len(self._futures)

    async def wait(self, timeout_s: float) -> None:
        """Wait for the release. Raises :class:`NoModel` after ``timeout_s``, if too many calls wait, or on failure."""
        if len(self._futures) >= self._calls_max:
            raise NoModel(f"{self._subject}: no model yet, and {self._calls_max} calls wait for it already")
        future: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._futures[future] = None
        late = f"no model after {timeout_s:g} s; check the name, and whether its trainer has published"
        timer = self._clock.call_later(timeout_s, lambda: _resolve(future, late))
        async with closed_after(timer.cancel, lambda: self._futures.pop(future)):
            outcome = await future
        if outcome != _RELEASED:
            raise NoModel(f"{self._subject}: {outcome}")

    def release(self) -> None:
        """Release all calls."""
        self._resolve_all(_RELEASED)

    def fail(self, reason: str) -> None:
        """Let all waiting calls raise :class:`NoModel` with ``reason``."""
        self._resolve_all(reason)

    def _resolve_all(self, outcome: str) -> None:
        for future in self._futures:
            _resolve(future, outcome)


def _resolve(future: asyncio.Future[str], outcome: str) -> None:
    if not future.done():
        future.set_result(outcome)
