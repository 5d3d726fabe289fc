"""What a topic of model updates knows by now: the last update, and where a new run begins."""

from __future__ import annotations

from dataclasses import dataclass

from streamiter.clock import Clock, SystemClock
from streamiter.models.encoder import ChunkSet
from streamiter.models.headers import check_model_name
from streamiter.models.policy import OnError, checked_policy
from streamiter.models.tail import TailSearch
from streamiter.models.update import ModelUpdate, Rank
from streamiter.topics.topic import Topic

__all__ = ["RunStart", "last_update", "next_generation", "next_run"]


async def last_update(
    topic: Topic, model: str, *, on_error: OnError = "fail", clock: Clock | None = None
) -> ModelUpdate | None:
    """The last complete update of ``model``, or None if the topic has none.

    Reads back from the topic's end, so the time it takes does not depend on the length of its history,
    unless the model has not been published for long among others. Where a record *after* that update
    claims to be one and cannot be read, it raises :class:`~streamiter.errors.DecodeError` with topic,
    partition and offset; with ``on_error="skip"`` such records do not count.
    """
    check_model_name(model)
    policy = checked_policy(on_error, topic, model)
    tail = await TailSearch(topic, model, clock or SystemClock()).run()
    if tail.error is not None and policy == "fail":
        raise tail.error
    return tail.update


@dataclass(frozen=True, slots=True)
class RunStart:
    """What a run that restores nothing gives its :class:`~streamiter.models.ModelUpdateEncoder`.

    One that is restored goes on from its state, unless the topic has a higher rank than that:
    ``last_rank``, the highest generation and version in it (zeros in an empty topic).
    """

    generation: int
    leftovers: list[ChunkSet]
    last_rank: Rank = (0, 0)


async def next_run(topic: Topic, model: str) -> RunStart:
    """The generation after the topic's last one (1 in an empty topic), and the chunks to delete.

    Found from the topic's end as in :func:`last_update`; updates that are incomplete or unreadable count
    too. A topic that is not there is an error: :class:`~streamiter.errors.TopicNotFound`.
    """
    check_model_name(model)
    tail = await TailSearch(topic, model, SystemClock()).run()
    return RunStart(tail.rank[0] + 1, tail.leftovers, tail.rank)


async def next_generation(topic: Topic, model: str) -> int:
    """The generation of :func:`next_run`."""
    return (await next_run(topic, model)).generation
