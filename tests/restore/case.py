"""A case of the restore suite is a part of a flow, with the classes whose state it tests."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from streamiter import Flow, Stream
from streamiter.operators.operator import Context
from streamiter.operators.source import Positions, Source, SourceBatch
from streamiter.testing.restore.driving import Build
from streamiter.values.records import Batch


@dataclass(frozen=True)
class Case:
    """A case whose ``build`` is a function at the top level of a module, so that a fresh process can import it."""

    build: Build
    covers: tuple[type[Any], ...]
    """The classes whose ``snapshot``, ``state``, ``positions`` or ``freeze`` must be called during the run."""
    options: dict[str, Any] = field(default_factory=dict)
    """The options for ``check_flow_restore``."""

    @property
    def name(self) -> str:
        """Return the name of the case in the id of the test."""
        function: Any = getattr(self.build, "func", self.build)
        parts = [function.__name__, *map(str, getattr(self.build, "args", ()))]
        return "-".join(part.rpartition("/")[2] for part in parts)


def turns(count: int = 5, **options: Any) -> dict[str, Any]:
    """Return options for cuts at any turn of the event loop."""
    return {"cut_at": "turns", "cuts": count, **options}


class Pieces(Source):
    """A source whose subtask i reads every n-th record, starting with record i, in batches of one size."""

    def __init__(self, records: Batch, batch: int) -> None:
        self._records = records
        self._batch = batch

    def open(self, context: Context, positions: Positions | None) -> None:
        self._label = f"{context.name}[{context.subtask_index}]"
        self._records = self._records[context.subtask_index :: context.parallelism]
        self._read_records = (positions or {}).get(self._label, 0)

    def read(self) -> SourceBatch | None:
        records = self._records[self._read_records : self._read_records + self._batch]
        if len(records) == 0:
            return None
        self._read_records += len(records)
        return SourceBatch(records, {self._label: self._read_records})


def fed(flow: Flow, records: Any, *, batch: int = 1, name: str = "in", parallelism: int | None = None) -> Stream:
    """Return a stream of these records, in small batches."""
    given = list(records) if isinstance(records, range) else records
    make: Callable[[], Source] = lambda: Pieces(given, batch)  # noqa: E731 (a factory, as from_source asks)
    return flow.from_source(make, name=name, parallelism=parallelism)
