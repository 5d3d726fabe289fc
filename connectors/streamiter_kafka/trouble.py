"""Failures that may pass, and for how long they are borne."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable
from typing import Final, TypeVar

from streamiter.clock import Clock, SystemClock
from streamiter.errors import StreamiterError, TopicDenied, TopicError, TopicNotFound, TopicUnavailable
from streamiter_kafka.codes import PASSING, Code, code_name

__all__ = [
    "BrokerTrouble",
    "Patience",
    "TopicMissing",
    "check",
    "failure_of",
    "log",
    "passing",
    "persist",
    "persist_within",
]

T = TypeVar("T")

log = logging.getLogger("streamiter.kafka")

# The first repetition should be quick (a leader that has just moved), later ones should not be a flood.
_FIRST_BACKOFF_S: Final = 0.05
_LONGEST_BACKOFF_S: Final = 1.0
_LOG_EVERY_S: Final = 10.0
# Of the patience, whatever it has taken.
_ONE_ATTEMPT_MAX: Final = 0.5
# A leader that moves, or a topic that is just being created, is nothing to tell a user about.
_LOG_AFTER_S: Final = 0.5
# A new topic takes some milliseconds to become known to every broker; a deleted one stays unknown.
_MISSING_S: Final = 1.0

_DENIED: Final = frozenset(
    {
        Code.TOPIC_AUTHORIZATION_FAILED,
        Code.GROUP_AUTHORIZATION_FAILED,
        Code.CLUSTER_AUTHORIZATION_FAILED,
        Code.TRANSACTIONAL_ID_AUTHORIZATION_FAILED,
    }
)


class BrokerTrouble(Exception):
    """One attempt failed and the next may not. Never leaves this package."""

    def __init__(self, message: str, code: int | None = None) -> None:
        self.code = code
        super().__init__(message)


class TopicMissing(BrokerTrouble):
    """The cluster's metadata does not know the topic: not yet, or not any more."""


def failure_of(code: int, subject: str, detail: str | None = None) -> BrokerTrouble | StreamiterError:
    """The exception for an error code in an answer about ``subject``."""
    said = f"{subject}: the broker answered {code_name(code)}" + (f" ({detail})" if detail else "")
    if code in PASSING:
        return BrokerTrouble(said, code)
    if code in _DENIED:
        return TopicDenied(f"{said}; ask for the right to do this, or use other credentials")
    return TopicError(said)


def passing(code: int, subject: str) -> BrokerTrouble | None:
    """The trouble that ``code`` stands for, None for none; raises what does not pass."""
    if code == Code.NONE:
        return None
    failure = failure_of(code, subject)
    if isinstance(failure, BrokerTrouble):
        return failure
    raise failure


def check(code: int, subject: str, detail: str | None = None) -> None:
    """Raise the exception for ``code`` unless it is 0."""
    if code != Code.NONE:
        raise failure_of(code, subject, detail)


class Patience:
    """Bears trouble until it lasts too long: logs, waits, and raises ``TopicUnavailable`` in the end.

    Trouble may be with several things at once (partitions, say) and is over when the last of them works
    again; so one that never does is found out although the others go on.
    Time is the machine's own whatever clock a job runs on: the broker has no other.
    """

    def __init__(self, subject: str, limit_s: float, clock: Clock | None = None) -> None:
        self.subject = subject
        self.limit_s = limit_s
        self._clock: Clock = clock if clock is not None else SystemClock()
        self._ailing: set[object] = set()
        self._since_s: float | None = None
        self._missing_since_s: float | None = None
        self._logged_s = float("-inf")
        self._backoff_s = _FIRST_BACKOFF_S
        self._last = BrokerTrouble("no answer")

    def succeeded(self, working: Iterable[object] = ("",)) -> None:
        """These work (again): if nothing else is in trouble, trouble is over."""
        if self._since_s is None:
            return
        self._ailing.difference_update(working)
        if not self._ailing:
            if self._logged_s > float("-inf"):
                lasted_s = self._clock.monotonic_s() - self._since_s
                log.info("%s: works again after %.1f s", self.subject, lasted_s)
            self._since_s = self._missing_since_s = None
            self._logged_s = float("-inf")
            self._backoff_s = _FIRST_BACKOFF_S

    def now_s(self) -> float:
        """The time that ``failed`` takes as the begin of an attempt."""
        return self._clock.monotonic_s()

    async def failed(
        self, trouble: BrokerTrouble, ailing: Iterable[object] = ("",), *, begun_s: float | None = None
    ) -> None:
        """Wait a moment before the next attempt, or raise ``TopicUnavailable`` if it has lasted too long.

        ``begun_s`` is when the attempt began: an answer that never came was missing from then on.
        """
        self._ailing.update(ailing)
        self._last = trouble
        now_s = self._clock.monotonic_s()
        if self._since_s is None:
            # One attempt alone is never all of the patience: one that took so long tells rather of this process
            # (paused, its machine asleep), and of a broker that the next attempt finds where it was.
            earliest_s = now_s - _ONE_ATTEMPT_MAX * self.limit_s
            self._since_s = max(begun_s, earliest_s) if begun_s is not None else now_s
        left_s = self._left_s(trouble, self._since_s, now_s)
        if left_s <= 0:
            raise self.given_up() from None
        self._log(trouble, now_s - self._since_s, now_s, left_s)
        await self._clock.sleep(min(self._backoff_s, left_s))
        self._backoff_s = min(2 * self._backoff_s, _LONGEST_BACKOFF_S)

    def given_up(self) -> StreamiterError:
        """The error for trouble that lasts."""
        if isinstance(self._last, TopicMissing):
            return TopicNotFound(self._about(self._last))
        return TopicUnavailable(
            f"{self._about(self._last)}; expected it to pass within {self.limit_s:g} s. "
            "Is the broker running, and is the address right? Option give_up_after_s sets the patience"
        )

    def _about(self, trouble: BrokerTrouble) -> str:
        said = str(trouble)
        return said if said.startswith(self.subject) else f"{self.subject}: {said}"

    def _left_s(self, trouble: BrokerTrouble, since_s: float, now_s: float) -> float:
        left_s = since_s + self.limit_s - now_s
        if not isinstance(trouble, TopicMissing):
            self._missing_since_s = None
            return left_s
        if self._missing_since_s is None:
            self._missing_since_s = now_s
        return min(left_s, self._missing_since_s + _MISSING_S - now_s)

    def _log(self, trouble: BrokerTrouble, lasts_s: float, now_s: float, left_s: float) -> None:
        if lasts_s >= _LOG_AFTER_S and now_s - self._logged_s >= _LOG_EVERY_S:
            self._logged_s = now_s
            log.warning("%s; trying again for up to %.1f s", self._about(trouble), left_s)


async def persist(patience: Patience, attempt: Callable[[], Awaitable[T]]) -> T:
    """The result of ``attempt``, repeated while it meets what may pass and ``patience`` lasts."""
    while True:
        begun_s = patience.now_s()
        try:
            result = await attempt()
        except BrokerTrouble as trouble:
            await patience.failed(trouble, begun_s=begun_s)
        else:
            patience.succeeded()
            return result


async def persist_within(limit_s: float, subject: str, attempt: Callable[[], Awaitable[T]]) -> T:
    """As :func:`persist`; the limit holds also for an attempt that never ends."""
    patience = Patience(subject, limit_s)
    try:
        async with asyncio.timeout(limit_s):
            return await persist(patience, attempt)
    except TimeoutError:
        raise patience.given_up() from None
