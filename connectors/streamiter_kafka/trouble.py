"""Failures of brokers: the error codes of the protocol, which of them may be temporary, and how long to retry.

An answer with an error code becomes a `BrokerTrouble`, after which the same request may succeed, or an error of the
tree, which is final. A `RetryLimit` waits between two attempts and raises ``TopicUnavailable`` when the trouble lasts
too long.
"""

from __future__ import annotations

import asyncio
import enum
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Final, TypeVar

from streamiter.errors import StreamiterError, TopicDenied, TopicError, TopicNotFound, TopicUnavailable
from streamiter.values.helpers.clock import Clock, SystemClock
from streamiter.values.helpers.files import advice_for


class _Then(enum.Enum):
    """What follows an error."""

    GIVE_UP = enum.auto()
    TRY_AGAIN = enum.auto()
    """The same request may soon succeed, at this broker or at another."""
    ASK_FOR_THE_RIGHT = enum.auto()


class Code(enum.IntEnum):
    """Error codes, by the names of the protocol's documentation, and what a client can do then.

    >>> Code(3).name, Code(12345).name
    ('UNKNOWN_TOPIC_OR_PARTITION', 'error code 12345')
    """

    then: _Then

    def __new__(cls, number: int, then: _Then = _Then.GIVE_UP) -> Code:
        code = int.__new__(cls, number)
        code._value_, code.then = number, then
        return code

    @classmethod
    def _missing_(cls, value: object) -> Code | None:
        if not isinstance(value, int):
            return None
        unknown = int.__new__(cls, value)
        unknown._value_, unknown._name_, unknown.then = value, f"error code {value}", _Then.GIVE_UP
        return unknown

    UNKNOWN_SERVER_ERROR = -1
    NONE = 0
    OFFSET_OUT_OF_RANGE = 1
    # Also while a new topic spreads; a missing topic is detected elsewhere.
    UNKNOWN_TOPIC_OR_PARTITION = 3, _Then.TRY_AGAIN
    LEADER_NOT_AVAILABLE = 5, _Then.TRY_AGAIN
    NOT_LEADER_OR_FOLLOWER = 6, _Then.TRY_AGAIN
    REQUEST_TIMED_OUT = 7, _Then.TRY_AGAIN
    BROKER_NOT_AVAILABLE = 8, _Then.TRY_AGAIN
    REPLICA_NOT_AVAILABLE = 9, _Then.TRY_AGAIN
    MESSAGE_TOO_LARGE = 10
    NETWORK_EXCEPTION = 13, _Then.TRY_AGAIN
    COORDINATOR_LOAD_IN_PROGRESS = 14, _Then.TRY_AGAIN
    COORDINATOR_NOT_AVAILABLE = 15, _Then.TRY_AGAIN
    NOT_COORDINATOR = 16, _Then.TRY_AGAIN
    INVALID_TOPIC_EXCEPTION = 17
    RECORD_LIST_TOO_LARGE = 18
    NOT_ENOUGH_REPLICAS = 19, _Then.TRY_AGAIN
    NOT_ENOUGH_REPLICAS_AFTER_APPEND = 20, _Then.TRY_AGAIN
    INVALID_GROUP_ID = 24
    UNKNOWN_MEMBER_ID = 25
    TOPIC_AUTHORIZATION_FAILED = 29, _Then.ASK_FOR_THE_RIGHT
    GROUP_AUTHORIZATION_FAILED = 30, _Then.ASK_FOR_THE_RIGHT
    CLUSTER_AUTHORIZATION_FAILED = 31, _Then.ASK_FOR_THE_RIGHT
    UNSUPPORTED_VERSION = 35
    TOPIC_ALREADY_EXISTS = 36
    INVALID_PARTITIONS = 37
    INVALID_REPLICATION_FACTOR = 38
    INVALID_CONFIG = 40
    NOT_CONTROLLER = 41, _Then.TRY_AGAIN
    POLICY_VIOLATION = 44
    OUT_OF_ORDER_SEQUENCE_NUMBER = 45
    DUPLICATE_SEQUENCE_NUMBER = 46
    INVALID_PRODUCER_EPOCH = 47
    INVALID_TXN_STATE = 48
    INVALID_PRODUCER_ID_MAPPING = 49
    INVALID_TRANSACTION_TIMEOUT = 50
    CONCURRENT_TRANSACTIONS = 51, _Then.TRY_AGAIN  # until the end of the transaction before is written
    TRANSACTIONAL_ID_AUTHORIZATION_FAILED = 53, _Then.ASK_FOR_THE_RIGHT
    OPERATION_NOT_ATTEMPTED = 55
    KAFKA_STORAGE_ERROR = 56, _Then.TRY_AGAIN
    TOPIC_DELETION_DISABLED = 73
    FENCED_LEADER_EPOCH = 74, _Then.TRY_AGAIN
    UNKNOWN_LEADER_EPOCH = 75, _Then.TRY_AGAIN
    OFFSET_NOT_AVAILABLE = 78, _Then.TRY_AGAIN
    INVALID_RECORD = 87
    UNSTABLE_OFFSET_COMMIT = 88, _Then.TRY_AGAIN  # until an open transaction that changes the offset has ended
    THROTTLING_QUOTA_EXCEEDED = 89, _Then.TRY_AGAIN
    PRODUCER_FENCED = 90
    UNKNOWN_TOPIC_ID = 100, _Then.TRY_AGAIN  # another topic of the name is detected elsewhere
    INCONSISTENT_TOPIC_ID = 103, _Then.TRY_AGAIN
    TRANSACTION_ABORTABLE = 120


T = TypeVar("T")

log = logging.getLogger("streamiter.kafka")

# The first repetition is quick, since a leader may just have moved; later ones are slower, to spare the broker.
_FIRST_BACKOFF_S: Final = 0.05
_LONGEST_BACKOFF_S: Final = 1.0
_LOG_EVERY_S: Final = 10.0
# One attempt counts with at most this part of the limit, however long it took.
_ONE_ATTEMPT_MAX: Final = 0.5
# A leader that moves, or a topic that is being created, is not worth a log line.
_LOG_AFTER_S: Final = 0.5
# Every broker knows a new topic after some milliseconds; a deleted topic stays unknown.
_MISSING_S: Final = 1.0


class BrokerTrouble(Exception):
    """One attempt failed, and the next may succeed. Callers of this package never see it."""

    def __init__(self, message: str, code: int | None = None) -> None:
        self.code = code
        super().__init__(message)


class TopicMissing(BrokerTrouble):
    """The metadata of the cluster does not have the topic: not yet, or not any more."""


def error_of_code(code: int, subject: str, detail: str | None = None) -> BrokerTrouble | StreamiterError:
    """Return the exception for an error code in an answer about ``subject``."""
    said = f"{subject}: the broker answered {Code(code).name}" + (f" ({detail})" if detail else "")
    then = Code(code).then
    if then is _Then.TRY_AGAIN:
        return BrokerTrouble(said, code)
    if then is _Then.ASK_FOR_THE_RIGHT:
        return TopicDenied(f"{said}; ask for the right to do this, or use other credentials")
    return TopicError(said)


def passing(code: int, subject: str) -> BrokerTrouble | None:
    """Return the trouble for ``code``, None for no error; raise an error that is final."""
    if code == Code.NONE:
        return None
    failure = error_of_code(code, subject)
    if isinstance(failure, BrokerTrouble):
        return failure
    raise failure


def check_code(code: int, subject: str, detail: str | None = None) -> None:
    """Raise the exception for ``code`` unless it is 0."""
    if code != Code.NONE:
        raise error_of_code(code, subject, detail)


class RetryLimit:
    """Limits the time of retries: logs the trouble, waits, and finally raises ``TopicUnavailable``.

    Several things may be in trouble at once, such as partitions. The trouble is over when the last of them works
    again, so a partition that never works again is detected although the others do. Time is that of the system clock,
    also for a job with another clock, because the broker knows no other time.
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
        """These things work; if no other thing is in trouble, the trouble is over."""
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
        """Return the time to pass to ``failed`` as the begin of an attempt."""
        return self._clock.monotonic_s()

    async def failed(
        self, trouble: BrokerTrouble, ailing: Iterable[object] = ("",), *, begun_s: float | None = None
    ) -> None:
        """Wait a moment before the next attempt, or raise ``TopicUnavailable`` if the trouble has lasted too long.

        ``begun_s`` is when the attempt began: the trouble counts from then on.
        """
        self._ailing.update(ailing)
        self._last = trouble
        now_s = self._clock.monotonic_s()
        if self._since_s is None:
            # One attempt alone never uses up the limit. If it took that long, this process was probably paused or its
            # machine asleep, and the next attempt finds the broker working.
            earliest_s = now_s - _ONE_ATTEMPT_MAX * self.limit_s
            self._since_s = max(begun_s, earliest_s) if begun_s is not None else now_s
        left_s = self._left_s(trouble, self._since_s, now_s)
        if left_s <= 0:
            raise self.given_up() from None
        self._log(trouble, now_s - self._since_s, now_s, left_s)
        await self._clock.sleep(min(self._backoff_s, left_s))
        self._backoff_s = min(2 * self._backoff_s, _LONGEST_BACKOFF_S)

    async def recover(
        self, ailing: Mapping[T, BrokerTrouble], refresh: Callable[[], Awaitable[object]], begun_s: float
    ) -> None:
        """Ask which brokers lead now and whether the topics still exist, then wait a moment as in ``failed``."""
        trouble = next(iter(ailing.values()))
        try:
            await refresh()
        except BrokerTrouble as worse:
            trouble = worse
        await self.failed(trouble, ailing, begun_s=begun_s)

    def given_up(self) -> StreamiterError:
        """Return the error for trouble that has lasted too long."""
        if isinstance(self._last, TopicMissing):
            return TopicNotFound(self._about(self._last))
        advice = advice_for(str(self._last), "")
        return TopicUnavailable(
            f"{self._about(self._last)}; expected it to pass within {self.limit_s:g} s. "
            f"{f'Please {advice}.' if advice else 'Is the broker running, and is the address right?'} "
            "Option give_up_after_s sets the patience"
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
        # A missing topic becomes an error within a second, which says the same, or a new topic appears.
        if isinstance(trouble, TopicMissing):
            return
        if lasts_s >= _LOG_AFTER_S and now_s - self._logged_s >= _LOG_EVERY_S:
            self._logged_s = now_s
            log.warning("%s; trying again for up to %.1f s", self._about(trouble), left_s)


async def persist(patience: RetryLimit, attempt: Callable[[], Awaitable[T]]) -> T:
    """Return the result of ``attempt``, repeated after trouble until ``patience`` ends."""
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
    """Do the same as :func:`persist`; the limit also ends an attempt that never ends by itself."""
    patience = RetryLimit(subject, limit_s)
    try:
        async with asyncio.timeout(limit_s):
            return await persist(patience, attempt)
    except TimeoutError:
        raise patience.given_up() from None
