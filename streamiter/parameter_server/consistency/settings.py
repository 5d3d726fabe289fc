"""Which consistency a matrix has: how far workers may be apart, and what a read may miss."""

from __future__ import annotations

from dataclasses import dataclass

from streamiter.numbers import whole_number

__all__ = ["ASP", "BSP", "SSP", "Consistency"]


@dataclass(frozen=True, slots=True)
class Consistency:
    """How far workers may be apart on a matrix: one of :class:`ASP`, :class:`BSP`, :class:`SSP`."""


@dataclass(frozen=True, slots=True)
class ASP(Consistency):
    """Asynchronous parallel: nobody waits for anybody. Adds are applied and gets answered as they come.

    >>> ASP()
    ASP()
    """


@dataclass(frozen=True, slots=True)
class BSP(Consistency):
    """Bulk synchronous parallel: all workers are in the same iteration, and see what all did in those before.

    A worker gets, adds, clocks, and awaits a get before it adds again; what comes in another order is OutOfTurn.

    >>> BSP()
    BSP()
    """


@dataclass(frozen=True, slots=True)
class SSP(Consistency):
    """Stale synchronous parallel (Ho et al. 2013): a get waits more than ``staleness`` clocks ahead of the slowest.

    Adds are applied at once and never wait; clocks neither.

    >>> SSP(staleness=2)
    SSP(staleness=2)
    """

    staleness: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "staleness", whole_number("SSP(staleness=)", self.staleness, 0))
