"""The log of predictions: what a service has answered, with the rows as it got them, as records of a topic.

The id of a record is in the answer, so that labels can name it. A training that reads the log with the decoder
``predictions`` learns from the very features that were served.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
import uuid
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Sequence
from itertools import islice
from typing import Any, Final, NamedTuple
from urllib.parse import quote

import numpy as np
import orjson

from streamiter.errors import DecodeError, ModelError, RecordTooLarge, StorageFull, StreamiterError, TopicError
from streamiter.models.served import ServedVersion
from streamiter.service.settings.tables import PredictionSettings, ServiceSettings
from streamiter.topics import OutgoingBatch, Topic, TopicBatch, topic
from streamiter.topics.topic import SizeLimit, TopicWriter
from streamiter.values.hashes import hash_of
from streamiter.values.helpers.clock import Clock

_log = logging.getLogger("streamiter.service")

_ID_FIELD: Final = "prediction_id"
_TIME_FIELD: Final = "predicted_at"
"""The names under which the decoder adds the id and the time of a prediction, in milliseconds, to its row."""

# What a log holds while its topic does not answer: some 100,000 rows of 300 bytes.
_QUEUE_BYTES_MAX: Final = 32 << 20
_BATCH: Final = 1_000
_TRY_AGAIN_S: Final = 1.0
# The records of the last requests are written within this time after the end of the server.
_DRAIN_S: Final = 5.0
# Served numbers are float64, and the loop for a single row and the arrays for many may differ in the last bits.
_SAME: Final = 1e-9


# The flow of the service is the only reader of the file.
_FILE_SETTINGS: Final = {"delete_read": "1"}


def file_of_predictions(settings: ServiceSettings) -> Topic | None:
    """Return the topic in the file to which predictions go before they are answered; None if there is no such file."""
    path = settings.predictions.exactly_once
    return None if path is None else topic(f"sqlite:///{quote(path)}?topic={settings.name}")


class _Waiting(NamedTuple):
    """A record that is not stored yet, and what is needed to compute its prediction again."""

    at_ms: int
    key: bytes
    value: bytes
    version: ServedVersion


class PredictionLog:
    """Writes predictions to the topic of the settings, in a task of its own, from a queue of bounded bytes.

    Where the topic does not answer, requests are answered all the same: when the queue is full, further predictions are
    not logged, have no id, and count as ``dropped``. A process that is killed loses what is in the queue, usually the
    last milliseconds. With ``wait = true`` an answer waits until its records are stored, so none is lost that a client
    has seen; it may be in the log twice. A record that is too large for the topic is ``dropped`` in both cases.

    With a ``file`` the log has each answer exactly once: the records go there, and the flow of the service brings them
    into the log. An answer waits until its records are in the file, and is ``refused`` where they cannot be written.
    """

    def __init__(self, settings: PredictionSettings, clock: Clock, file: Topic | None = None) -> None:
        assert settings.log is not None
        self._file, self._topic = file, file or topic(settings.log)
        self._share, self._clock = settings.sample, clock
        self.is_exactly_once = file is not None
        self.waits = settings.wait or self.is_exactly_once
        """Whether an answer waits until it is :meth:`stored`."""
        self.limit: SizeLimit | None = None
        """With a file, the limit of the log: a larger record is refused. None while it is not known."""
        self.waiting: int | None = None
        """The records in the file that are not in the log yet, when they were counted last; None without a file."""
        # Replicas write to one topic.
        self._prefix = f"{uuid.uuid4().hex[:12]}-{os.getpid():x}"
        self._number = 0
        self._queue: deque[_Waiting] = deque()
        self._queued_bytes = 0
        self._added, self._stored = 0, 0
        self._refused = 0
        """All answers up to this record that still wait for it are refused."""
        self.trouble: str | None = None
        """Why predictions are refused; None if the file has taken the last ones."""
        self._has_records, self._has_stored = asyncio.Event(), asyncio.Condition()
        self._is_ending = False
        self.counts: Counter[str] = Counter(written=0, dropped=0, checked=0, mismatched=0)
        """The predictions that were ``written`` and ``dropped``; those that were ``checked``, which is computed again
        from their record, and the ``mismatched`` ones, which had another result then. With a file also those that were
        ``refused``."""
        if file is not None:
            self.counts["refused"] = 0

    # ---- in a request

    def add(self, versions: Sequence[ServedVersion], rows: Sequence[Any], predictions: Sequence[Any]) -> None:
        """Queue predictions, each by its version, and add their ``id``; those in error are not logged.

        With a file, raises ``RecordTooLarge`` or ``StorageFull`` where a record cannot wait for the log.
        """
        at_ms = self._clock.now_ms()
        for version, row, prediction in zip(versions, rows, predictions, strict=True):
            update = version.update
            self._number += 1
            key = f"{self._prefix}-{self._number}"
            if "error" in prediction or not self._is_sampled(key):
                continue
            document = {
                "id": key,
                "time": at_ms,
                "model": update.model,
                "generation": update.generation,
                "version": update.version,
                "prediction": prediction,
                "row": row,
            }
            value = orjson.dumps(document)
            if self.limit is not None and not self.limit.holds(value, key.encode(), ()):
                self.counts["refused"] += 1
                raise RecordTooLarge(f"the log takes records of {self.limit.size_bytes} bytes")
            if self._queued_bytes + len(value) > _QUEUE_BYTES_MAX:
                self.counts["dropped" if self._file is None else "refused"] += 1
                if self._file is not None:
                    raise StorageFull("too many predictions wait for the file")
                continue
            self._queue.append(_Waiting(at_ms, key.encode(), value, version))
            self._queued_bytes += len(value)
            self._added += 1
            prediction["id"] = key
        self._has_records.set()

    def _is_sampled(self, key: str) -> bool:
        return self._share >= 1.0 or hash_of(key.encode()) < self._share * 2.0**64

    async def stored(self) -> None:
        """Wait until all that was added so far is stored. With a file, raises ``TopicError`` if it was refused."""
        number = self._added
        async with self._has_stored:
            await self._has_stored.wait_for(lambda: self._stored >= number)
        if number <= self._refused:
            raise TopicError(self.trouble or "the file could not be written")

    # ---- writing

    @contextlib.asynccontextmanager
    async def writing(self) -> AsyncIterator[None]:
        """Write while the block runs, then what is left, for some seconds at most. Makes the file, if there is one."""
        if self._file is not None:
            await self._file.create(settings=_FILE_SETTINGS)
        async with asyncio.TaskGroup() as group:
            task = group.create_task(self._write_all(), name="prediction log")
            try:
                yield
            finally:
                self._is_ending = True
                self._has_records.set()
                await asyncio.wait([task], timeout=_DRAIN_S)
                if not task.done():
                    task.cancel()
                    self.counts["dropped"] += len(self._queue)
                    _log.warning("%d predictions are not in the log %s: it does not answer", len(self._queue), self.url)

    @property
    def url(self) -> str:
        """The URL of the topic, without its secrets."""
        return self._topic.url

    async def _write_all(self) -> None:
        writer: TopicWriter | None = None
        limit: SizeLimit | None = None
        failed = False
        while True:
            await self._has_records.wait()
            if not self._queue:
                if self._is_ending:
                    break
                self._has_records.clear()
                continue
            batch = list(islice(self._queue, _BATCH))
            try:
                if writer is None:
                    writer, limit = await self._topic.open_writer(), await self._topic.size_limit()
                outgoing = _outgoing(batch)
                too_large = {} if limit is None else limit.exceeded_by(outgoing)
                if too_large:
                    outgoing = _outgoing([each for place, each in enumerate(batch) if place not in too_large])
                    _log.warning("%d predictions are not in the log %s: they are too large", len(too_large), self.url)
                await writer.write(outgoing)
                await writer.flush()
            except StreamiterError as error:
                if not failed:
                    what = "wait for their log" if self._file is None else "are refused, since they are not on record"
                    _log.warning("predictions %s: %s", what, error)
                await _closed(writer)
                failed, writer = True, None
                if self._file is None:
                    await self._clock.sleep(_TRY_AGAIN_S)
                else:
                    await self._refuse_all(error)
                continue
            failed = False
            await self._note_stored(batch, len(too_large))
        await _closed(writer)

    async def _note_stored(self, batch: Sequence[_Waiting], too_large: int) -> None:
        for each in batch:
            self._queue.popleft()
            self._queued_bytes -= len(each.value)
        self._stored += len(batch)
        self.trouble = None
        self.counts["written"] += len(batch) - too_large
        self.counts["dropped"] += too_large
        self._check(batch[0])
        async with self._has_stored:
            self._has_stored.notify_all()

    async def _refuse_all(self, error: StreamiterError) -> None:
        """Let no answer wait for a file that cannot be written: the clients may ask again."""
        self.counts["refused"] += len(self._queue)
        self._stored = self._refused = self._added
        self.trouble = str(error)
        self._queue.clear()
        self._queued_bytes = 0
        async with self._has_stored:
            self._has_stored.notify_all()

    async def count_waiting(self) -> None:
        """Count the records in the file that are not in the log yet."""
        if self._file is not None:
            with contextlib.suppress(StreamiterError):
                self.waiting = (await self._file.describe()).records

    def _check(self, logged: _Waiting) -> None:
        """Compute one prediction again from its record, with the version that has served it."""
        document = orjson.loads(logged.value)
        self.counts["checked"] += 1
        try:
            is_same = are_same(numbers_again(logged.version.predict, document), served_numbers(document["prediction"]))
        except ModelError:
            is_same = False
        if not is_same:
            self.counts["mismatched"] += 1
            _log.warning("the prediction %s is another one when its record is predicted again", document["id"])


def _outgoing(batch: Sequence[_Waiting]) -> OutgoingBatch:
    times_ms, keys, values, _ = zip(*batch, strict=True) if batch else ((), (), (), ())
    return OutgoingBatch(list(values), keys=list(keys), timestamps_ms=list(times_ms))


async def _closed(writer: TopicWriter | None) -> None:
    if writer is not None:
        with contextlib.suppress(StreamiterError):
            await writer.close()


def document_of(value: bytes | None) -> dict[str, Any]:
    """Return the document of a record; raise ``JSONDecodeError``, ``KeyError`` or ``TypeError`` for another record."""
    document: dict[str, Any] = orjson.loads(value or b"")
    if not {"id", "time", "model", "generation", "version", "prediction", "row"} <= document.keys():
        raise KeyError(f"it has {sorted(document)}")
    return document


def numbers_again(predict: Callable[[Any], Any], document: dict[str, Any]) -> list[float]:
    """Return the prediction for the row of a record; raise ``ModelError`` for a row that the model refuses."""
    row = document["row"]
    # A row of numbers is predicted as a matrix, as it was in its request.
    found = predict(row) if isinstance(row, dict) else predict([row])[0]
    values = found.tolist() if isinstance(found, (np.ndarray, np.generic)) else found
    return values if isinstance(values, list) else [values]


def served_numbers(prediction: dict[str, Any]) -> list[float]:
    """Return the probability, the value or the probabilities of a prediction as it was answered.

    >>> served_numbers({"probabilities": {"red": 0.75, "green": 0.125}, "unseen": 0.125, "id": "a-1"})
    [0.75, 0.125, 0.125]
    """
    if "probabilities" in prediction:
        return [*prediction["probabilities"].values(), *([prediction["unseen"]] if "unseen" in prediction else [])]
    return [prediction["probability"] if "probability" in prediction else prediction["value"]]


def are_same(numbers: Sequence[float], others: Sequence[float]) -> bool:
    """Whether two predictions are equal, but for their last bits."""
    return len(numbers) == len(others) and all(
        math.isclose(one, other, rel_tol=_SAME, abs_tol=_SAME) for one, other in zip(numbers, others, strict=True)
    )


class RecordsOfFile:
    """The codec between the file of predictions and their log: records keep value, key and time.

    >>> codec = RecordsOfFile()
    >>> codec.encode(codec.decode(TopicBatch(values=[b"{}"], keys=[b"a-1"], timestamps_ms=[7000]))).keys
    (b'a-1',)
    """

    brings_events = False

    def decode(self, batch: TopicBatch) -> list[tuple[bytes | None, bytes | None, int]]:
        """Return the value, the key and the time of each record."""
        return list(zip(batch.values, batch.keys, batch.timestamps_ms, strict=True))

    def encode(self, batch: Any) -> OutgoingBatch:
        """Return such records as a topic takes them."""
        values, keys, times_ms = zip(*batch, strict=True)
        return OutgoingBatch(values, keys=keys, timestamps_ms=times_ms)


class LoggedPredictions:
    """The decoder ``predictions``: the row of each record of a log, with ``prediction_id`` and ``predicted_at``.

    A service whose input is the log, with ``key = "prediction_id"`` and ``time = "predicted_at"`` in its label, learns
    from the rows as they were served.

    >>> value = (
    ...     b'{"id": "a-1", "time": 7000, "model": "late", "generation": 1, "version": 3, '
    ...     b'"prediction": {"value": 0.5}, "row": {"km": 3}}'
    ... )
    >>> list(LoggedPredictions().decode(TopicBatch(partition=0, values=[value])))
    [{'km': 3, 'prediction_id': 'a-1', 'predicted_at': 7000}]
    """

    def decode(self, batch: TopicBatch) -> list[dict[str, Any]]:
        """Return the rows; other records, and rows with the names of the added fields, are a ``DecodeError``."""
        rows, failures = [], {}
        for number, value in enumerate(batch.values):
            try:
                document = document_of(value)
                row, added = {**document["row"]}, {_ID_FIELD: document["id"], _TIME_FIELD: document["time"]}
            except (orjson.JSONDecodeError, KeyError, TypeError, AttributeError) as error:
                failures[number] = f"expected a record of a log of predictions, given {value!r:.80}: {error!r}"
                continue
            if taken := [name for name in added if name in row]:
                failures[number] = f"expected a row without the field {taken[0]!r}, which the decoder adds; rename it"
            rows.append(row | added)
        if failures:
            raise DecodeError(failures)
        return rows
