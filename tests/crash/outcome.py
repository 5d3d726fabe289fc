"""Read the committed records at the end, and check them."""

from typing import NamedTuple

from topics.topic_case import content

from streamiter.models import model_updates
from streamiter.topics import Topic

__all__ = ["Update", "check_counted_once", "updates_in"]

# The headers of an update that contain times.
_TIMES = ("created_at",)


class Update(NamedTuple):
    """All fields of a record except its times."""

    key: bytes | None
    value: bytes | None
    headers: tuple[tuple[str, bytes], ...]


async def updates_in(topic: Topic) -> list[Update]:
    """Return all records of a topic of updates."""
    return [
        Update(record.key, record.value, tuple(each for each in record.headers if each[0] not in _TIMES))
        for record in await content(topic)
    ]


async def check_counted_once(topic: Topic, model: str, events: int) -> None:
    """Check that the versions are those of one run without a kill, and that each event is counted once."""
    updates = [update async for update in model_updates(topic, model, follow=False)]
    assert [update.rank for update in updates] == [(1, version) for version in range(1, len(updates) + 1)]
    assert updates[-1].records == events
    counts = [update.records or 0 for update in updates]
    assert counts == sorted(set(counts))
