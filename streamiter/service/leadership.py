"""Which of several processes of a service leads: it runs the job, and the others are standbys.

A process that leads writes signs of life to the topic ``streamiter-leaders``, and another one leads when no sign has
come for some time. A mistake is harmless, since a run fences the runs before it: see
docs/decisions/071-a-standby-takes-over.md.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable
from typing import Final

import msgspec

from streamiter.errors import StreamiterError
from streamiter.topics import OutgoingBatch, ReadRequest, Topic, TopicReader, TopicWriter
from streamiter.topics.compacted import ensure_compacted, last_value
from streamiter.values.helpers.clock import Clock, in_time
from streamiter.values.helpers.closing import close_each, closed_after, note_unclosed

_log = logging.getLogger("streamiter.service")

LEADERS: Final = "streamiter-leaders"
"""The one topic for all services that write to a server or file. The key of a record is the name of a service."""

# Four of the signs of life may be late, or lost, before another process leads.
_SIGNS: Final = 5
# Brokers answer a reader after half a second, with or without records. After three times as long they are away.
_ANSWER_S: Final = 1.5
# An end in order is not delayed for longer; without it, a standby leads a little later.
_LEAVE_S: Final = 2.0


class SignOfLife(msgspec.Struct):
    """A sign of the process that leads, or wants to."""

    process: str
    is_last: bool = False
    """Whether this process has ended, so that another one may lead at once."""


class Leadership:
    """Whether this process leads a service: :meth:`win` waits until it does, and :meth:`tell` writes its signs of life.

    ``after_s`` is the time without a sign of life after which another process leads.
    """

    def __init__(self, beside: Topic, service: str, process: str, after_s: float, clock: Clock) -> None:
        self._topic = beside.beside(LEADERS)
        self._service, self._process = service, process
        self._after_s, self._sign_s = after_s, after_s / _SIGNS
        self._clock = clock
        self._writer: TopicWriter | None = None
        self._one_at_a_time = asyncio.Lock()
        self.leads = False
        """Whether this process leads, as far as it knows; its owner clears this when a newer run has fenced its own."""
        self.has_heard = False
        """Whether another process has led while this one waited."""

    async def win(self) -> str:
        """Wait until this process leads; return why it does. Raises the errors of the topic."""
        await ensure_compacted(self._topic, f"in which the processes of {self._service!r} tell which one of them leads")
        # Opened before the last sign is looked for: no sign is between both.
        reader = await self._topic.open_reader(ReadRequest(start="latest", clock=self._clock))
        async with closed_after(reader.close):
            record = await last_value(self._topic, self._service.encode(), clock=self._clock)
            last = None if record is None else _sign_of(record.value)
            why = "no other process has led before" if last is None else "the leader has ended"
            if last is not None and not last.is_last:
                why = await self._silence(reader)
            while not await self._is_first(reader):
                why = await self._silence(reader)
        self.leads = True
        return why

    async def _silence(self, reader: TopicReader) -> str:
        """Wait until the leader has ended, or was silent for the time; return which.

        Only time in which the topic has answered and this process was awake counts.
        """
        silent_s = 0.0
        while silent_s < self._after_s:
            began_s = self._clock.monotonic_s()
            signs = await self._signs(reader, began_s + self._sign_s)
            self.has_heard = self.has_heard or bool(signs)
            now_s, asked_s = self._clock.monotonic_s(), reader.unanswered_since_s()
            if signs and signs[-1].is_last:
                return "the leader has ended"
            was_away = now_s - began_s > self._after_s / 2 or (asked_s is not None and now_s - asked_s > _ANSWER_S)
            silent_s = 0.0 if signs or was_away else silent_s + now_s - began_s
        return f"the leader has been silent for {silent_s:.1f} s"

    async def _is_first(self, reader: TopicReader) -> bool:
        """Write a sign of life, and return whether it is the first one of all that want to lead now."""
        await self._write(SignOfLife(self._process))
        while not (wanting := [sign for sign in await self._signs(reader, None) if not sign.is_last]):
            pass
        return wanting[0].process == self._process

    async def _signs(self, reader: TopicReader, until_s: float | None) -> list[SignOfLife]:
        """Return the next signs of life of this service; none if none come until then."""
        reading = asyncio.ensure_future(reader.read())
        async with closed_after(reading.cancel):
            await in_time(asyncio.wait([reading]), self._clock, until_s)
            batch = reading.result() if reading.done() else None
        return [] if batch is None else _signs_in(batch.keys, batch.values, self._service.encode())

    async def tell(self) -> None:
        """Write a sign of life again and again while this process leads, until cancelled."""
        async with closed_after(self._close):
            while True:
                await self._clock.sleep(self._sign_s)
                if self.leads:
                    try:
                        await self._write(SignOfLife(self._process))
                    except StreamiterError as error:  # Whether it still leads is decided where its job commits.
                        _log.warning("a sign of life was not written: %s", error)

    async def leave(self) -> None:
        """Let another process lead at once."""
        if self.leads:
            self.leads = False
            try:
                async with asyncio.timeout(_LEAVE_S):
                    await self._write(SignOfLife(self._process, is_last=True))
            except (StreamiterError, TimeoutError) as error:
                _log.warning("another process leads later, since this end could not be told: %s", error)

    async def _write(self, sign: SignOfLife) -> None:
        async with self._one_at_a_time:
            try:
                if self._writer is None:
                    self._writer = await self._topic.open_writer()
                await self._writer.write(OutgoingBatch([msgspec.json.encode(sign)], keys=[self._service.encode()]))
                await self._writer.flush()
            except BaseException as error:
                note_unclosed(error, await close_each([self._close]))
                raise

    async def _close(self) -> None:
        writer, self._writer = self._writer, None
        if writer is not None:
            await writer.close()


def _signs_in(keys: Iterable[bytes | None], values: Iterable[bytes | None], service: bytes) -> list[SignOfLife]:
    read = [_sign_of(value) for key, value in zip(keys, values, strict=True) if key == service]
    return [sign for sign in read if sign is not None]


def _sign_of(value: bytes | None) -> SignOfLife | None:
    """Return the sign of life in a record; None for something else, which another program has written."""
    try:
        return msgspec.json.decode(value or b"", type=SignOfLife)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return None
