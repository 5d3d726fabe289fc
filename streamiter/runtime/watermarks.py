"""The epoch watermark of an operator: the minimum over its input channels. Pure data, no I/O.

>>> tracker = WatermarkTracker(2)
>>> tracker.advance(0, 0), tracker.advance(1, 0)
(None, 0)
>>> tracker.advance(0, 5), tracker.finish(1)
(None, 5)
>>> tracker.finish(0)
"""

from __future__ import annotations

from typing import Final

from streamiter.errors import InternalError

__all__ = ["BEFORE_ALL_EPOCHS", "WatermarkTracker"]

BEFORE_ALL_EPOCHS: Final = -1


class WatermarkTracker:
    """Follows the watermarks of a fixed number of channels, each of which only grows.

    Invariant: ``watermark`` is the least watermark of the unfinished channels, and never goes back; when
    all are finished it is the greatest of all, whichever finished last.
    """

    __slots__ = ("_finished", "_watermarks", "watermark")

    def __init__(self, channels: int) -> None:
        self._watermarks = [BEFORE_ALL_EPOCHS] * channels
        self._finished = [False] * channels
        self.watermark = BEFORE_ALL_EPOCHS

    @property
    def all_finished(self) -> bool:
        """Whether no channel can hold the watermark back any more."""
        return all(self._finished)

    def reached(self, channel: int) -> int:
        """The last watermark that ``channel`` has brought."""
        return self._watermarks[channel]

    def advance(self, channel: int, epoch: int) -> int | None:
        """``channel`` has brought a watermark; the operator's new one, or None if that did not move."""
        if epoch < self._watermarks[channel]:
            raise InternalError(
                f"channel {channel}: epoch watermark went back from {self._watermarks[channel]} to {epoch}"
            )
        self._watermarks[channel] = epoch
        return self._moved()

    def finish(self, channel: int, at_least: int = BEFORE_ALL_EPOCHS) -> int | None:
        """``channel`` brings no more data; the operator's new watermark, or None if that did not move.

        ``at_least`` is an epoch that has been completed by that.
        """
        self._watermarks[channel] = max(self._watermarks[channel], at_least)
        self._finished[channel] = True
        return self._moved()

    def _moved(self) -> int | None:
        pairs = zip(self._watermarks, self._finished, strict=True)
        unfinished = [watermark for watermark, finished in pairs if not finished]
        least = min(unfinished) if unfinished else max(self._watermarks, default=self.watermark)
        if least <= self.watermark:
            return None
        self.watermark = least
        return least

    def snapshot(self) -> dict[str, list[int]]:
        """Plain data."""
        return {"watermarks": list(self._watermarks), "finished": [int(done) for done in self._finished]}

    def restore(self, state: dict[str, list[int]]) -> None:
        """Take over what ``snapshot`` gave, for the same number of channels."""
        self._watermarks = list(state["watermarks"])
        self._finished = [bool(done) for done in state["finished"]]
        self.watermark = BEFORE_ALL_EPOCHS
        self._moved()
