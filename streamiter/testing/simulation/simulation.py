"""What a flow is built from when it is simulated."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from streamiter.errors import ConfigurationError
from streamiter.numbers import whole_number
from streamiter.testing.simulation.at_once import at_once
from streamiter.testing.simulation.inputs import Input, KeyOf
from streamiter.testing.simulation.outputs import Compare, Delivery, Order, OutputRules, key_and_value
from streamiter.testing.simulation.seeds import generator
from streamiter.testing.simulation.topic import Cluster, SimulatedTopic
from streamiter.testing.simulation.world import World
from streamiter.topics.topic import Topic

__all__ = ["Simulation"]


class Simulation:
    """Given to the function that builds the flow: its topics come from here.

    The function is called again for every restart; it must build a flow that can go on from the last one's state.
    """

    def __init__(self, world: World, cluster: Cluster, run: int = 1) -> None:
        self.seed = world.seed
        self.run = run
        """Which start this is, counted from 1: for what an update of the flow may change, such as a parallelism."""
        self.random = generator(world.seed, "flow")
        """For what should differ from seed to seed, such as the inputs; begins anew with each restart."""
        self._world = world
        self._cluster = cluster
        self._given: dict[str, None] = {}

    def input(
        self,
        name: str,
        records: Iterable[Any],
        *,
        partitions: int = 1,
        key: KeyOf | None = None,
        over_s: float = 0.0,
    ) -> Topic:
        """A topic to read from. ``records`` are bytes, or what JSON can hold.

        They are all there at the start, or come in one by one within the first ``over_s`` seconds. Without ``key``
        record i goes to partition i mod ``partitions``.
        """
        self._take_name(name)
        whole_number("Simulation.input: partitions", partitions, 1)
        if name not in self._world.inputs:
            self._world.feed(Input(name, records, partitions=partitions, key=key, over_s=over_s))
        return SimulatedTopic(self._cluster, name)

    def output(
        self,
        name: str,
        *,
        partitions: int = 1,
        order: Order = "partition",
        delivery: Delivery = "exactly_once",
        compare: Compare = key_and_value,
    ) -> Topic:
        """A topic to write to, whose records must be those of an undisturbed run.

        ``order``: each ``"partition"`` has the same records in the same order; or each ``"key"`` has; or they are
        the same in ``"any"`` order, as where streams of several subtasks meet. ``compare`` gives what of a
        :class:`~streamiter.topics.TopicRecord` is to be the same, its key and value unless given.
        ``delivery="at_least_once"`` lets records come more than once, for sinks that write at once.
        """
        self._take_name(name)
        self._create(name, partitions)
        self._world.outputs[name] = OutputRules(name, order, delivery, compare)
        return SimulatedTopic(self._cluster, name)

    def topic(self, name: str, *, partitions: int = 1) -> Topic:
        """A topic that is neither fed nor compared, such as one that feedback goes through."""
        self._take_name(name)
        self._create(name, partitions)
        return SimulatedTopic(self._cluster, name)

    def _create(self, name: str, partitions: int) -> None:
        whole_number("Simulation: partitions", partitions, 1)
        at_once(self._world.broker.topic(name).create(partitions=partitions))

    def _take_name(self, name: str) -> None:
        if name in self._given:
            raise ConfigurationError(
                f"simulation: expected a name of its own for each topic, given {name!r} twice; use the topic twice "
                "where the flow reads it twice"
            )
        self._given[name] = None
