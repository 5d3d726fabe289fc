"""Proposes a file of settings from the newest records of a topic.

``sample_of_topic`` reads the records, and ``proposal_of`` finds the label and the kinds of the fields.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Final, NamedTuple

import orjson

from streamiter.errors import DOCUMENTATION, DecodeError
from streamiter.service.settings.field_comparison import FieldComparison
from streamiter.service.settings.labels import milliseconds_of
from streamiter.service.settings.tables import ANSWER, ANSWERS_FIELD, FeatureKind, LearningKind
from streamiter.topics import Decoder, Json, ReadRequest, Topic
from streamiter.topics.connecting import last_records
from streamiter.values.field_kinds import BLANK, PLAIN_NUMBER, ReadText, read_text
from streamiter.values.field_states import OTHERS_MAX, TEXTS_THAT_DECIDE
from streamiter.values.helpers.closing import closed_after
from streamiter.values.numbers import is_number

SAMPLE: Final = 2_000
"""The number of records that are looked at."""

QUESTION: Final = "question"


@dataclass(frozen=True)
class TopicSample:
    """The newest records of a topic."""

    records: list[Any]
    """The decoded records of all partitions, in the order of their time stamps."""
    times_ms: list[int]
    """The time stamp of each record."""
    unreadable: dict[str, int] = field(default_factory=dict)
    """How many records could not be decoded, by reason."""

    def with_answers(self, answers: TopicSample) -> TopicSample:
        """Return questions and answers of two topics, each marked, in the order of their time stamps.

        Answers come more rarely, so the newest ones reach further back: those before all of the questions are left out,
        unless all are.
        """
        first = min(self.times_ms, default=0)
        if max(answers.times_ms, default=first) < first:
            first = min(answers.times_ms)
        marked = [
            (time_ms, {**record, ANSWERS_FIELD: mark} if isinstance(record, dict) else record)
            for sample, mark in ((self, QUESTION), (answers, ANSWER))
            for time_ms, record in zip(sample.times_ms, sample.records, strict=True)
            if mark == QUESTION or time_ms >= first
        ]
        marked.sort(key=lambda each: each[0])
        unreadable = Counter(self.unreadable) + Counter(answers.unreadable)
        return TopicSample([record for _, record in marked], [time_ms for time_ms, _ in marked], dict(unreadable))


async def sample_of_topic(source: Topic, decoder: Decoder | None = None) -> TopicSample:
    """Read the newest records of a topic, about the same number of each partition."""
    decoder = decoder or source.default_decoder() or Json()
    offsets = (await source.describe()).offsets
    start = last_records(offsets, math.ceil(SAMPLE / max(len(offsets), 1)))
    reader = await source.open_reader(ReadRequest(start=start, stop="latest"))
    found: list[tuple[int, Any]] = []
    unreadable: Counter[str] = Counter()
    async with closed_after(reader.close):
        while (batch := await reader.read()) is not None:
            for at in range(len(batch)):
                one = batch[at : at + 1]
                try:
                    found.append((one.timestamps_ms[0], next(iter(decoder.decode(one)))))
                except DecodeError as error:
                    unreadable[next(iter(error.failures.values()))] += 1
    found.sort(key=lambda each: each[0])
    return TopicSample([record for _, record in found], [time_ms for time_ms, _ in found], dict(unreadable))


# ---- fields


@dataclass
class FieldProfile:
    """The values of one field in the sample; complete before the first question about them."""

    name: str
    values: list[Any]
    """The values that are not None, without few of another kind."""
    others: int = 0
    """The number of those few, such as a text among numbers, that the service would refuse."""

    @cached_property
    def distinct(self) -> int:
        """The number of different values; lists and objects count as one."""
        return len({value for value in self.values if isinstance(value, (str, int, float))})

    @cached_property
    def are_numbers(self) -> bool:
        """Whether all values are numbers or truth values."""
        return bool(self.values) and all(map(is_number, self.values))

    @cached_property
    def are_texts(self) -> bool:
        """Whether all values are texts."""
        return bool(self.values) and all(isinstance(value, str) for value in self.values)

    @cached_property
    def are_truths(self) -> bool:
        """Whether all values are true, false, 1 or 0, and both occur."""
        return self.are_numbers and set(self.values) == {0, 1}

    @cached_property
    def are_times(self) -> bool:
        """Whether all values look like times: ISO 8601, or seconds or milliseconds of this century."""
        return bool(self.values) and all(map(_is_time, self.values))

    @property
    def label_kind(self) -> LearningKind:
        """The kind of learning if the field is the label. Labels of a rare event may all be false so far."""
        are_classes = self.are_numbers and set(self.values) <= {0, 1}
        return "multiclass" if self.are_texts else "classification" if are_classes else "regression"

    def kind(self) -> tuple[FeatureKind, str]:
        """Return the proposed kind, and the reason."""
        kind, reason = self._kind()
        if self.others and kind in ("number", "time"):
            noun = "value is" if self.others == 1 else "values are"
            reason += f"; {self.others:,} {noun} no {kind}, and refused"
        return kind, reason

    def _kind(self) -> tuple[FeatureKind, str]:
        if not self.values:
            return "ignore", "no value in the sample"
        if self.are_times:
            return "time", "its hour, weekday, month and trend"
        count = len(self.values)
        if self.are_numbers:
            if self.distinct == 1:
                return "number", f"always {_shown(self.values[0])} so far"
            is_counted = self.distinct == count > _FEW and all(isinstance(value, int) for value in self.values)
            if is_counted and (self.name.endswith("id") or sorted(self.values) == self.values):
                return "ignore", "a different number in each record"
            return "number", f"from {_shown(min(self.values))} to {_shown(max(self.values))}"
        if not self.are_texts:
            kinds = sorted({_noun(value) for value in self.values})
            return "ignore", f"values of a kind that is not learned from: {', '.join(kinds)}"
        if self.distinct == 1:
            return "category", f"always {_shown(self.values[0])} so far"
        numbers = [number for code, number in map(_read_text, self.values) if code == PLAIN_NUMBER]
        if len(numbers) >= _OF_ONE_KIND * count:
            return "number", f"texts that are numbers, from {min(numbers):g} to {max(numbers):g}"
        words = sum(len(value.split()) for value in self.values) / count
        if words >= _WORDS_OF_A_TEXT:
            return "words", f"about {words:.0f} words"
        if self.distinct > _FEW and self.distinct > count / 2:
            return "ignore", f"{self.distinct:,} different texts in {count:,} records"
        common = Counter(self.values).most_common(1)[0][0]
        return "category", f"{self.distinct:,} different texts, mostly {_shown(common)}"


_ISO: Final = re.compile(r"\d{4}-\d{2}-\d{2}(?:[T ]\d{2}:\d{2}|$)")
# 2000-01-01 to 2100-01-01.
_CENTURY_MS: Final = (946_684_800_000, 4_102_444_800_000)
# As the learner decides: see streamiter.values.field_states.
_OF_ONE_KIND: Final = 1 - OTHERS_MAX / TEXTS_THAT_DECIDE
# Shorter texts are names and ids.
_WORDS_OF_A_TEXT: Final = 5
_FEW: Final = 20


def _read_text(value: str) -> ReadText:
    return read_text(value, None)


def _is_time(value: Any) -> bool:
    if isinstance(value, str) and not _ISO.match(value):
        return False
    try:
        return _CENTURY_MS[0] <= milliseconds_of(value) <= _CENTURY_MS[1]
    except (OverflowError, ValueError):
        return False


def _noun(value: object) -> str:
    nouns = {bool: "truth values", int: "numbers", float: "numbers", str: "texts", list: "lists", dict: "objects"}
    return nouns.get(type(value), type(value).__name__)


def _shown(value: object) -> str:
    """Return a value for a comment: one line, cut."""
    shown = f"{value:g}" if is_number(value) and not isinstance(value, bool) else _toml(value)
    return shown if len(shown) <= _SHOWN else f"{shown[:_SHOWN]}…"


_SHOWN: Final = 30


def _profiles(records: Iterable[Mapping[str, Any]]) -> dict[str, FieldProfile]:
    profiles: dict[str, FieldProfile] = {}
    for record in records:
        for name, value in record.items():
            if not name.strip():
                continue  # No file can name it.
            profile = profiles.setdefault(name, FieldProfile(name, []))
            if value is not None:
                profile.values.append(value)
    return {name: _of_one_kind(profile) for name, profile in profiles.items()}


def _of_one_kind(profile: FieldProfile) -> FieldProfile:
    """Return the profile without few values of another kind than the others; texts for a missing value do not count."""
    values = profile.values
    if all(map(is_number, values)):
        return profile
    for is_of_kind in (_is_time, is_number, _is_text):
        kept = list(filter(is_of_kind, values))
        if _OF_ONE_KIND * len(values) <= len(kept) < len(values):
            others = [value for value in values if not is_of_kind(value)]
            refused = sum(not _is_text(value) or _read_text(value)[0] != BLANK for value in others)
            return FieldProfile(profile.name, kept, refused)
    return profile


def _is_text(value: object) -> bool:
    return isinstance(value, str)


# ---- the label


class DelayedLabelFound(NamedTuple):
    """Questions and answers that were found in the sample."""

    event_field: str
    answer: str
    question: str
    key: str
    value: str | None
    """The field of the label; None: the label is whether there is an answer."""
    time: str | None
    """The field with the time of an event; None: only the time stamps of the records tell it."""
    longest_s: float | None
    """The longest time from a question to its answer; None: no wait is known."""


_EXAMPLE: Final = DelayedLabelFound(ANSWERS_FIELD, ANSWER, QUESTION, "id", None, None, None)


def _by_names(rows: Sequence[Mapping[str, Any]]) -> DelayedLabelFound:
    """Return key, label and time by the names and values of the fields, where no wait is known."""
    events = [[row for row in rows if row.get(ANSWERS_FIELD) == event] for event in (ANSWER, QUESTION)]
    answers, questions = map(_profiles, events)
    keys, time = _shared_fields(answers, questions, ANSWERS_FIELD)
    if not keys:
        return _EXAMPLE
    label = next((each for each in _label_candidates(answers) if each.name not in questions), None)
    value = None if label is None or set(label.values) == {True} else label.name
    return _EXAMPLE._replace(key=keys[0].name, value=value, time=time)


def _shared_fields(
    of_answers: Mapping[str, FieldProfile], of_questions: Mapping[str, FieldProfile], event_field: str
) -> tuple[list[FieldProfile], str | None]:
    """Return the fields that may be the key of questions and answers, and the field with the time of both."""
    keys = [
        profile
        for name, profile in of_answers.items()
        if name in of_questions and name != event_field and not profile.are_times
        if profile.distinct > len(profile.values) / 2
    ]
    times = [name for name, profile in of_answers.items() if profile.are_times and name in of_questions]
    return keys, times[0] if times and of_questions[times[0]].are_times else None


class SampledEvent(NamedTuple):
    """A record with fields: its number in the sample, the time stamp of the record, and the fields."""

    number: int
    time_ms: int
    row: dict[str, Any]

    def milliseconds(self, time: str | None) -> float:
        """Return the time in the field ``time``, NaN if it is none, or the time stamp."""
        if time is None:
            return self.time_ms
        return milliseconds_of(self.row[time]) if _is_time(self.row.get(time)) else math.nan


def find_delayed_label(sample: TopicSample, told_by: str | None = None) -> DelayedLabelFound | None:
    """Find two kinds of events of which the later one has the key of the earlier one, and a field more.

    ``told_by`` is the field that tells the kind of an event; None: any.
    """
    rows = [
        SampledEvent(number, time_ms, row)
        for number, (time_ms, row) in enumerate(zip(sample.times_ms, sample.records, strict=True))
        if isinstance(row, dict)
    ]
    profiles = _profiles(event.row for event in rows)
    for event_field, profile in profiles.items():
        is_asked = told_by in (None, event_field) and len(profile.values) == len(rows)
        if not is_asked or not profile.are_texts or not 2 <= profile.distinct <= _EVENTS_MAX:
            continue
        by_event: dict[str, list[SampledEvent]] = {}
        for event in rows:
            by_event.setdefault(event.row[event_field], []).append(event)
        of_event = {name: _profiles(event.row for event in events) for name, events in by_event.items()}
        found = [
            match
            for answer in by_event
            for question in by_event
            if answer != question and (match := _match(event_field, answer, question, by_event, of_event))
        ]
        if found:
            return max(found, key=lambda each: (each[1].value is not None, each[0]))[1]
    return None


_EVENTS_MAX: Final = 20
# Fewer answers match by chance.
_MATCHES_MIN: Final = 3
_MATCHING_SHARE: Final = 0.2
# If nearly all questions have an answer, that there is one is no label to learn.
_ANSWERED_MAX: Final = 0.9


def _is_event(event_field: str, answer: str) -> str:
    return f"{event_field} == '{answer}'"


def _match(
    event_field: str,
    answer: str,
    question: str,
    by_event: Mapping[str, Sequence[SampledEvent]],
    of_event: Mapping[str, Mapping[str, FieldProfile]],
) -> tuple[int, DelayedLabelFound] | None:
    """Return how many answers have a question before them, and what was found.

    Where all answers say true, such as reports of frauds, and some questions have none, the label is whether one comes.
    """
    of_answers, of_questions = of_event[answer], of_event[question]
    label = next((each.name for each in _label_candidates(of_answers) if each.name not in of_questions), None)
    if label is None and not (of_questions.keys() - of_answers and FieldComparison.of(_is_event(event_field, answer))):
        return None
    keys, time = _shared_fields(of_answers, of_questions, event_field)
    best: tuple[int, DelayedLabelFound] | None = None
    for key in keys:
        asked = {str(event.row.get(key.name)): event for event in reversed(by_event[question])}
        waits = [
            event.milliseconds(time) - asked[text].milliseconds(time)
            for event in by_event[answer]
            if (text := str(event.row.get(key.name))) in asked and event.number > asked[text].number
        ]
        waits = [wait_ms for wait_ms in waits if wait_ms >= 0]
        enough = max(_MATCHES_MIN, _MATCHING_SHARE * len(by_event[answer]))
        are_most_answered = len(waits) > _ANSWERED_MAX * len(by_event[question])
        if label is None and are_most_answered:
            continue
        says_nothing = label is not None and set(of_answers[label].values) == {True} and not are_most_answered
        if len(waits) >= enough and (best is None or len(waits) > best[0]):
            found = DelayedLabelFound(
                event_field, answer, question, key.name, None if says_nothing else label, time, max(waits) / 1000
            )
            best = len(waits), found
    return best


_LABEL_NAME: Final = re.compile(
    r"(?:^|_)(?:label|target|y|outcome|result|click(?:ed)?|convert(?:ed)?|churn(?:ed)?|fraud|late|delay|price|rating|won|"
    r"success|is_\w+)$",
    re.IGNORECASE,
)


def _label_candidates(profiles: Mapping[str, FieldProfile]) -> list[FieldProfile]:
    """Return the fields that may be labels, the likeliest first."""

    def rank(profile: FieldProfile) -> tuple[bool, bool, bool]:
        is_class = profile.are_texts and profile.distinct <= _EVENTS_MAX
        return not _LABEL_NAME.search(profile.name), not profile.are_truths, is_class

    possible = [
        profile
        for profile in profiles.values()
        if not profile.are_times
        and (profile.are_numbers or (profile.are_texts and 2 <= profile.distinct <= _EVENTS_MAX))
    ]
    return sorted(possible, key=rank)


# ---- the file


@dataclass(frozen=True)
class Proposal:
    """The proposed file, and what the sample does not tell."""

    text: str
    notes: list[str]


def proposal_of(
    sample: TopicSample, name: str, topic: str, updates: str, dead_letters: str, answers: str | None = None
) -> Proposal:
    """Return a file for the topic ``topic``, whose other topics are ``updates`` and ``dead_letters``; all are URLs.

    With the topic ``answers``, the sample is one :meth:`~TopicSample.with_answers`.
    """
    rows = [row for row in sample.records if isinstance(row, dict)]
    notes = [f"{count:,} records are not read: {reason}" for reason, count in sample.unreadable.items()]
    if len(rows) < len(sample.records):
        notes.append(f"{len(sample.records) - len(rows):,} records are no JSON objects, and are not learned from")
    if not rows:
        notes.append("the topic has no record to look at: label and features are examples")
    delayed = find_delayed_label(sample, None if answers is None else ANSWERS_FIELD)
    if answers is not None and delayed is None:
        delayed = _by_names(rows)
        found = f"the key {delayed.key!r} is a guess by its name, and within is an example"
        examples = "key and within are examples" if delayed is _EXAMPLE else found
        notes.append(f"too few answers have the key of a question before them in the newest records: {examples}")
    questions = rows if delayed is None else [row for row in rows if row.get(delayed.event_field) == delayed.question]
    profiles = _profiles(questions)
    if delayed is None:
        kind, label, not_features = _label_of_each(profiles, notes)
        notes += _answers_without_event(rows, not_features)
    else:
        kind, label, not_features = _delayed_label(delayed, rows, notes)
    features = [profile for each, profile in profiles.items() if each not in not_features]
    text = _FILE.format(
        name=_toml(name),
        records=f"{len(rows):,}",
        topic=_toml(topic),
        answers="" if answers is None else f"answers = {_toml(answers)} # the labels, which come later\n",
        updates=_toml(updates),
        dead_letters=_toml(dead_letters),
        kind=_toml(kind),
        label=label,
        features=_features(features, None if delayed is None else delayed.time),
        documentation=DOCUMENTATION,
    )
    return Proposal(text, notes)


def _label_of_each(profiles: Mapping[str, FieldProfile], notes: list[str]) -> tuple[LearningKind, str, set[str]]:
    """Return kind and label where each record has its label."""
    candidates = _label_candidates(profiles)
    if not candidates:
        if profiles:
            notes.append("no field looks like a label: correct the key label")
        return "classification", 'label = { field = "label" }', {"label"}
    best, *others = candidates
    notes += _one_label_only(best)
    if not _LABEL_NAME.search(best.name) and not best.are_truths:
        notes.append(f"{best.name!r} is only a guess of the label, as good as {len(others):,} other fields; see label")
    names = ", ".join(_toml(each.name) for each in others[:_OTHERS_SHOWN])
    also = f"# Other fields that may be the label: {names}\n" if others else ""
    return best.label_kind, f"{also}label = {{ field = {_toml(best.name)} }}", {best.name}


_OTHERS_SHOWN: Final = 5


def _one_label_only(label: FieldProfile) -> list[str]:
    """Return what to tell of a label that has always been the same."""
    if label.distinct != 1:
        return []
    value = _shown(label.values[0])
    return [
        f"the label {label.name!r} is always {value} so far: its kind is a guess, and nothing is learned before "
        "another label comes"
    ]


def _answers_without_event(rows: Sequence[Mapping[str, Any]], label: set[str]) -> list[str]:
    """Return what to tell if records with the label are answers to others, and no field says which they are."""
    of_answers = _profiles(row for row in rows if label & row.keys())
    of_questions = _profiles(row for row in rows if not label & row.keys())
    for name in of_answers.keys() & of_questions.keys() if of_questions.keys() - of_answers.keys() else ():
        answers = set(map(str, of_answers[name].values))
        is_key = not of_answers[name].are_times and len(answers) > len(of_answers[name].values) / 2
        if is_key and len(answers.intersection(map(str, of_questions[name].values))) >= _MATCHES_MIN:
            return [
                f"records with {' and '.join(sorted(label))} seem to be answers to others with the same {name}: let a "
                "field of each record, such as event, tell which it is, and write label as this page says: "
                f"{DOCUMENTATION}/service.html#labels"
            ]
    return []


def _delayed_label(
    found: DelayedLabelFound, rows: Sequence[Mapping[str, Any]], notes: list[str]
) -> tuple[LearningKind, str, set[str]]:
    """Return kind and label where the label comes in an answer."""
    events = {row.get(found.event_field) for row in rows}
    value = _is_event(found.event_field, found.answer) if found.value is None else found.value
    label = {"value": value} if found.value is None else {"field": value}
    keys: dict[str, Any] = {"event": found.answer, "key": found.key, **label}
    if found.event_field == ANSWERS_FIELD:
        keys = {"key": found.key} | ({} if found.value is None else label)
    elif found.event_field != "event":
        keys["event_field"] = found.event_field
    if len(events) > 2:
        keys["question"] = found.question
    keys["within"] = _within(max((found.longest_s or 0.0) * 2, _WITHIN_MIN_S))
    if found.time is not None:
        keys["time"] = found.time
    kind: LearningKind = "classification"
    if found.value is None:
        keys["otherwise"] = False
    else:
        values = _profiles(row for row in rows if row.get(found.event_field) == found.answer)[found.value]
        kind = values.label_kind
        notes += _one_label_only(values)
    line = f"label = {{ {', '.join(f'{name} = {_toml(value)}' for name, value in keys.items())} }}"
    if kind == "regression":
        middle = f"{found.value} > {sorted(values.values)[len(values.values) // 2]:g}"
        line = f'# For a class: kind = "classification", and value in place of field: value = {_toml(middle)}\n{line}'
    if found.longest_s is not None:
        longest = _within(found.longest_s)
        notes.append(
            f"the longest wait for an answer was {longest}; a later answer than {keys['within']} does not count"
        )
    if found.value is None:
        answer = "an answer" if found.event_field == ANSWERS_FIELD else f"a {found.answer!r}"
        notes.append(f"the label is whether {answer} comes in time; without one it is false")
    return kind, line, {found.event_field, found.key, value}


_WITHIN_UNITS: Final = {"d": 86_400, "h": 3_600, "min": 60, "s": 1}
# The time stamps of records that were written together say little about the time between events.
_WITHIN_MIN_S: Final = 3_600


def _within(seconds: float) -> str:
    """Return a duration, rounded up.

    >>> _within(80_000)
    '23h'
    """
    unit = next(unit for unit, unit_s in _WITHIN_UNITS.items() if seconds >= 3 * unit_s or unit == "s")
    return f"{max(math.ceil(seconds / _WITHIN_UNITS[unit]), 1)}{unit}"


def _features(profiles: Sequence[FieldProfile], time: str | None) -> str:
    """Return the table of features; ``time`` is the field of the event time, whose trend only grows."""
    proposed = [(profile.name, *(_EVENT_TIME if profile.name == time else profile.kind())) for profile in profiles]
    if all(kind == "ignore" for _, kind, _ in proposed):
        return '# No field looks like a feature, so all of them are.\nfeatures = "all"'
    lines = [(f"{_toml_key(name)} = {_toml(kind)}", reason) for name, kind, reason in proposed]
    width = min(max(len(line) for line, _ in lines), _ALIGNED)
    return "\n".join(["[learn.features]", *(f"{line:{width}} # {reason}" for line, reason in lines)])


_EVENT_TIME: Final[tuple[FeatureKind, str]] = ("ignore", 'the event time; "time": its hour, weekday, month and trend')
_ALIGNED: Final = 40
_BARE: Final = re.compile(r"[A-Za-z0-9_-]+")


def _toml_key(name: str) -> str:
    return name if _BARE.fullmatch(name) else _toml(name)


def _toml(value: object) -> str:
    """Return a text or a truth value as TOML; JSON writes these the same way, except for one control character."""
    return orjson.dumps(value, default=str).decode().replace("\x7f", "\\u007f")


_FILE: Final = """\
# A service of streamiter. Times and sizes have units: "250ms", "36h", "1 MiB".
# All keys: {documentation}/service.html#the-file

[service]
name = {name} # the name of the model, of its flow and its checkpoints

[input]
topic = {topic}
{answers}start = "earliest" # or "latest"; it counts in the first run only
dead_letter = {dead_letters} # for records that cannot be learned from

# From {records} records of the topic. Correct what is wrong here.
[learn]
kind = {kind} # "classification" (true or false), "multiclass" or "regression"
{label}
learner = "default" # it needs no settings

# The kind of each field: "number", "category" (each different value counts), "words" (each word of a text counts),
# "time" (its hour, weekday, month and trend count) or "ignore".
{features}

[publish]
topic = {updates}
every = "1s" # or records = 1000

[checkpoints]
store = "checkpoints" # a folder on a disk that lasts, or s3://bucket/prefix
interval = "1s"

[http]
address = "127.0.0.1:8080" # another host needs token_file, and tls_certificate and tls_key or behind_proxy = true
"""
