"""A channel whose ends are in two processes: two halves, joined by a link.

Both halves are channels, so lanes, ports and inboxes use them as any other. The producer's half is a
:class:`DepartingChannel`. It counts the items that are not taken yet, and so admits batches by the rule of
``Channel``. The consumer's half is an :class:`ArrivingChannel`. It has the items, and reports the totals of items taken
and set aside, once in a turn of the event loop.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final, final

from streamiter.engine.graph.channels import LIMIT_BYTES, LIMIT_RECORDS, Channel, Intake
from streamiter.engine.processes.frames import BATCH, CONTROL, TAKEN, Taken
from streamiter.engine.processes.link import ProcessLink, check_length
from streamiter.engine.storage.disk_batches import errors_with_name
from streamiter.errors import InternalError, PlainDataError
from streamiter.values.records import WATERMARKS, Control, DataBatch

# A channel between processes has room for eight times the records of a channel within one, because batches are on their
# way while the consumer handles others. Measured with columns of 10,000 records: 101 instead of 168 µs for a batch. The
# limit in bytes is the limit of all channels.
TIMES_RECORDS: Final = 8
# Up to eight channels into a task have the full limits. More channels share the limits of eight, so that the memory of
# a task does not grow with the number of processes.
_FULL_WINDOWS: Final = 8
# Enough for a few batches under way, which are small where there are many channels.
_RECORDS_MIN: Final = 256
_BYTES_MIN: Final = 64 << 10


def window(
    channels: int, limit_records: int = LIMIT_RECORDS * TIMES_RECORDS, limit_bytes: int = LIMIT_BYTES
) -> tuple[int, int]:
    """Return the limits in records and bytes of a channel, if a task has ``channels`` from other processes.

    >>> window(8), window(16), window(1024)
    ((65536, 4194304), (32768, 2097152), (512, 65536))
    """
    share = max(channels, _FULL_WINDOWS)
    return (
        min(limit_records, max(_RECORDS_MIN, limit_records * _FULL_WINDOWS // share)),
        min(limit_bytes, max(_BYTES_MIN, limit_bytes * _FULL_WINDOWS // share)),
    )


class DepartingChannel(Channel):
    """The producer's half. It sends what it admits; its statistics count items that the consumer has not taken.

    ``shut_intakes`` names sources, and channels from other processes (``ArrivingChannel.intake``), before the producer.
    They are shut while too much is set aside behind the channel, or while a channel further downstream says so.

    A batch that is not plain data raises ``PlainDataError`` with the name of the channel, and is not counted.
    """

    def __init__(
        self,
        name: str,
        link: ProcessLink,
        number: int,
        *,
        limit_records: int = LIMIT_RECORDS * TIMES_RECORDS,
        limit_bytes: int = LIMIT_BYTES,
        neighbours: int = 1,
    ) -> None:
        """``neighbours``: the number of channels from other processes to the consumer, which share the limits."""
        records, size_bytes = window(neighbours, limit_records, limit_bytes)
        super().__init__(name, limit_records=records, limit_bytes=size_bytes)
        self._windows = math.ceil(max(limit_records / records, limit_bytes / size_bytes))
        self._link = link
        self._number = number
        self._last_watermark: tuple[type[Control], int] | None = None
        """The class of the watermark in the last frame, and its place in the link, if it has one."""
        link.attach(number, self.receive)

    def put_control(self, control: Control) -> None:
        body = self._link.encoding.encode_control(control)
        last = self._last_watermark
        if last is not None and type(control) is last[0] and self._link.replace(last[1], body):
            return
        place = self._link.send(self._number, CONTROL, [body])
        self._last_watermark = (type(control), place) if isinstance(control, WATERMARKS) else None

    def shut_intakes(self, intakes: Sequence[Intake], way: int) -> None:
        # The other channels on the way may have the full limits.
        super().shut_intakes(intakes, way * self._windows)

    def receive(self, kind: int, body: memoryview) -> None:
        """Take a report of the consumer's half."""
        if kind != TAKEN:
            raise InternalError(f"channel {self.name}: expected a report of its consumer, given a frame of kind {kind}")
        taken = Taken.decode(body)
        self.records = self._total_records - taken.records
        self._size_bytes = self._total_bytes - taken.size_bytes
        self._aside_records, self._aside_bytes = taken.aside_records, taken.aside_bytes
        self._makes_way = taken.makes_way
        self._is_overfull_downstream = taken.shuts_intakes
        self._check_intakes()
        self._wake_producer()

    def check(self, batch: DataBatch) -> None:
        """Raise ``PlainDataError`` for a batch that cannot be sent."""
        with errors_with_name(f"{self.name}, in another process"):
            check_length(self._link.encoding.encode_batch(batch, 0))

    def _admit(self, batch: DataBatch, count: int, size_bytes: int) -> None:
        try:  # As errors_with_name, which takes a tenth of the time of a small batch.
            self._link.send(self._number, BATCH, self._link.encoding.encode_batch(batch, size_bytes))
        except PlainDataError as error:
            raise PlainDataError(f"{self.name}, in another process: {error}") from error
        self._last_watermark = None
        super()._admit(batch, count, size_bytes)

    def _append(self, item: DataBatch | Control) -> None:
        self._sizes.clear()  # The other half has the items and their sizes.


@final
class ArrivingChannel(Channel):
    """The consumer's half. It admits all that arrives, because the producer's half keeps the limits."""

    def __init__(self, name: str, link: ProcessLink, number: int) -> None:
        super().__init__(name)
        self._link = link
        self._number = number
        self.intake: Intake = _RemoteIntake(self)
        """Stands for all sources before the channel, for ``shut_intakes`` of channels further downstream."""
        link.attach(number, self.receive)

    def receive(self, kind: int, body: memoryview) -> None:
        """Take a batch or a control record of the producer's half."""
        if kind == BATCH:
            batch, size_bytes = self._link.encoding.decode_batch(body)
            self._admit(batch, len(batch.records), size_bytes)
        elif kind == CONTROL:
            self.put_control(self._link.encoding.decode_control(body))
        else:
            raise InternalError(f"channel {self.name}: expected an item of its producer, given a frame of kind {kind}")

    def take(self) -> DataBatch | Control:
        item = super().take()
        self.report_later()
        return item

    def report(self) -> Taken:
        """Return the totals of items taken and set aside."""
        return Taken(
            self._total_records - self.records,
            self._total_bytes - self._size_bytes,
            self._aside_records,
            self._aside_bytes,
            self._makes_way,
            self.intake.is_shut,
        )

    def report_later(self) -> None:
        """Send a report to the producer's half at the end of this turn."""
        self._link.report_later(self._number, self.report)

    def _wake_producer(self) -> None:
        self.report_later()

    def _check_intakes(self) -> None:
        self.report_later()  # The producer's half decides; it knows the sources.


@final
class _RemoteIntake(Intake):
    """The intake of sources in another process."""

    def __init__(self, channel: ArrivingChannel) -> None:
        super().__init__()
        self._channel = channel

    def shut(self) -> None:
        super().shut()
        self._channel.report_later()

    def open(self) -> None:
        super().open()
        self._channel.report_later()
