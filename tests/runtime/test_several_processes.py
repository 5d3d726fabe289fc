"""A flow in several processes, whose workers stop at one clock, however late the messages between them are."""

import asyncio
import re
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from random import Random
from typing import Any

import pytest
from processes.linked_jobs import abort, joined_jobs, run_joined
from runtime.probe import turns

from streamiter import Flow, Operator
from streamiter.engine.processes.remote_channel import LinkChannels
from streamiter.engine.tasks.task_barriers import ClockAlignment, ClockCoordinator
from streamiter.errors import JobFailed
from streamiter.operators import Output
from streamiter.topics import Json, MemoryBroker, OutgoingBatch, Raw, WithMetadata

Halves = dict[str, list[tuple[int, str, Any, dict[str, Any]]]]
"""By kind: number, name, the half, and its options."""


class Awaited(Operator):
    async def process(self, record: int, out: Output) -> None:
        await asyncio.sleep(0)
        out.emit(record)


async def test_each_subtask_gets_the_keys_that_it_gets_in_one_process() -> None:
    """The state of a key was in two subtasks after a change of the number of processes."""

    class Where(Operator):
        def open(self, context: Any) -> None:
            self._subtask = context.subtask_index, context.parallelism

        def process(self, record: int, out: Output) -> None:
            out.emit((record, self._subtask))

    def build(_: int) -> tuple[Flow, Any]:
        flow = Flow("f", parallelism=4)
        numbers = flow.from_items(range(200)).key_by(lambda n: n)
        return flow, numbers.process(Where).collect()

    runs = [await run_joined(build, processes) for processes in (1, 2, 3)]
    assert sorted(runs[0].items) == sorted(runs[1].items) == sorted(runs[2].items)


@pytest.mark.parametrize("processes", [2, 3])
async def test_processes_share_the_partitions_of_a_topic_and_the_sinks_of_the_transaction_are_in_one(
    processes: int,
) -> None:
    """A partition was read twice or never; outputs of two processes could not be committed together."""
    broker = MemoryBroker()
    for name, partitions in (("in", 5), ("out", 1), ("spread", 1)):
        await broker.topic(name).create(partitions=partitions)
    writer = await broker.topic("in").open_writer()
    await writer.write(
        OutgoingBatch(values=[str(n).encode() for n in range(100)], keys=[str(n).encode() for n in range(100)])
    )
    await writer.close()

    def build() -> Flow:
        flow = Flow("f", parallelism=3)
        numbers = flow.source(broker.topic("in"), stop="latest", name="in")
        numbers.map(lambda n: n + 1, name="add").sink(broker.topic("out"), name="out")
        numbers.sink(broker.topic("spread"), delivery="at_least_once", name="spread")
        return flow

    joined = joined_jobs([build() for _ in range(processes)])
    spread = [[f"{step}[{n}]" for step in ("in", "spread") for n in range(p, 3, processes)] for p in range(processes)]
    spread[0] += ["out[0]", "out[1]", "out[2]"]
    assert [sorted(names) for names in joined.tasks] == [sorted(names) for names in spread]
    await joined.run()
    for name, expected in (("out", range(1, 101)), ("spread", range(100))):
        reading = Flow("read")
        collected = reading.source(broker.topic(name), stop="latest").collect()
        await (await reading.start()).wait()
        assert sorted(collected.items) == list(expected)


class NotingJson:
    """Notes the records that one process encodes."""

    def __init__(self) -> None:
        self.encoded: set[int] = set()

    def encode(self, batch: Any) -> OutgoingBatch:
        self.encoded.update(record["n"] for record in batch)
        return Json().encode(batch)


def key_of(record: Any) -> str:
    return str(record["n"] % 20) if record["n"] != 50 else 1 / 0


async def written_by(processes: int, bad: dict[int, Any], **options: Any) -> tuple[Any, list[set[int]]]:
    """Write records to a topic in this many processes; return what came out, and which each process has encoded."""
    broker, encoders = MemoryBroker(), [NotingJson() for _ in range(processes)]
    for name, settings in (("in", {}), ("out", {"max_record_bytes": "1000"}), ("dead", {})):
        await broker.topic(name).create(partitions=6, settings=settings)
    writer = await broker.topic("in").open_writer()
    await writer.write(
        OutgoingBatch([str(n).encode() for n in range(200)], keys=[str(n % 20).encode() for n in range(200)])
    )
    await writer.close()

    def build(encoder: NotingJson) -> Flow:
        flow = Flow("f", parallelism=3)
        numbers = flow.source(broker.topic("in"), stop="latest", name="in")
        records = numbers.map(lambda n: {"n": n, "x": bad.get(n, "good")}, name="records")
        letters = {"dead_letter": broker.topic("dead")} if not options else {}
        records.sink(broker.topic("out"), key=key_of, encode=encoder, name="out", **letters, **options)
        return flow

    jobs = joined_jobs([build(encoder) for encoder in encoders]).jobs
    await asyncio.gather(*(job.start() for job in jobs))
    waiting = [asyncio.create_task(job.wait()) for job in jobs]
    done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_EXCEPTION)
    if failed := [task.exception() for task in done if task.exception()]:
        await asyncio.gather(*map(abort, jobs), return_exceptions=True)
        raise failed[0]
    found: dict[str, Any] = {"counts": replace(jobs[0].statistics().step("out"), batches_in=0)}
    for name in ("out", "dead"):
        flow = Flow("read")
        read = flow.source(broker.topic(name), stop="latest", decode=WithMetadata(Raw())).collect()
        await (await flow.start()).wait()
        rows = [(row["partition"], row["key"], row["offset"], row["value"], row["headers"]) for row in read.items]
        found[name] = [(*row[:2], *row[3:]) for row in sorted(rows, key=lambda row: (row[0], row[1] or b"", row[2]))]
    found["dead"] = sorted(letter[2:] for letter in found["dead"])  # Letters have no key, and come in any order.
    return found, [encoder.encoded for encoder in encoders]


BAD = {13: {1}, 31: "x" * 1000, 32: range(3), 48: {2}}


@pytest.mark.parametrize("processes", [2, 3])
async def test_each_process_encodes_its_records_for_a_sink_of_the_transaction(processes: int) -> None:
    """Process 0 encoded all records; a record of another process that has no JSON ended the job at the link."""
    expected, [of_one] = await written_by(1, BAD)
    found, encoded = await written_by(processes, BAD)
    assert found == expected
    assert expected["counts"].rejected == len(expected["dead"]) == 5
    assert all(encoded)
    assert sorted(chain.from_iterable(encoded)) == sorted(of_one)


async def test_a_record_that_another_process_cannot_encode_ends_the_job_as_in_one_process() -> None:
    """The error named the link, and neither the step nor the record."""
    messages = []
    for processes in (1, 3):
        with pytest.raises(JobFailed) as caught:
            await written_by(processes, {n: {1} for n in range(200)}, on_error="fail")
        messages.append(re.sub(r" on record .*\}(, in process \d)?", "", str(caught.value)))
    assert messages[0] == messages[1]
    assert "step 'out'" in messages[0]


@pytest.fixture
def halves(monkeypatch: pytest.MonkeyPatch) -> Halves:
    """The halves of channels between processes that are made in the test."""
    made: Halves = {"departing": [], "arriving": []}

    def note(kind: str) -> None:
        make = getattr(LinkChannels, kind)

        def noting(self: LinkChannels, number: int, name: str, *rest: Any, **options: Any) -> Any:
            half = make(self, number, name, *rest, **options)
            made[kind].append((number, name, half, options))
            return half

        monkeypatch.setattr(LinkChannels, kind, noting)

    for kind in made:
        note(kind)
    return made


async def test_a_channel_between_processes_has_two_halves_of_the_same_number_and_name(halves: Halves) -> None:
    """Records of one edge arrived at another, because two processes counted their channels differently."""

    def build(_: int) -> Flow:
        flow = Flow("f", parallelism=4)
        numbers = flow.from_items(range(10), name="n")
        numbers.rebalance().map(str, name="a").key_by(len).reduce(max, name="b").collect()
        numbers.map(str, name="c", parallelism=2).rebalance().map(str, name="d")
        return flow

    joined_jobs([build(process) for process in range(3)])
    departing, arriving = (sorted((name, number) for number, name, *_ in halves[kind]) for kind in halves)
    assert departing == arriving
    names = [name for name, _ in departing]
    assert len(names) == len(set(names))

    def crossing(left: int, right: int) -> int:
        return sum(a % 3 != b % 3 for a in range(left) for b in range(right))

    readers = Counter(name.split(" → ")[1] for name in names)
    assert {name: options["neighbours"] for _, name, _, options in halves["departing"]} == {
        name: readers[name.split(" → ")[1]] for name in names
    }
    assert len(names) == 2 * crossing(4, 4) + crossing(4, 1) + crossing(4, 2) + crossing(2, 4)


@pytest.mark.parametrize("processes", [1, 2, 3])
async def test_each_process_makes_its_own_operators_and_each_only_once(processes: int) -> None:
    """Every process made the operators of all, with models and connections that it never used."""
    made: list[tuple[int, str]] = []

    def build(process: int) -> Flow:
        def factory(step: str) -> Callable[[], Operator]:
            def make() -> Operator:
                made.append((process, step))
                return Awaited()

            return make

        flow = Flow("f", parallelism=5)
        flow.from_items(range(10)).process(factory("wide"), name="wide").process(
            factory("narrow"), name="narrow", parallelism=2
        )
        return flow

    joined_jobs([build(process) for process in range(processes)])
    expected = [(n % processes, "wide") for n in range(5)] + [(n % processes, "narrow") for n in range(2)]
    assert Counter(made) == Counter(expected)


async def test_what_is_set_aside_stops_the_sources_of_all_processes(halves: Halves) -> None:
    """A step with an input that it did not want yet held gigabytes, since a source in another process never waited."""

    def build() -> Flow:
        flow = Flow("f", parallelism=2)
        numbers = flow.from_items(range(10), name="n").map(int, name="chained")
        numbers.rebalance().process(Awaited, name="a").rebalance().process(Awaited)
        return flow

    joined = joined_jobs([build(), build()])
    [channel] = [half for _, name, (half, _), _ in halves["arriving"] if name.startswith("a[1] → ")]
    [sender] = [half for _, name, half, _ in halves["departing"] if name == channel.name]

    async def shut() -> list[bool]:
        await turns(5)
        return [task.is_paused for job in joined.jobs for task in job.statistics().tasks if task.name[0] == "n"]

    channel.set_aside(2 * sender.limit_records, 0)  # As much as fits into the two channels before the reader.
    assert await shut() == [False, False]
    channel.set_aside(1, 0)
    assert await shut() == [True, True]
    channel.release(1, 0)
    assert await shut() == [False, False]


STALENESS = 2


@dataclass
class Worker:
    clock: int
    further: Callable[[], None] = lambda: None
    stands: bool = False
    is_called: bool = False

    def counted_clocks(self) -> dict[str, int]:
        return {"w": self.clock}

    def call_when_further(self, further: Callable[[], None]) -> None:
        self.further = further

    def call_again(self) -> None:
        self.is_called = True


@dataclass
class Processes:
    """Tasks and messages, of which the random generator chooses the next one that goes on."""

    random: Random
    count: int
    messages: dict[tuple[int, int], deque[Callable[[], None]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        numbers = range(self.count)
        self.messages = {(number, other): deque() for number in numbers for other in numbers if 0 in (number, other)}
        self.together = ClockCoordinator(self.count, self._tell)
        self.alignments = [ClockAlignment(partial(self._report, number)) for number in numbers]
        self.workers: list[tuple[Worker, ClockAlignment, str]] = []
        for number in range(4):
            worker, alignment = Worker(self.random.randrange(STALENESS + 1)), self.random.choice(self.alignments)
            alignment.add(str(number), worker, worker.call_again)  # type: ignore[arg-type]
            self.workers.append((worker, alignment, str(number)))

    def _report(self, number: int, *report: Any) -> None:
        if number:
            self.messages[number, 0].append(partial(self.together.reported, number, *report))
        else:
            self.together.reported(number, *report)

    def _tell(self, *told: Any) -> None:
        for number in range(1, self.count):
            self.messages[0, number].append(partial(self.alignments[number].told, *told))
        self.alignments[0].told(*told)

    def go_on(self) -> None:
        waiting = [queue for queue in self.messages.values() if queue]
        if waiting and self.random.random() < 0.5:
            self.random.choice(waiting).popleft()()
            return
        worker, alignment, task = self.random.choice(self.workers)
        if not worker.stands and worker.clock <= min(each.clock for each, _, _ in self.workers) + STALENESS:
            worker.clock += 1
            worker.further()
            worker.is_called = True
        if worker.is_called:
            worker.is_called = False
            worker.stands = alignment.stands_still(task)


@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_all_workers_stand_at_one_clock_when_the_alignment_is_done(count: int) -> None:
    """A barrier was sent after a process had reported that it stood, and before it heard of a higher clock."""
    for seed in range(400):
        processes = Processes(Random(seed), count)
        for attempt in range(3):
            is_done = processes.together.seek()
            for _ in range(Random(seed + attempt).choice((3, 2000)) if attempt < 2 else 5000):
                if is_done.is_set():
                    clocks = {worker.clock for worker, _, _ in processes.workers if worker.stands}
                    assert [worker.stands for worker, _, _ in processes.workers] == [True] * 4, f"seed {seed}"
                    assert len(clocks) == 1, f"seed {seed}"
                    break
                processes.go_on()
            assert attempt < 2 or is_done.is_set(), f"seed {seed}"
            processes.together.give_up()


def test_a_process_that_has_not_answered_is_named() -> None:
    """A checkpoint that came too late because of a connection named no task, and the cause was sought in the flow."""
    together = ClockCoordinator(2, lambda *told: None)
    together.seek()
    together.reported(0, 1, {"w": 3}, ["work[0]"])
    assert together.behind() == ["work[0]", "process 1"]
