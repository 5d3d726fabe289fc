"""The flow around a single operator or source."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from streamiter.flow.flow import Flow
from streamiter.flow.stream import Stream, connect
from streamiter.iteration.config import IterationBodyResult
from streamiter.iteration.stamping import epochs_every
from streamiter.iteration.unbounded import iterate_unbounded_streams
from streamiter.operators.context import Context
from streamiter.operators.operator import OperatorFactory
from streamiter.operators.source import Positions, Source, SourceBatch
from streamiter.records import Batch, OutputTag
from streamiter.runtime.graph import SINGLE_INPUT

__all__ = ["operator_flow", "source_flow"]


class _Given(Source):
    """Brings records in batches of one size."""

    def __init__(self, records: Batch, batch: int) -> None:
        self._records = records
        self._batch = batch
        self._brought = 0

    def open(self, context: Context, positions: Positions | None) -> None:
        self._brought = (positions or {}).get("brought", 0)

    def read(self) -> SourceBatch | None:
        records = self._records[self._brought : self._brought + self._batch]
        if len(records) == 0:
            return None
        self._brought += len(records)
        return SourceBatch(records, {"brought": self._brought})


def source_flow(flow: Flow, *, factory: Callable[[], Source]) -> Stream:
    """A source alone."""
    return flow.from_source(factory, name="source")


def operator_flow(
    flow: Flow,
    *,
    factory: OperatorFactory,
    name: str,
    inputs: Mapping[str, Batch],
    key: Callable[[Any], Any] | None,
    time_to_live_s: float | None,
    epochs: int | None,
    batch: int,
    tags: Sequence[str],
) -> dict[str, Stream]:
    """Sources of the records given, the operator behind them, in an iteration where there are epochs."""
    streams = {
        label: flow.from_source(_source_of(records, batch), name=label, parallelism=1)
        for label, records in inputs.items()
    }

    def outputs(given: dict[str, Stream]) -> dict[str, Stream]:
        handled = _handled(given, factory, name, key, time_to_live_s)
        return {"output": handled, **{tag: handled.side_output(OutputTag(tag)) for tag in tags}}

    if epochs is None:
        return outputs(streams)

    def body(
        variables: Sequence[Stream], data: Sequence[Stream]
    ) -> IterationBodyResult[Mapping[str, Stream]]:
        within = outputs(dict(zip(streams, data, strict=True)))
        return IterationBodyResult([variables[0].filter(_nothing)], within)

    stamped = [
        epochs_every(stream, records=epochs, name=f"epochs of {label}") for label, stream in streams.items()
    ]
    variable = flow.from_items([], name="no variable", parallelism=1)
    return iterate_unbounded_streams([variable], stamped, body)


def _handled(
    streams: dict[str, Stream],
    factory: OperatorFactory,
    name: str,
    key: Callable[[Any], Any] | None,
    time_to_live_s: float | None,
) -> Stream:
    if list(streams) != [SINGLE_INPUT]:
        return connect(**streams).process(factory, name=name, parallelism=1)
    [stream] = streams.values()
    if key is None:
        return stream.process(factory, name=name, parallelism=1)
    return stream.key_by(key).process(factory, name=name, parallelism=1, time_to_live_s=time_to_live_s)


def _source_of(records: Batch, batch: int) -> Callable[[], Source]:
    return lambda: _Given(records, batch)


def _nothing(record: Any) -> bool:
    return False
