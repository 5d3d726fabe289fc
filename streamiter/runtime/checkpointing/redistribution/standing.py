"""How far a step has come, and what that means when its subtasks become others."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import NamedTuple

from streamiter.runtime.watermarks import BEFORE_ALL_EPOCHS

__all__ = ["Standing", "behind_all", "joined"]


class Standing(NamedTuple):
    """What a subtask has passed on of epochs and ends."""

    watermark: int
    data_ended: bool
    ended: bool


NOTHING_YET = Standing(BEFORE_ALL_EPOCHS, data_ended=False, ended=False)


def joined(standings: Collection[Standing]) -> Standing:
    """Where all go on from: none of what was still to come from any of them is left out.

    >>> joined([Standing(3, False, False), Standing(4, False, False), Standing(1, True, True)])
    Standing(watermark=3, data_ended=False, ended=False)
    """
    going_on = [standing for standing in standings if not standing.data_ended]
    furthest = max(standing.watermark for standing in standings)
    return Standing(
        min((standing.watermark for standing in going_on), default=furthest),
        all(standing.data_ended for standing in standings),
        all(standing.ended for standing in standings),
    )


def behind_all(upstream: Iterable[Standing]) -> Standing:
    """That of a step that was not there, behind these: what they have passed on is over."""
    standings = list(upstream)
    return joined(standings) if standings else NOTHING_YET
