"""Bugs of consistency models, each a small change to a real model; the comparison must find each of them."""

from __future__ import annotations

import inspect
import sys
import textwrap
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest

from streamiter.parameter_server import consistency
from streamiter.parameter_server.consistency import (
    ASP,
    BSP,
    SSP,
    Consistency,
    ConsistencyModel,
    PendingAdds,
    ProgressTracker,
)
from streamiter.parameter_server.matrix_shard import MatrixShard


class Bug(NamedTuple):
    """A change in the code of a method or function, under a consistency that it breaks."""

    name: str
    consistency: Consistency
    method: Callable[..., Any]
    right: str
    wrong: str

    def plant(self, patch: pytest.MonkeyPatch) -> None:
        """Replace the method by one with this bug."""
        source = textwrap.dedent(inspect.getsource(self.method))
        assert source.count(self.right) == 1, f"{self.name}: the code has changed"
        module, made = sys.modules[self.method.__module__], dict[str, Any]()
        exec(source.replace(self.right, self.wrong), vars(module), made)
        owner, _, name = self.method.__qualname__.rpartition(".")
        patch.setattr(getattr(module, owner) if owner else module, name, made[name])


MODEL, TRACKER = ConsistencyModel, ProgressTracker

MINIMUM = "self.tracker.get_min_clock()"
OBSERVED = f"max({MINIMUM}, observed)"
LEAVES = "self._released(before, self.tracker.leave(worker))"
JOINS = "self._progress[worker] = "
SORTED, AHEAD = "by_worker.items()", "max(self._progress.values(), default=self._min_clock)"
RAISED, RELEASED = "self.tracker.raise_to(worker, clock))", "self._release(released)"
STATE, OF_ADDS = "self._declared_state()", "{'by clock'} & set(self._declared_state())"
STALENESS = "self._staleness"
BEFORE = "before = self.tracker.get_min_clock()"
CLOCKS = "self._released(before, self.tracker.advance_and_get_changed_min_clock(worker))"
TURN_TO_CLOCK = 'self._check_turn(worker, observed, "a clock", ahead=0)'

PLANTED = (
    Bug("gets wait at the bound of staleness", SSP(1), MODEL.get, STALENESS, f"{STALENESS} + 1"),
    Bug("gets go one past the bound of staleness", SSP(1), MODEL.get, STALENESS, f"{STALENESS} - 1"),
    Bug("gets are parked under the worker's own clock", SSP(1), MODEL.get, "] = wanted", "] = wanted + 1"),
    Bug("a clock of another shard ends the wait here", SSP(0), MODEL.get, MINIMUM, OBSERVED),
    Bug(
        "gets are answered before the adds",
        BSP(),
        MODEL._released,
        "Released(clock, self._adds.take(clock - 1), self._take_gets(clock))\n"
        "        for clock in range(before + 1, moved_to + 1)",
        "Released(clock, *parts)\n"
        "        for clock in range(before + 1, moved_to + 1)\n"
        "        for parts in (([], self._take_gets(clock)), (self._adds.take(clock - 1), []))",
    ),
    Bug("a worker that leaves releases no get", BSP(), MODEL.leave, LEAVES, f"{LEAVES}[:0]"),
    Bug("a worker that leaves releases no get", SSP(0), MODEL.leave, LEAVES, f"{LEAVES}[:0]"),
    Bug("a worker that leaves releases its last clock only", SSP(2), MODEL.leave, LEAVES, f"{LEAVES}[-1:]"),
    Bug(
        "a worker that leaves takes its adds with it",
        BSP(),
        MODEL.leave,
        f"return {LEAVES}",
        f"[adds.pop(worker, None) for adds in self._adds._by_clock.values()]\n    return {LEAVES}",
    ),
    Bug("a worker that leaves holds the others back", ASP(), TRACKER.leave, "self._uncount_at(", "("),
    Bug("gets are answered last come first", BSP(), MODEL._take_gets, "return taken", "return taken[::-1]"),
    Bug("gets are answered last come first", SSP(0), MODEL._take_gets, "return taken", "return taken[::-1]"),
    Bug("adds are applied in order of arrival", BSP(), consistency._in_order, f"sorted({SORTED})", SORTED),
    Bug("workers join at the start", ASP(), TRACKER.join, f"{JOINS}clock", f"{JOINS}self._min_clock = clock = 0"),
    Bug("workers join ahead of the minimum", SSP(3), TRACKER.join, "self._min_clock if at is None else at", AHEAD),
    Bug("a raised worker releases no get", BSP(), MODEL.raise_worker, RAISED, f"{RAISED}[:0]"),
    Bug(
        "a call out of turn is dropped in silence",
        BSP(),
        MODEL.add,
        'self._check_turn(worker, observed, "an add", ahead=0)',
        f"self.tracker.get_progress(worker)\n    if clock > {OBSERVED}: return False",
    ),
    Bug(
        "a clock counts even if it is refused",
        BSP(),
        MODEL.clock,
        f"{TURN_TO_CLOCK}\n    {BEFORE}\n    return {CLOCKS}",
        f"{BEFORE}\n        moves = {CLOCKS}\n        {TURN_TO_CLOCK.replace('0', '1')}\n        return moves",
    ),
    Bug("a clock of another shard is ignored", BSP(), MODEL._check_turn, OBSERVED, MINIMUM),
    Bug("early adds go with the next release", BSP(), MODEL.add, "keep(clock", f"keep({MINIMUM}"),
    Bug("early gets are answered at once", BSP(), MODEL.get, MINIMUM, OBSERVED),
    Bug("gets are never forgotten", SSP(1), MODEL.forget, "self._gets.pop(id(request), None)", "pass"),
    Bug("a reset loses the gets", SSP(0), MODEL.reset, "self._adds.clear(), waiting", "self._adds.clear(), []"),
    Bug("a snapshot has no pending adds", BSP(), PendingAdds.state, STATE, f"{STATE} | dict.fromkeys({OF_ADDS}, ())"),
    Bug(
        "every clock of a slowest worker moves the minimum",
        ASP(),
        TRACKER.advance_and_get_changed_min_clock,
        "return self._moved_min_clock()",
        "if clock > self._min_clock:\n        return -1\n    self._min_clock += 1\n    return self._min_clock",
    ),
    Bug("any worker may add", ASP(), TRACKER.check_worker_valid, "worker not in self._progress", "False"),
    Bug("any worker may add", SSP(0), TRACKER.check_worker_valid, "worker not in self._progress", "False"),
)

PLANTED_IN_THE_SHARD = (
    Bug(
        "the shard answers before it adds",
        BSP(),
        MatrixShard._release,
        "move in released",
        "move in [of for move in released for of in (replace(move, adds=[]), replace(move, gets=[]))]",
    ),
    Bug("the shard forgets to finish the iteration", ASP(), MatrixShard._release, "self._finish_iteration()", "pass"),
    Bug("the shard releases no get at a leave", BSP(), MatrixShard._remove_worker, RELEASED, "pass"),
    Bug("the shard releases no get at a leave", SSP(0), MatrixShard._remove_worker, RELEASED, "pass"),
    Bug("the gets of a worker that has left hang", SSP(0), MatrixShard.leave, "self.fail_gets(worker, error)", "pass"),
    Bug("gets hang across a reset", BSP(), MatrixShard.fail_waiting, "one.fail(error)", "pass"),
    Bug(
        "the shard ignores calls out of turn",
        BSP(),
        MatrixShard.add,
        "self._buffer(request)",
        "with contextlib.suppress(OutOfTurn):\n            self._buffer(request)",
    ),
    Bug(
        "buffered adds are applied at once",
        BSP(),
        MatrixShard.add,
        "self._buffer(request)",
        "self._check_worker(request.worker) or self._apply_parts(request.parts)",
    ),
)
