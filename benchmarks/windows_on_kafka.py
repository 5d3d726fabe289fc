"""A count by key and minute, and an interval join, of records in Kafka, compared with Quix Streams."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np
import orjson

from benchmarks import kafka
from benchmarks.measuring import Contender, Figure, Stopwatch, Trial, alternate, run_to_end
from benchmarks.quix import Job, Outcome
from benchmarks.session import PROJECT, Session
from benchmarks.windows import DISORDER_MS, KEYS, SIZE_S, pair_count, stream
from streamiter import Flow, KeyedStream, Operator, RocksState, Stream, tumbling
from streamiter.topics import OutgoingBatch, Topic

__all__ = ["interval_join_on_kafka", "tumbling_count_on_kafka"]

RECORDS: Final = "records/s"
STREAMITER: Final = "streamiter"
ON_DISK: Final = "streamiter, state on disk"
QUIX: Final = "Quix Streams"
# `make bench` installs it there: it cannot be beside the packages of the project.
QUIX_FOLDER: Final = Path(sys.prefix) / "quix"
_PIECE: Final = 5000
_LIMIT_S: Final = 600.0


def tumbling_count_on_kafka(session: Session) -> Iterator[Figure]:
    """A million records in a topic, 1 ms apart and up to 100 ms out of order, are counted by 1,000 keys and minutes."""
    count = session.size(1_000_000, 50_000)
    yield from _compared(session, lambda part: _Counting(session, count // part), quix_part=10)


def interval_join_on_kafka(session: Session) -> Iterator[Figure]:
    """200,000 records in two topics, 1 ms apart, are joined by 1,000 keys where they are at most 2 s apart."""
    count = session.size(200_000, 20_000)
    yield from _compared(session, lambda part: _Joining(session, count // part), quix_part=2)


def _compared(session: Session, work: Callable[[int], _Work], *, quix_part: int) -> Iterator[Figure]:
    ours = work(1)
    contenders: dict[str, Contender] = {STREAMITER: ours.in_flow, ON_DISK: ours.in_flow_on_disk}
    if (QUIX_FOLDER / "quixstreams").is_dir():
        # A contender has the rate of as many records as it handles in some seconds.
        contenders[QUIX] = work(quix_part).in_quix
    else:
        print(f"  {QUIX} is left out, because it is not installed in {QUIX_FOLDER}", file=sys.stderr, flush=True)
    series = alternate(contenders, repeat=session.repeat)
    peer = QUIX if QUIX in contenders else ""
    if peer:
        yield series.figure(QUIX, RECORDS)
    for name in (STREAMITER, ON_DISK):
        yield series.figure(name, RECORDS, compared_with=peer)


class _Work:
    """Topics with records, and the results that both contenders must have."""

    size_ms: int
    results: int
    total: int

    def __init__(self, session: Session, count: int, topics: int, *, in_order: bool = False) -> None:
        self.count = count
        self.keys, self.times = stream(count)
        if in_order:
            self.times.sort()
        self.session = session
        self.topics = [kafka.new_topic(session, "timed") for _ in range(topics)]
        for number, each in enumerate(self.topics):
            kafka.run(_fill(each, self.keys[number::topics].tolist(), self.times[number::topics].tolist()))

    def flow(self, streams: list[KeyedStream[str, Any]]) -> Stream[int]:
        """Return the stream of counts, or of a 1 for each pair."""
        raise NotImplementedError

    def in_flow(self, state: RocksState | None = None) -> Trial:
        flow, counts, watch = Flow("timed", state=state), _Counts(), Stopwatch()
        streams = [
            flow.source(each, stop="latest")
            .event_time("at", unit="ms", check_unit=False, out_of_orderness_s=DISORDER_MS / 1000)
            .key_by(lambda record: record["key"])
            for each in self.topics
        ]
        self.flow(streams).process(lambda: counts)
        with watch:
            run_to_end(flow)
        self._check(counts.results, counts.total)
        return Trial(watch.rates(self.count, "records"))

    def in_flow_on_disk(self) -> Trial:
        with tempfile.TemporaryDirectory() as folder:
            return self.in_flow(RocksState(folder))

    def in_quix(self) -> Trial:
        names = [each.name for each in self.topics]
        job = Job(self.session.kafka, names, self.results, DISORDER_MS, self.size_ms)
        command = [sys.executable, "-m", "benchmarks.quix", msgspec.json.encode(job).decode()]
        environment = {**os.environ, "PYTHONPATH": str(QUIX_FOLDER)}
        done = subprocess.run(
            command, env=environment, cwd=PROJECT, stdout=subprocess.PIPE, timeout=_LIMIT_S, check=True
        )
        outcome = msgspec.json.decode(done.stdout, type=Outcome)
        self._check(outcome.results, outcome.total)
        figures = {RECORDS: self.count / outcome.seconds, "records/CPU-s": self.count / outcome.cpu_seconds}
        return Trial(figures)

    def _check(self, results: int, total: int) -> None:
        expected, given = (self.results, self.total), (results, total)
        assert given == expected, f"expected {expected} results and their sum, given {given}"


class _Counting(_Work):
    """One topic, whose records are counted. A last record of each key closes its windows in Quix Streams.

    There, a window is closed by a later record of its key, and by default not by records of other keys.
    """

    size_ms = SIZE_S * 1000

    def __init__(self, session: Session, count: int) -> None:
        super().__init__(session, count, topics=1)
        self.results = len(np.unique(self.keys + KEYS * (self.times // self.size_ms)))
        self.total = count
        self.end_ms = int(self.times.max()) + 2 * self.size_ms
        kafka.run(_fill(self.topics[0], list(range(KEYS)), [self.end_ms] * KEYS))

    def flow(self, streams: list[KeyedStream[str, Any]]) -> Stream[int]:
        counts = streams[0].window(tumbling(SIZE_S)).aggregate("count")
        return counts.filter(lambda count: count.end <= self.end_ms).map(lambda count: count.value)


class _Joining(_Work):
    """Two topics, whose records are joined. They are in order.

    Quix Streams pairs a record with records of its time or before, not with one of a later time that came before it.
    """

    size_ms = 2000

    def __init__(self, session: Session, count: int) -> None:
        super().__init__(session, count, topics=2, in_order=True)
        self.results = self.total = pair_count(self.keys, self.times)

    def flow(self, streams: list[KeyedStream[str, Any]]) -> Stream[int]:
        left, right = streams
        return left.interval_join(right, lower_s=-2, upper_s=2).map(lambda pair: 1)


class _Counts(Operator):
    """Counts and adds what it is given, and emits nothing."""

    def __init__(self) -> None:
        self.results = self.total = 0

    def process_batch(self, batch: Any, out: Any) -> None:
        self.results += len(batch)
        self.total += sum(batch)


async def _fill(target: Topic, keys: list[Any], times: list[int]) -> None:
    writer = await target.open_writer()
    for start in range(0, len(keys), _PIECE):
        piece = list(zip(keys[start : start + _PIECE], times[start : start + _PIECE], strict=True))
        values = [orjson.dumps({"key": str(key), "at": time}) for key, time in piece]
        await writer.write(
            OutgoingBatch(
                values,
                keys=[str(key).encode() for key, _ in piece],
                partition=0,
                timestamps_ms=[time for _, time in piece],
            )
        )
    await writer.close()
