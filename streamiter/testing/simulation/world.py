"""What survives the crashes of a simulated job: topics, the store, time, and what is known of the outputs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from streamiter.checkpoints.memory_store import MemoryStore
from streamiter.testing.simulation.faults import Levels
from streamiter.testing.simulation.inputs import Input
from streamiter.testing.simulation.network import Network
from streamiter.testing.simulation.outputs import Committed, OutputRules
from streamiter.testing.simulation.seeds import generator
from streamiter.testing.simulation.simulated_time import SimulatedTime
from streamiter.testing.simulation.trace import Trace
from streamiter.topics.memory import MemoryBroker
from streamiter.topics.topic import TopicRecord

__all__ = ["Check", "Outputs", "World"]

Outputs = Mapping[str, Sequence[TopicRecord]]
"""Committed records by the name of their topic."""

Check = Callable[[Outputs], object]
"""Looks at what is committed, after every commit; raises AssertionError if that can be no part of a right result."""


class World:
    """One for each simulated run, however often its job begins again.

    ``expected`` is what an undisturbed run has committed, None in that run itself.
    """

    def __init__(self, seed: int, levels: Levels, *, expected: Outputs | None, check: Check | None) -> None:
        self.seed = seed
        self.time = SimulatedTime()
        self.trace = Trace()
        self.random = generator(seed, "world")
        self.network = Network(self.time, self.trace, generator(seed, "network"), levels)
        self._ids = generator(seed, "ids")
        self.broker = MemoryBroker(clock=self.time)
        self.store = MemoryStore()
        self.inputs: dict[str, Input] = {}
        self.outputs: dict[str, OutputRules] = {}
        self.committed = Committed(self.broker)
        self.violation: str | None = None
        """The first thing that was found to be wrong."""
        self._expected = expected
        self._check = check

    @property
    def is_fed(self) -> bool:
        """Whether all records of all inputs are in their topics."""
        return all(given.is_fed for given in self.inputs.values())

    def new_id(self) -> str:
        """A name for a run, each time another one."""
        return f"{self._ids.getrandbits(128):032x}"

    def feed(self, given: Input) -> None:
        """Let the records of an input come in."""
        self.inputs[given.name] = given
        # Undisturbed it is the same under every seed, so that one such run can serve many.
        is_undisturbed = self._expected is None
        chosen = None if is_undisturbed else generator(self.seed, f"arrivals of {given.name}")
        given.start(self.broker, self.time, chosen)

    def look(self, *, is_complete: bool = False) -> None:
        """Compare what is committed with what is expected; ``is_complete`` says that nothing more is to come."""
        if self.violation is not None:
            return
        seen = {name: self.committed.read(name) for name in self.outputs}
        for name, rules in self.outputs.items():
            if self._expected is not None:
                wrong = rules.what_is_wrong(seen[name], self._expected[name], is_complete=is_complete)
                self.found(wrong)
        if self._check is not None:
            try:
                self._check(seen)
            except AssertionError as error:
                self.found(f"the check of committed outputs fails: {error}")

    def found(self, wrong: str | None) -> None:
        """Remember the first thing that is wrong."""
        if wrong is not None and self.violation is None:
            self.violation = wrong
