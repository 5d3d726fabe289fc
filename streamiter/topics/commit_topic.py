"""The topic of the commit records, beside the outputs they are committed with."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Final

from streamiter.errors import TopicDenied, TopicNotFound
from streamiter.topics.topic import Topic, TopicDescription

__all__ = ["COMMIT_TOPIC", "ensure_commit_topic"]

COMMIT_TOPIC: Final = "streamiter-commits"
"""One for all flows that write to a server or file; a record's key is its flow."""

_log = logging.getLogger("streamiter.topics")


async def ensure_commit_topic(beside: Topic) -> Topic:
    """The topic of the commit records in the commit domain of ``beside``, created where it is missing.

    It has one partition, so that the last record of it is the last commit, and keeps the last record of
    each key. Several may create it at once. One that was created otherwise is used as it is.

    Raises :class:`~streamiter.errors.TopicDenied`, which says how to create it, where that is not allowed.

    >>> import asyncio
    >>> from streamiter.topics import MemoryBroker
    >>> asyncio.run(ensure_commit_topic(MemoryBroker().topic("outputs")))
    MemoryTopic('streamiter-commits')
    """
    commits = beside.beside(COMMIT_TOPIC)
    settings = {**commits.compaction_settings, **commits.eager_compaction_settings}
    try:
        description = await _described_or_created(commits, settings)
    except TopicDenied as denied:
        raise TopicDenied(
            f"topic {COMMIT_TOPIC!r}, in which flows that write to {beside.url} keep their commits: {denied}. "
            f"Have it created with 1 partition and {_listed(settings)}, and allow this user to describe, read "
            "and write it"
        ) from denied
    _warn_of_deletion(commits, description)
    return commits


async def _described_or_created(commits: Topic, settings: Mapping[str, str]) -> TopicDescription:
    # Created first: it changes nothing where the topic is, and a missing one is waited for when it is asked about.
    try:
        await commits.create(partitions=1, settings=settings)
    except TopicDenied as denied:
        try:
            return await commits.describe()
        except TopicNotFound:
            raise denied from None
    return await commits.describe()


def _warn_of_deletion(commits: Topic, description: TopicDescription) -> None:
    for name, value in commits.compaction_settings.items():
        given = description.settings.get(name, value if not description.settings else None)
        if given != value:
            _log.warning(
                "topic %r: expected %s=%s, found %s; a commit record that is deleted makes its flow refuse to "
                "go on from its checkpoints, and records that are never dropped fill the disk. Change the "
                "topic's settings, or delete it while no flow runs that is to go on",
                commits.url,
                name,
                value,
                given,
            )


def _listed(settings: Mapping[str, str]) -> str:
    return ", ".join(f"{name}={value}" for name, value in settings.items()) or "no settings"
