"""One task that follows a model and hands on each newer update, through outages of its topic."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Final

from streamiter.clock import Clock
from streamiter.errors import OffsetOutOfRange, TopicNotFound, TopicUnavailable
from streamiter.models.intake import UpdateStatistics
from streamiter.models.reader import ModelUpdates, model_updates
from streamiter.models.update import ModelUpdate, Rank
from streamiter.topics.topic import Topic

__all__ = ["Follower"]

# A server that comes back is found within this time; one that stays away is asked once a second.
_RETRY_S: Final = 1.0


class Follower:
    """Begins with the newest update of ``model``; ``on_update`` is called with each that is newer still.

    ``on_end`` is called once if following ends by an error. A topic that does not answer for a while is
    tried again, and so is one whose retention has overtaken the follower: then it goes on with the newest.
    A topic that was deleted, and created again or not, ends following.
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
