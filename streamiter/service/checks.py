"""The check of a file against its surroundings: topics, secrets, folders, and the newest records of the input."""

from __future__ import annotations

import asyncio
import os
import shlex
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np

from streamiter.engine.storage.store import blobs_at, is_url
from streamiter.errors import ConfigurationError, ModelError, StreamiterError, TopicNotFound, described, did_you_mean
from streamiter.learn import BadRows
from streamiter.learn.labels import LabelReader
from streamiter.learn.negatives import SampleNegatives
from streamiter.models.rollbacks import early_deletion
from streamiter.service.learning import decoder_of
from streamiter.service.settings.features import FeatureRows
from streamiter.service.settings.labels import label_of, milliseconds_of, shares_of_labels, task_of
from streamiter.service.settings.proposal import TopicSample, sample_of_topic
from streamiter.service.settings.tables import (
    ANSWERS_FIELD,
    HttpSettings,
    InputSettings,
    LabelSettings,
    LearnSettings,
    ServiceSettings,
    http_secret,
    tls_context,
)
from streamiter.topics import Json, ReadRequest, topic
from streamiter.topics.topic import StartPosition
from streamiter.values.helpers.closing import closed_after
from streamiter.values.settings import KeyPath, SettingsDocument

Records = Sequence[Mapping[str, Any]]
Findings = dict[str, str]
"""What was found, by the key that it is about."""


class SettingsCheck:
    """Checks settings against topics and files. Each problem is told with its place in the file.

    :meth:`run` returns what was found; it raises ``SettingsError`` with all problems.
    """

    def __init__(self, settings: ServiceSettings, document: SettingsDocument) -> None:
        self._settings = settings
        self._document = document
        self._found: Findings = {}

    async def run(self) -> Findings:
        """Check everything, and return what was found."""
        given = self._settings.input
        topic_key = "topic" if given.history is None else "then"
        urls = {("input", topic_key): given.topic, ("publish", "topic"): self._settings.publish.topic}
        for name in ("answers", "dead_letter"):
            if (url := getattr(given, name)) is not None:
                urls["input", name] = url
        if (log := self._settings.predictions.log) is not None:
            urls["predictions", "log"] = log
        # Together: a server that does not answer is waited for only once.
        are_there = await asyncio.gather(*(self._check_topic(path, url) for path, url in urls.items()))
        store = self._settings.checkpoints.store
        await asyncio.to_thread(self._try, ("checkpoints", "store"), lambda: checked_store(store))
        self._check_http(self._settings.http)
        for key, url, of, at in (
            ("", given.history, given.topic, given.at),
            ("answers_", given.answers_history, given.answers, given.answers_at),
        ):
            if url is not None and of is not None:
                await self._check_history(key, url, of, at)
        self._try(("input", "decoder"), partial(decoder_of, given.decoder))
        is_read = dict(zip(urls, are_there, strict=True))
        is_read["input", "decoder"] = not self._document.is_wrong(("input", "decoder"))
        if all(is_read.get(("input", name), True) for name in (topic_key, "answers", "decoder")):
            self._check_records(await self._sample(given))
        self._document.check()
        return {key: self._found[key] for key in sorted(self._found)}

    async def _sample(self, given: InputSettings) -> TopicSample:
        decoder = decoder_of(given.decoder)
        sample = await sample_of_topic(topic(given.topic), decoder)
        return (
            sample
            if given.answers is None
            else sample.with_answers(
                await sample_of_topic(topic(given.answers), None if given.decoder == "predictions" else decoder)
            )
        )

    def _try(self, path: KeyPath, check: Callable[[], Any]) -> Any:
        """Return the result of a check; a text is what was found."""
        try:
            result = check()
        except (StreamiterError, OSError) as error:
            self._document.refuse(path, str(error).removeprefix(f"{'.'.join(path)}: ").removeprefix("[http]: "))
            return None
        if isinstance(result, str):
            self._found[".".join(path)] = result
        return result

    async def _check_topic(self, path: KeyPath, url: str) -> bool:
        try:
            found = topic(url)
            description = await found.describe()
        except TopicNotFound:
            kept_s = self._settings.publish.roll_back_s if path == ("publish", "topic") else None
            missing = f"expected a topic that exists, given {found.url}, which does not"
            self._document.refuse(path, f"{missing}; {creating(url, kept_s)}")
            return False
        except StreamiterError as error:
            self._document.refuse(path, str(error))
            return False
        partitions = _partitions(description.partitions)
        said = f"{found.url}: {partitions}, {description.records:,} records"
        if path == ("publish", "topic"):
            said += (
                f"; {early}"
                if (early := early_deletion(found, description, self._settings.publish.roll_back_s))
                else ""
            )
        self._found[".".join(path)] = said
        return True

    async def _check_history(self, key: str, url: str, of: str, at: StartPosition | None) -> None:
        """Read the first records of a history; they are not counted, which would read all files."""
        source = topic(url)
        try:
            reader = await source.open_reader(ReadRequest(stop="latest"))
            async with closed_after(reader.close):
                said = f"{source.url}: {_partitions(len(reader.positions()))}"
                first = await reader.read()
            decoder = source.default_decoder() or decoder_of(self._settings.input.decoder) or Json()
            records = [] if first is None else list(decoder.decode(first[:_FIRST_RECORDS]))
            self._found[f"input.{key}history"] = said + self._labels_or_times(records)
            partitions = (await topic(of).describe()).partitions
        except StreamiterError as error:
            self._document.refuse(("input", f"{key}history"), str(error))
            return
        if isinstance(at, Mapping) and len(at) != partitions:
            remedy = "write one for each, or the others are read from their beginning"
            self._document.expect(("input", f"{key}at"), f"offsets of {_partitions(partitions)}", remedy)

    def _labels_or_times(self, records: Sequence[Any]) -> str:
        """Return in how many records the label, or its time, can be read. Raises ConfigurationError if in none."""
        learn, reason = self._settings.learn, ""
        if not records or learn.negatives is not None:
            return ""
        time = learn.label.time
        what, read = (
            ("label", label_of(learn)) if time is None else ("time", lambda event: milliseconds_of(event[time]))
        )
        good = 0
        for record in records:
            try:
                read(record)
                good += 1
            except (KeyError, TypeError, ValueError, OverflowError) as error:
                reason = f"no field {error}" if isinstance(error, KeyError) else described(error)
        if not good:
            raise ConfigurationError(f"expected the {what} in the first {len(records):,} records, given {reason}")
        return f", the {what} in {good:,} of the first {len(records):,} records"

    def _check_http(self, http: HttpSettings) -> None:
        for secret in ("token", "tls_key_password"):
            for name in (f"{secret}_env", f"{secret}_file"):
                if getattr(http, name) is not None:
                    self._try(("http", name), partial(http_secret, http, secret))
        if not any(self._document.is_wrong(("http", f"tls_key_password_{end}")) for end in ("env", "file")):
            self._try(("http", "tls_certificate"), lambda: tls_context(http))
        self._found["http.address"] = f"http{'s' if http.tls_certificate else ''}://{http.address}"

    # ---- records

    def _check_records(self, sample: TopicSample) -> None:
        records = [record for record in sample.records if isinstance(record, Mapping)]
        bad = sum(sample.unreadable.values()) + len(sample.records) - len(records)
        if not records:
            self._found["learn"] = "no record to look at: whether label and features fit is not known"
            if bad:
                self._document.refuse(
                    ("input", "decoder"), f"expected records with fields, given {bad:,} that have none"
                )
            return
        if bad:
            self._found["input.decoder"] = f"{bad:,} of the newest {bad + len(records):,} records cannot be read"
        learn = self._settings.learn
        label = learn.label
        if learn.negatives is not None:
            records = self._with_negatives(learn, records)
        if label.event is None:
            self._check_labels(learn, records, "records")
            self._check_all_features(records)
            return
        answers = [record for record in records if record.get(label.event_field) == label.event]
        wanted = label.question
        questions = [
            record
            for record in records
            if (kind := record.get(label.event_field)) != label.event and (wanted is None or kind == wanted)
        ]
        if self._settings.input.answers is not None:
            for noun, events in (("answers", answers), ("questions", questions)):
                if not events:
                    self._found["learn"] = f"no {noun} to look at: whether label and features fit is not known"
        for part, events in (("event", answers), ("question", questions)):
            if not events and self._settings.input.answers is None:
                kinds = sorted({str(record.get(label.event_field)) for record in records})[:10]
                given = f"the field {label.event_field!r} has {', '.join(kinds)}"
                self._document.refuse(("learn", "label", part), f"expected such events among the newest, and {given}")
        self._check_key_and_time(label, questions, answers)
        if answers:
            self._check_labels(learn, [row for row in answers if row.get(label.field, 0) is not None], "answers")
        if questions:
            self._check_all_features(questions)

    def _check_key_and_time(self, label: LabelSettings, questions: Records, answers: Records) -> None:
        """Check the fields by which questions and answers are joined: with a wrong one, no event is learned."""
        for part, field in (("key", label.key), ("time", label.time)):
            for noun, events in (("questions", questions), ("answers", answers)):
                known = {name for event in events for name in event} - {ANSWERS_FIELD}
                if events and field is not None and field not in known:
                    meant = did_you_mean(field, known) or f"; the fields are {', '.join(sorted(known))}"
                    message = f"expected a field of the newest {noun}, given none of the name {field!r}{meant}"
                    self._document.refuse(("learn", "label", part), message)
                    return
        if (key := label.key) is not None and questions and answers:
            asked = {str(question.get(key)) for question in questions}
            found = sum(str(answer.get(key)) in asked for answer in answers)
            self._found["learn.label.key"] = (
                f"{found:,} of the newest {len(answers):,} answers have their question among the newest records"
            )
        if label.time is not None and (events := [*questions, *answers]):
            self._check_times(label.time, events)
            self._check_waits(label, label.time, questions, answers)

    def _check_waits(self, label: LabelSettings, time: str, questions: Records, answers: Records) -> None:
        """Compare ``within`` with the waits of the newest answers: if all are longer, no answer would be learned."""
        (asked, _), (answered, _) = (
            _times_of([(str(event.get(label.key or "")), event) for event in events], time)
            for events in (questions, answers)
        )
        since = dict(asked)
        waits_s = sorted((ms - since[key]) / 1_000 for key, ms in answered if key in since)
        if not waits_s or label.within_s is None:
            return
        in_time = sum(wait_s < label.within_s for wait_s in waits_s)
        if not in_time:
            self._document.refuse(
                ("learn", "label", "within"),
                f"expected a wait that is longer than that of some answers, given {label.within_s:g} s; the newest "
                f"{len(waits_s):,} answers came {waits_s[0]:g} to {waits_s[-1]:g} s after their questions; "
                "write a longer one",
            )
            return
        self._found["learn.label.within"] = (
            f"{in_time:,} of {len(waits_s):,} answers came in time, half of all after {waits_s[len(waits_s) // 2]:g} s"
        )

    def _check_times(self, field: str, events: Records) -> None:
        found, reason = _times_of([("", event) for event in events], field)
        times = [ms for _, ms in found]
        if not times:
            self._document.refuse(("learn", "label", "time"), reason)
            return
        first, last = (np.datetime64(ms, "ms").astype("datetime64[s]") for ms in (min(times), max(times)))
        self._found["learn.label.time"] = f"from {first} to {last} (UTC)"

    def _with_negatives(self, learn: LearnSettings, records: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
        """Return the records that are choices of items, and their negatives."""
        sample = SampleNegatives(label=learn.label.field, **learn.negatives or {})
        rows, reasons = list[Mapping[str, Any]](), list[str]()
        for record in records:
            try:
                rows += sample.rows_of(record)
            except ModelError as error:
                reasons.append(str(error).removeprefix("sampled_negatives: "))
        if not rows:
            self._document.refuse(("learn", "negatives", "item"), reasons[0])
        self._found["learn.negatives"] = (
            f"{len(records) - len(reasons):,} of the newest {len(records):,} records choose an item"
        )
        return rows

    def _check_labels(self, learn: LearnSettings, records: Sequence[Mapping[str, Any]], noun: str) -> None:
        read, reasons, labels = label_of(learn), [], []
        model = LabelReader("label", task_of(learn.kind), positive=learn.label.positive)
        for record in records:
            try:
                label = read(record)
                [part] = model.read([label], np.ones(1, dtype=np.bool_))[-1:]
                model.take_over(part, 1)
                labels.append(label)
            except BadRows as bad:
                reasons.append(bad.reason.partition(": ")[2])
            except KeyError as error:
                reasons.append(f"no field {error}{did_you_mean(learn.label.field, record)}")
            except (TypeError, ValueError) as error:
                reasons.append(described(str(error)))
        if reasons and not labels:
            self._document.refuse(("learn", "label"), f"expected a label in the newest {noun}, given {reasons[0]}")
            return
        found = f"{len(labels):,} labels in the newest {len(records):,} {noun}"
        if reasons:
            found += f"; {len(reasons):,} have none ({reasons[0]})"
        if labels:
            found += f", {shares_of_labels(learn, labels)}"
        if model.reading is not None and model.reading.kind == "binary" and model.reading.labels is not None:
            found += f"; predictions are the probability of {model.reading.names[1]!r}"
        self._found["learn.label"] = found

    def _check_all_features(self, records: Sequence[Mapping[str, Any]]) -> None:
        """Check the features of the service, and those of its challenger."""
        self._check_features(self._settings.learn, records, ("learn", "features"))
        if (other := self._settings.challenger.file) is not None:
            self._check_features(other.learn, records, ("challenger", "file", "learn", "features"))

    def _check_features(self, learn: LearnSettings, records: Sequence[Mapping[str, Any]], path: KeyPath) -> None:
        features = FeatureRows(learn)
        known = {name for record in records for name in record}
        for name in sorted((features.fields or frozenset()) - known):
            meant = did_you_mean(name, known) or f"; the fields are {', '.join(sorted(known))}"
            message = f"expected a field of the newest records, given none{meant}"
            self._document.refuse((*path, name), message)
        refused = 0
        try:
            features.check(list(records))
        except BadRows as bad:
            refused = len(bad.rows)
            if refused > _REFUSED_SHARE * len(records):
                reason = bad.reason.removeprefix("[learn] features: ").removeprefix("AdaptiveLinearModel: ")
                self._document.refuse(path, f"{reason} ({refused:,} of {len(records):,} records)")
                return
        except ModelError as error:
            self._document.refuse(path, str(error))
            return
        names = sorted(features.fields or known - features.without)
        ending = f"; {refused:,} of {len(records):,} records are refused" if refused else ""
        self._found[".".join(path)] = f"{len(names)} fields: {', '.join(names[:_NAMES_SHOWN])}{ending}"


def _times_of(events: Sequence[tuple[str, Mapping[str, Any]]], field: str) -> tuple[list[tuple[str, int]], str]:
    """Return the times of events by their keys, in milliseconds, and why the last one without a time has none."""
    times, reason = list[tuple[str, int]](), ""
    for key, event in events:
        try:
            times.append((key, milliseconds_of(event[field])))
        except (KeyError, ValueError, OverflowError) as error:
            reason = described(error)
    return times, reason


def _partitions(count: int) -> str:
    return "1 partition" if count == 1 else f"{count} partitions"


_NAMES_SHOWN: Final = 10
_FIRST_RECORDS: Final = 500
# More records than these are refused because of the file, and not because they are damaged.
_REFUSED_SHARE: Final = 0.1


def creating(url: str, kept_s: float | None = None) -> str:
    """Return the command that creates a topic; ``kept_s`` is for how long a topic of versions keeps them."""
    settings = {} if kept_s is None else topic(url).settings_to_keep(kept_s)
    options = "".join(f" --setting {name}={value}" for name, value in settings.items())
    return f"streamiter topics create {shlex.quote(url)}{options}"


def checked_store(store: str) -> str:
    """Return what is known of the store of the checkpoints; raise an error where none can be written."""
    if is_url(store):
        blobs = blobs_at(store)
        with blobs.explained("checkpoints"):
            blobs.folders()
        return f"{blobs.place} answers"
    folder = Path(store)
    above = next(each for each in (folder, *folder.absolute().parents) if each.exists())
    if not above.is_dir() or not os.access(above, os.W_OK):
        raise ConfigurationError(f"expected a folder to write to, given {str(above)!r}, which is none; choose another")
    return f"{store} is there" if folder.exists() else f"{store} will be made"
