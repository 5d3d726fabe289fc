"""Whether a transaction was aborted because it was open for too long: told by its age, as the broker does not.

A coordinator that aborts a transaction after its timeout raises the epoch of the id, as it does for a newer
owner, and answers both with the same error.
"""

from __future__ import annotations

from streamiter.clock import Clock
from streamiter.errors import ProducerFenced, StreamiterError, TransactionExpired

__all__ = ["TransactionAge"]


class TransactionAge:
    """For how long the coordinator has known the open transaction.

    >>> from streamiter.clock import SystemClock
    >>> age = TransactionAge("transactions 't'", 60.0, SystemClock())
    >>> age.begun()
    >>> type(age.explained(ProducerFenced("fenced"))).__name__
    'ProducerFenced'
    """

    def __init__(self, subject: str, timeout_s: float, clock: Clock) -> None:
        self._subject = subject
        self._timeout_s = timeout_s
        self._clock = clock
        self._begun_s: tuple[float, float] | None = None

    def begun(self) -> None:
        """Call it before the coordinator hears of the transaction: then it is never younger than there."""
        if self._begun_s is None:
            self._begun_s = self._now_s()

    def ended(self) -> None:
        """The transaction is decided; the next one has not begun."""
        self._begun_s = None

    def explained(self, failure: StreamiterError) -> StreamiterError:
        """``failure``, or ``TransactionExpired`` where it is a fence at the age of the timeout or more.

        To be asked when the broker answers, not later.
        """
        is_fence = isinstance(failure, ProducerFenced) and not isinstance(failure, TransactionExpired)
        if not is_fence or not self._is_over():
            return failure
        return TransactionExpired(
            f"{self._subject}: the broker aborted the transaction, which was open for over "
            f"{self._timeout_s:g} s, its timeout; open the transactions anew"
        )

    def _is_over(self) -> bool:
        if self._begun_s is None:
            return False
        ages_s = (now_s - begun_s for now_s, begun_s in zip(self._now_s(), self._begun_s, strict=True))
        return max(ages_s) >= self._timeout_s

    def _now_s(self) -> tuple[float, float]:
        """By both clocks: the monotonic one stands still while a machine sleeps, the other can be set."""
        return self._clock.monotonic_s(), self._clock.now_ms() / 1000
