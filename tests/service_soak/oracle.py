"""The oracle of the soak test: it reads the topics with aiokafka alone, and compares them with the numbers of events.

Each fault is a sentence.
"""

from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import aiokafka
import msgspec
import numpy as np
import numpy.typing as npt
from learn.frozen_states import learned
from service_soak.ask import Asked
from service_soak.events import FEATURES, event, example, good_numbers, number_of, question
from service_soak.stack import ProcessLife

from streamiter.learn import AdaptiveLinearModel
from streamiter.models import LinearPredictor
from streamiter.models.documents import JSON_CONTENT_TYPE, Document, decode_document, without_state

__all__ = ["Findings", "TopicContents", "check", "read_topics", "requests_of"]

# A process that starts on a busy machine answers within this time.
_START_S: Final = 45.0
# A service that has just started may refuse these: it has no version yet, or its job has not begun.
_AFTER_START: Final = ("/predict", "/flow")
# More faults of one kind say no more.
_SHOWN: Final = 5
_ROWS_AT_ONCE: Final = 20_000


@dataclass
class TopicContents:
    """The committed contents of the topics."""

    events: int
    wrong_events: list[str]
    """The events that are not the next ones, as sentences."""
    dead_letters: list[int]
    """Their numbers."""
    updates: list[Document]


@dataclass
class Findings:
    """What the oracle has counted, and the faults that it has found."""

    events: int = 0
    dead_letters: int = 0
    learned: int = 0
    versions: int = 0
    generations: int = 0
    compared_versions: int = 0
    """The versions of which all weights were compared with those of an offline pass."""
    compared_answers: int = 0
    answers: Counter[str] = field(default_factory=Counter)
    """The results of requests, by path and status."""
    seconds: list[float] = field(default_factory=list)
    """The seconds of each answered request for predictions."""
    faults: list[str] = field(default_factory=list)

    def add(self, kind: str, faults: Iterable[str]) -> None:
        """Add the first faults of a kind, and the number of all."""
        found = list(faults)
        self.faults += [f"{kind}: {fault}" for fault in found[:_SHOWN]]
        if len(found) > _SHOWN:
            self.faults.append(f"{kind}: {len(found) - _SHOWN} more")


async def committed(url: str) -> AsyncIterator[bytes]:
    """Yield the values of all committed records of a topic with one partition, in order."""
    server, _, name = url.removeprefix("kafka://").partition("/")
    consumer = aiokafka.AIOKafkaConsumer(
        bootstrap_servers=server, isolation_level="read_committed", max_partition_fetch_bytes=16 << 20
    )
    await consumer.start()
    try:
        partition = aiokafka.TopicPartition(name, 0)
        consumer.assign([partition])
        await consumer.seek_to_beginning(partition)
        end = (await consumer.end_offsets([partition]))[partition]
        while await consumer.position(partition) < end:
            fetched = await consumer.getmany(partition, timeout_ms=1000)
            for record in fetched.get(partition, ()):
                yield record.value
    finally:
        await consumer.stop()


async def read_topics(topics: Mapping[str, str]) -> TopicContents:
    """Return the contents of the topics; of the events only those that are not as expected."""
    wrong: list[str] = []
    at = -1
    async for value in committed(topics["events"]):
        at += 1
        if value != event(at):
            wrong.append(f"event {at} is {value!r}")
    letters = [number_of(value) async for value in committed(topics["dead_letters"])]
    updates = [decode_document(JSON_CONTENT_TYPE, value) async for value in committed(topics["updates"])]
    return TopicContents(at + 1, wrong, letters, updates)


def check(contents: TopicContents, asked: Sequence[Asked], lives: Sequence[ProcessLife]) -> Findings:
    """Check that nothing is lost or doubled, and that each request was answered rightly, or refused clearly.

    ``lives`` are those of the service.
    """
    findings = Findings()
    good = good_numbers(contents.events)
    findings.events = contents.events
    findings.add("the producer", contents.wrong_events)
    findings.dead_letters = len(contents.dead_letters)
    findings.add("dead letters", _letter_faults(contents, set(range(contents.events)).difference(good.tolist())))
    findings.add("versions", _order_faults(contents.updates))
    findings.add("versions", _learned_faults(findings, contents.updates, good))
    findings.add("answers", _answer_faults(findings, contents.updates, asked))
    for each in asked:
        findings.answers[f"{each.path} {each.status or 'no connection'}"] += 1
    findings.seconds = [each.done_s - each.sent_s for each in asked if _is_answered(each)]
    findings.add("requests", _refusal_faults(asked, lives))
    return findings


def _letter_faults(contents: TopicContents, bad: Set[int]) -> Iterator[str]:
    letters = Counter(contents.dead_letters)
    for number in sorted(bad - letters.keys()):
        yield f"event {number} is none"
    for number, count in letters.items():
        if count > 1 or number not in bad:
            yield f"event {number} is there {count} times"


def _order_faults(updates: Sequence[Document]) -> Iterator[str]:
    before = (0, 0, 0)
    for update in updates:
        generation, version, records = before
        is_next = (update.generation, update.version) == (generation, version + 1) and update.records >= records
        is_first = (update.generation, update.version) == (generation + 1, 1)
        if not (is_next if before != (0, 0, 0) and not is_first else is_first):
            yield f"{update.generation}.{update.version} of {update.records} records after {generation}.{version}"
        before = (update.generation, update.version, update.records)


def _learned_faults(findings: Findings, updates: Sequence[Document], good: npt.NDArray[np.int64]) -> Iterator[str]:
    """Learn all events in order without a stream, and compare each version with the model after as many."""
    findings.versions = len(updates)
    findings.generations = len({update.generation for update in updates})
    findings.learned = updates[-1].records if updates else 0
    if findings.learned != len(good):
        yield f"the last one has learned from {findings.learned} events, and {len(good)} are good"
    model = AdaptiveLinearModel(kinds=FEATURES, shapes=False)
    for update in sorted(updates, key=lambda each: each.records):
        while model.records < min(update.records, len(good)):
            some = [example(number) for number in good[model.records : update.records][:_ROWS_AT_ONCE].tolist()]
            model.learn([values for values, _ in some], [is_late for _, is_late in some])
        if update.records > len(good) or update.records != model.records:
            continue
        findings.compared_versions += 1
        rank, parameters = f"{update.generation}.{update.version}", without_state(update.parameters)
        if differing := _differences(parameters, model.parameters(state=False)):
            yield f"{rank} differs from an offline pass over {update.records} events in {differing}"
            continue
        resumed = AdaptiveLinearModel(kinds=FEATURES, shapes=False)
        resumed.start_from(update.parameters)
        if parameters is update.parameters or learned(resumed) != learned(model):
            yield f"{rank} has another state than an offline pass over {update.records} events"


def _differences(given: Mapping[str, Any], expected: Mapping[str, Any]) -> list[str]:
    names = sorted(given.keys() | expected.keys())
    return [
        name
        for name in names
        if name not in given or name not in expected or not np.array_equal(np.asarray(given[name]), expected[name])
    ]


def _answer_faults(findings: Findings, updates: Sequence[Document], asked: Sequence[Asked]) -> Iterator[str]:
    by_rank: dict[tuple[int, int], list[Asked]] = defaultdict(list)
    for each in filter(_is_answered, asked):
        by_rank[each.generation, each.version].append(each)
    for update in updates:
        answers = by_rank.pop((update.generation, update.version), [])
        if not answers:
            continue
        predict = LinearPredictor(update.parameters)
        expected = predict([row for each in answers for row in question(each.number)])
        given = [probability for each in answers for probability in each.probabilities]
        findings.compared_answers += len(answers)
        if len(given) != len(expected) or not np.allclose(given, expected, rtol=0, atol=1e-12):
            yield f"an answer of {update.generation}.{update.version} is not that of this version"
    for generation, version in sorted(by_rank):
        yield f"{generation}.{version} has answered, and was never committed"


def requests_of(folder: Path) -> list[Asked]:
    """Return the requests of all lives of the client, in the order of their ends; a kill may have cut a last line."""
    asked: list[Asked] = []
    for file in folder.glob("answers-*.jsonl"):
        *lines, _ = file.read_bytes().split(b"\n")
        asked += [msgspec.json.decode(line, type=Asked) for line in lines]
    return sorted(asked, key=lambda each: each.done_s)


def _is_answered(asked: Asked) -> bool:
    return asked.path == "/predict" and asked.status == 200


def _refusal_faults(requests: Sequence[Asked], lives: Sequence[ProcessLife]) -> Iterator[str]:
    for life in lives:
        end_s = _down_from_s(life)
        during = [each for each in requests if each.sent_s >= life.began_s and each.done_s < end_s]
        up_s = min((each.sent_s for each in during if each.status), default=end_s)
        begun = {
            path: min((each.done_s for each in during if (each.path, each.status) == (path, 200)), default=end_s)
            for path in _AFTER_START
        }
        if up_s - life.began_s > _START_S:
            yield f"no answer for {up_s - life.began_s:.1f} s after the start of process {life.pid}"
        for each in during:
            if each.status == 0 and each.sent_s > up_s:
                after_s = each.sent_s - up_s
                yield f"{each.path} lost its connection {after_s:.1f} s after the first answer: {each.detail}"
            if each.path in _AFTER_START and each.status == 503:
                is_clear = each.detail.startswith("application/problem+json") and " None " not in each.detail[:40]
                after_s = each.sent_s - begun[each.path]
                if after_s > 0.0 or not is_clear:
                    yield f"{each.path} was refused {after_s:.1f} s after its first answer: {each.detail}"
            elif each.status not in (0, 200) and each.path != "/readyz":
                yield f"{each.path} answered {each.status}: {each.detail}"


def _down_from_s(life: ProcessLife) -> float:
    return life.killed_s or life.ended_s or float("inf")
