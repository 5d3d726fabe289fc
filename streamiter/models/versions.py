"""Versions of published models: list and find them, roll back to one, keep one as a file.

The command ``streamiter models`` and the service call these functions. They read the topic of the updates, and
:func:`roll_back` writes to it. The module ``differences`` compares versions.
"""

from __future__ import annotations

import logging
import os
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal, TypeVar

from streamiter.errors import ModelError
from streamiter.models.documents import (
    JSON_CONTENT_TYPE,
    SAFETENSORS_CONTENT_TYPE,
    Document,
    decode_document,
    encode_document,
)
from streamiter.models.intake import Wanted, update_of_document
from streamiter.models.publisher import ModelUpdateEncoder, next_run
from streamiter.models.reader import ModelUpdates, last_update, model_updates
from streamiter.models.update import (
    NO_RANK,
    ModelSnapshot,
    ModelUpdate,
    Rank,
    UpdateHeaders,
    check_model_name,
    rank_in,
    shown_rank,
)
from streamiter.topics.connecting import last_records, record_limit
from streamiter.topics.topic import ReadRequest, Topic
from streamiter.values.helpers.clock import Clock, SystemClock
from streamiter.values.helpers.closing import closed_after
from streamiter.values.numbers import whole_number_in

Kept = TypeVar("Kept")

# Search this many times further back if the last records have too few updates: the others are of other models, or
# updates consist of many chunks.
_FURTHER: Final = 8

# The number of last records that are searched for names of models.
_LOOKED_AT: Final = 1000

# A search for a version begins with this many records: updates of the last minutes.
_FIRST_WINDOW: Final = 256


class NoSuchVersion(ModelError):
    """The topic has no such version of the model, or no longer."""


@dataclass(frozen=True, slots=True)
class ModelVersion:
    """A published version, without its parameters."""

    model: str
    """The name of the model."""
    generation: int
    """The number of the run or rollback that the version follows."""
    version: int
    """The number within its generation."""
    created_at_ms: int
    """The publisher's clock, in milliseconds since 1970-01-01 UTC."""
    epoch: int | None
    """The epoch of the model, if the publisher named one."""
    records: int | None
    """The number of examples learned from, if the publisher named it."""
    metrics: dict[str, float]
    """Numbers by name, such as the loss."""
    rollback_to: str | None
    """The version that this one publishes again, such as ``"2.17"``; None if it is no rollback."""

    @staticmethod
    def of(update: ModelUpdate) -> ModelVersion:
        """Return the version of an update."""
        return ModelVersion(
            update.model,
            update.generation,
            update.version,
            update.created_at_ms,
            update.epoch,
            update.records,
            update.metrics,
            None if update.rollback_to is None else shown_rank(update.rollback_to),
        )

    @property
    def name(self) -> str:
        """Generation and version as commands take them, such as ``"2.17"``."""
        return shown_rank((self.generation, self.version))


_log = logging.getLogger("streamiter.models")


# ---- finding versions


async def model_names(topic: Topic) -> list[str]:
    """Return the names of the models in the last 1,000 records of each partition, sorted."""
    start = last_records((await topic.describe()).offsets, _LOOKED_AT)
    reader = await topic.open_reader(ReadRequest(start=start, stop="latest"))
    names: set[str] = set()
    async with closed_after(reader.close):
        while (batch := await reader.read()) is not None:
            headers = [value or b"" for fields in batch.headers for name, value in fields if name == "model"]
            names.update(value.decode(errors="backslashreplace") for value in headers)
    return sorted(names)


async def model_versions(topic: Topic, model: str, count: int = 100) -> list[ModelVersion]:
    """Return the last ``count`` versions of a model, the newest last; none if the topic has no update of it.

    Where a topic is compacted, or its retention is over, older versions are gone.
    """
    found, _ = await last_updates(topic, model, count, ModelVersion.of)
    return found


async def last_updates(
    topic: Topic,
    model: str,
    count: int,
    keep: Callable[[ModelUpdate], Kept],
    *,
    wanted: Wanted | None = None,
    first_window: int | None = None,
) -> tuple[list[Kept], dict[int, int]]:
    """Return what ``keep`` returns for each of the last ``count`` wanted updates, and offsets shortly before them.

    The search begins with the last ``first_window`` records of each partition.
    """
    check_model_name(model)
    ends = (await topic.describe()).offsets
    back = first_window or count
    while True:
        start = last_records(ends, back)
        updates = ModelUpdates(topic, model, start, False, "skip", SystemClock(), wanted)
        found = deque([keep(update) async for update in updates], count)
        if len(found) == count or all(offset == ends[partition][0] for partition, offset in start.items()):
            return list(found), start
        back *= _FURTHER


async def find_update(topic: Topic, model: str, version: str | None = None) -> ModelUpdate:
    """Return an update of a model: ``"2.17"``, the last of generation ``"2"``, or None for the newest.

    It reads back from the end of the topic, so an old version of a long topic takes longer. Raises
    :class:`NoSuchVersion` for a version that the topic does not have, or no longer, and for a text that is none.
    """
    if version is None:
        update = await last_update(topic, model, on_error="skip")
        if update is None:
            raise await _no_updates(topic, model)
        return update
    generation, number = _parsed(version)
    seen = _Seen(generation, number)
    found, _ = await last_updates(
        topic, model, 1, lambda update: update, wanted=seen.is_wanted, first_window=_FIRST_WINDOW
    )
    if found and seen.is_it(found[0].rank):
        return found[0]
    if seen.first is None:
        raise await _no_updates(topic, model)
    raise NoSuchVersion(
        f"{topic.url}: expected version {version} of model {model!r}, given those from {shown_rank(seen.first)} to "
        f"{shown_rank(seen.last)}; older ones are dropped by the topic's retention or compaction"
    )


class _Seen:
    """Wants the updates of a generation, or one of them; knows the first and last rank of all updates.

    If that one is a change, its base is needed, too. It comes before it.
    """

    def __init__(self, generation: int, version: int | None) -> None:
        self._generation, self._version = generation, version
        self.first: Rank | None = None
        self.last = NO_RANK

    def is_wanted(self, headers: UpdateHeaders) -> bool:
        """Whether the update is the wanted update, or one of the wanted generation."""
        self.first, self.last = min(self.first or headers.rank, headers.rank), max(self.last, headers.rank)
        begins_chain = headers.chain is not None and headers.link is None
        may_be_base = begins_chain and headers.generation == self._generation and headers.version < (self._version or 0)
        return may_be_base or self.is_it(headers.rank)

    def is_it(self, rank: Rank) -> bool:
        """Whether it is the rank of a wanted update."""
        return rank[0] == self._generation and self._version in (None, rank[1])


def _parsed(version: str) -> tuple[int, int | None]:
    if (rank := rank_in(version)) is not None:
        return rank
    if (generation := whole_number_in(version)) is None:
        raise NoSuchVersion(f"expected a version such as 2.17, or a generation such as 2, given {version!r}")
    return generation, None


async def _no_updates(topic: Topic, model: str) -> NoSuchVersion:
    names = await model_names(topic)
    given = f"only of {', '.join(names)}" if names else "none of any model"
    return NoSuchVersion(f"{topic.url}: expected updates of model {model!r}, given {given}")


# ---- rolling back

# Another writer may begin a generation between the search for the last one and the write, but not again and again.
_ATTEMPTS: Final = 5

# A trainer with checkpoints ends its transaction once a second.
_LOG_AFTER_S: Final = 5.0

_WAITING: Final = (
    "%s: the rollback of model %r is written, and consumers can read it when the open transaction in front of it ends: "
    "at the next checkpoint of the trainer, or if the trainer is dead, when it is started again or its transaction "
    "times out"
)


async def roll_back(topic: Topic, model: str, version: str, *, clock: Clock | None = None) -> ModelUpdate:
    """Publish an earlier version again, as a new version that is later than all others; return the new update.

    ``version`` is as for :func:`find_update`. The update begins a new generation, so consumers take it over although
    the trainer still publishes versions of the earlier one, and a trainer that follows rollbacks resumes from it. Its
    last record closes it, so consumers get all of it or nothing. If another writer begins the same generation at the
    same time, the rollback is written again with a later one. It returns when consumers can read the update; records of
    an open transaction in front of it delay that until the transaction ends.

    >>> import asyncio, numpy as np
    >>> from streamiter.topics.memory import MemoryBroker
    >>> async def main():
    ...     topic = MemoryBroker().topic("models")
    ...     await topic.create()
    ...     encoder, writer = ModelUpdateEncoder("ctr", 1, clock=SystemClock()), await topic.open_writer()
    ...     await writer.write(encoder.encode([np.array([0.5]), np.array([1e9])]))
    ...     update = await roll_back(topic, "ctr", "1.1")
    ...     print(update.rank, update.rollback_to, update.parameters)
    >>> asyncio.run(main())
    (2, 1) (1, 1) [0.5]
    """
    update = await find_update(topic, model, version)
    return await publish_again(topic, update, update.rank, clock or SystemClock())


async def publish_again(topic: Topic, update: ModelUpdate, rollback_to: Rank | None, clock: Clock) -> ModelUpdate:
    """Publish an update as the newest version of its model; ``rollback_to`` is its earlier rank, if it has one."""
    for _ in range(_ATTEMPTS):
        if (written := await _publish_again(topic, update, rollback_to, clock)) is not None:
            return written
    raise ModelError(
        f"{topic.url}: expected to be the only one that begins generations of model {update.model!r}, given another "
        f"writer in each of {_ATTEMPTS} attempts; stop the trainers that restart all the time, then try again"
    )


async def _publish_again(
    topic: Topic, update: ModelUpdate, rollback_to: Rank | None, clock: Clock
) -> ModelUpdate | None:
    """Write the update with the next generation; None if consumers have taken another update of that rank."""
    run = await next_run(topic, update.model)
    limit = record_limit(await topic.describe())
    encoder = ModelUpdateEncoder(
        update.model, run.generation, clock=clock, record_bytes_max=limit, leftovers=run.leftovers
    )
    model = ModelSnapshot(update.parameters, update.records, update.metrics, update.epoch)
    records = encoder.encode([model], rollback_to=rollback_to, replaces=True)
    assert records.headers is not None
    own = UpdateHeaders.parse(records.headers[0])
    async with model_updates(topic, update.model, start="latest_model", on_error="skip", clock=clock) as updates:
        writer = await topic.open_writer()
        async with closed_after(writer.close):
            await writer.write(records)
            await writer.flush()
        timer = clock.call_later(_LOG_AFTER_S, lambda: _log.warning(_WAITING, topic.url, update.model))
        async with closed_after(timer.cancel):
            async for written in updates:
                if written.rank >= own.rank:
                    names = ("rank", "rollback_to", "since_rollback", "created_at_ms")
                    is_this = all(getattr(written, name) == getattr(own, name) for name in names)
                    return written if is_this else None
    return None


# ---- files


def exported(update: ModelUpdate, form: Literal["json", "safetensors"]) -> bytes:
    """Return an update as the content of a file, for :func:`read_model` and for programs in other languages.

    It is the value that a record has, in JSON or as safetensors, and the time of creation.

    >>> import numpy as np
    >>> exported(ModelUpdate("ctr", 2, 17, None, 1700000000000, 900, {}, np.array([0.5])), "json").decode()[:60]
    '{"model":"ctr","generation":2,"version":17,"epoch":null,"rec'
    """
    same = {name: getattr(update, name) for name in Document.__struct_fields__ if hasattr(update, name)}
    return encode_document(Document(**same, created_at=update.created_at_ms), form)[1]


def read_model(path: str | os.PathLike[str]) -> ModelUpdate:
    """Return the update in a file of ``streamiter models export``: ``LinearPredictor(read_model(path).parameters)``.

    Raises ModelError for a file that has none, and ``OSError`` for one that cannot be read.
    """
    value = Path(path).read_bytes()
    try:
        document = decode_document(JSON_CONTENT_TYPE if value[:1] == b"{" else SAFETENSORS_CONTENT_TYPE, value)
        return update_of_document(document, document.created_at or 0)
    except (ValueError, ModelError) as error:
        raise ModelError(f"{os.fspath(path)}: expected a model of `streamiter models export`: {error}") from error
