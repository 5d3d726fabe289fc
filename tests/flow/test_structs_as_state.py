"""Structs that a source decodes are plain data of its flow."""

from __future__ import annotations

from pathlib import Path

import msgspec

from streamiter import Checkpoints, Flow
from streamiter.operators import Operator, Output
from streamiter.topics import MemoryBroker, OutgoingBatch, Typed, WithMetadata


class Item(msgspec.Struct):
    """Part of an order."""

    name: str


class Order(msgspec.Struct, tag=True):
    """An event with parts."""

    items: list[Item]


class Cancellation(msgspec.Struct, tag=True):
    """An event of another kind."""

    number: int = 0


class Last(Operator):
    """Keeps the last record."""

    def __init__(self) -> None:
        self.last: object = None

    def process(self, record: object, out: Output) -> None:
        self.last = record

    def snapshot(self) -> object:
        return self.last

    def restore(self, state: object) -> None:
        self.last = state


async def test_events_of_a_typed_source_can_be_state(tmp_path: Path) -> None:
    """Mini-batches of events waited at a barrier, and the job failed, because each class had to be registered by
    hand.
    """
    orders = MemoryBroker().topic("orders")
    await orders.create()
    writer = await orders.open_writer()
    await writer.write(OutgoingBatch([b'{"type": "Order", "items": [{"name": "tea"}]}']))
    await writer.close()
    for decoder in (Typed(Order | Cancellation), WithMetadata(Typed(Order | Cancellation))):
        flow = Flow("orders")
        flow.source(orders, decode=decoder, stop="latest").process(Last, name="last")
        folder = tmp_path / type(decoder).__name__
        job = await flow.start(checkpoints=Checkpoints(folder, interval_s=100.0))
        assert (await job.wait()).checkpoints is not None
        assert flow.plain_data.decode(flow.plain_data.encode(Cancellation(7))) == Cancellation(7)


class Elsewhere:
    """A class that contains a class of the same name."""

    class Item(msgspec.Struct):
        """A class that has only its name in common with the other one."""

        price: float


def test_two_classes_of_one_name_are_no_error_of_a_flow_that_stores_neither() -> None:
    """Two modules had a class Event each, and the flow that read both could not be built."""
    flow = Flow("two")
    broker = MemoryBroker()
    flow.source(broker.topic("a"), decode=Typed(Item))
    flow.source(broker.topic("b"), decode=Typed(Elsewhere.Item))
    assert flow.plain_data.decode(flow.plain_data.encode(Item("tea"))) == Item("tea")
