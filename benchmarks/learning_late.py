"""Labels that come later: each schedule of ``train_online``, and river record by record in the same order.

The flow does not report which question a prediction belongs to, so :func:`ours` takes that from the order of
``learning_late_streams``, and checks it by the labels and the numbers of the events.
"""

from __future__ import annotations

import contextlib
import hashlib
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from operator import itemgetter
from typing import Any, Final, Literal, NamedTuple

import numpy as np
import orjson

from benchmarks.kafka import run
from benchmarks.learning_late_streams import LATE_STREAMS, SCHEDULES, LateStream, Schedule, order
from benchmarks.learning_peers import Floats, River, losses, without_flow
from benchmarks.learning_streams import LearningStream, MissingStream
from benchmarks.measuring import Stopwatch
from benchmarks.report import markdown_table
from benchmarks.session import Session
from streamiter import Columns, Flow, Stream, topic
from streamiter.learn import AdaptiveLinearModel, DelayedLabels, train_online
from streamiter.learn.expert_weights import RowSteps
from streamiter.operators import Context, Source, SourceBatch
from streamiter.topics import OutgoingBatch
from streamiter.topics.topic import Topic

__all__ = ["KTENA_QUESTIONS_MAX", "TITLE", "Followed", "cuts", "follow", "late_section", "ours"]

# ---- who follows them


class Followed(NamedTuple):
    """What a learner predicted, by question."""

    predictions: Floats
    rate: float = float("nan")
    """Questions a second of CPU time."""


def _labels(stream: LateStream, schedule: Schedule) -> DelayedLabels:
    return DelayedLabels(
        key_of=itemgetter("row"),
        is_answer=itemgetter("answer"),
        features=list(_features(stream).names),
        target_of=itemgetter("label"),
        within_s=stream.within_ms / 1_000,
        otherwise=False,
        schedule=schedule,
    )


def _features(stream: LateStream) -> Columns:
    assert isinstance(stream.rows.features, Columns)
    return stream.rows.features


def _records(stream: LateStream) -> Columns:
    events, times = stream.events()
    rows, is_answer = events // 2, events % 2 == 1
    of_events = {"row": rows, "answer": is_answer, "label": stream.rows.labels[rows], "at": times}
    return Columns({**_features(stream)[rows].arrays, **of_events})


def _trained(stream: LateStream, schedule: Schedule, make: Callable[[Flow], Stream]) -> tuple[list[Any], Any, Floats]:
    """Return what the flow predicted, as it reports it, its last model, and CPU seconds in an array."""
    flow = Flow("late labels")
    training = train_online(make(flow), labels=_labels(stream, schedule))
    predicted, models = training.predictions.collect(), training.models.collect()
    with Stopwatch() as watch:
        flow.run()
    return predicted.items, models.items[-1].parameters, np.array([watch.cpu_seconds])


def _timed(stream: Stream) -> Stream:
    return stream.event_time("at", unit="ms", check_unit=False)


def ours(stream: LateStream, schedule: Schedule) -> Followed:
    """Learn with ``train_online(labels=…)``; the order tells the question of each prediction that it reports."""
    records = _records(stream)
    reported, _, (cpu_seconds,) = _trained(stream, schedule, lambda flow: _timed(flow.from_items(records)))
    settled = [(row, event) for kind, row, event in order(stream, schedule) if kind in ("learn", "confirm")]
    rows, events = np.array(settled).T
    found, targets, numbers = (
        np.concatenate([part[field] for part in reported]) for field in ("predictions", "targets", "numbers")
    )
    if not (np.array_equal(targets, stream.rows.labels[rows]) and np.array_equal(numbers, events)):
        raise AssertionError(f"{stream.name}, {schedule}: expected that questions are settled in the order of events")
    predictions = np.empty(len(stream))
    predictions[rows] = found
    return Followed(predictions, len(stream) / cpu_seconds)


def river(stream: LateStream, schedule: Schedule, *, has_weights_of_ktena: bool = False) -> Followed:
    """Learn with river's logistic regression, record by record.

    With "weighted" a True answer is learned, and the slope with which its question was learned is taken back, as in
    streamiter; or both steps have the weights of Ktena et al. (2019). The scaler counts each question once.
    """
    learner = River(stream.rows)
    happened = list(order(stream, schedule))
    predictions = np.empty(len(stream))
    with Stopwatch() as watch:
        for kind, row, _ in happened:
            if kind == "predict":
                predictions[row] = learner.predict(row)
            elif kind == "assume":
                weight = 1.0 - learner.predict(row) ** 2 if has_weights_of_ktena else 1.0
                learner.learn_weighted(row, label=False, weight=weight, is_new=True)
            elif kind == "learn" and schedule != "weighted":
                learner.learn(row)
            elif kind == "learn":
                weight = 1.0 + learner.predict(row) if has_weights_of_ktena else 1.0
                learner.learn_weighted(row, label=True, weight=weight, is_new=False)
                if not has_weights_of_ktena:
                    # The slope for False is the prediction.
                    taken_back = -float(predictions[row]) / learner.predict(row)
                    learner.learn_weighted(row, label=False, weight=taken_back, is_new=False)
    return Followed(predictions, len(stream) / watch.cpu_seconds)


def ktena(stream: LateStream) -> Followed:
    """Learn with the model of ``train_online``, and with the weights of Ktena et al. (2019) of its own predictions.

    Each of its steps is a row with a weight for the model, which judges its experts by it.
    """
    model = AdaptiveLinearModel()
    all_rows = model.rows(_features(stream))
    predictions = np.full(len(stream), 0.5)
    for kind, row, _ in order(stream, "weighted"):
        if kind in ("predict", "confirm", "late"):
            continue
        is_true = kind == "learn"
        one = RowSteps.one_each(1, learns=False)._replace(rows=np.array([row]))
        found = float(model.step(all_rows, one, [None])[0])
        chance = 0.5 if np.isnan(found) else found
        if not is_true:
            predictions[row] = chance
        weight = 1.0 + chance if is_true else (1.0 - chance) * (1.0 + chance)
        model.step(all_rows, one._replace(learns=np.array([True]), weights=np.array([weight])), [is_true])
    return Followed(predictions)


def labels_at_once(stream: LateStream) -> Followed:
    """Learn each question with its label as soon as it is predicted, which nobody can."""
    return _without_flow(stream.rows)


def as_late_for_all(stream: LateStream) -> Followed:
    """Learn each question with its label, which comes for all as late as for those that are answered.

    A question without an answer gets the delay of one that has it. So this learner has the delay, and no bias.
    """
    delays = stream.answered_ms - stream.asked_ms
    has_answer = (stream.answered_ms >= 0) & (delays < stream.within_ms)
    drawn = np.random.default_rng(7).choice(delays[has_answer], len(stream))
    answered = stream.asked_ms + np.where(has_answer, delays, drawn)
    events, _ = LateStream(stream.rows, stream.asked_ms, answered, stream.within_ms, "").events()
    rows = stream.rows
    return _without_flow(LearningStream(rows.name, "binary", rows.features, rows.labels, events))


def _without_flow(stream: LearningStream) -> Followed:
    found = without_flow(stream)
    return Followed(np.where(np.isnan(found), 0.5, found))


_OURS: Final = {schedule: f"streamiter, {schedule}" for schedule in SCHEDULES}
_KTENA: Final = "streamiter, Ktena"
_RIVER: Final = {schedule: f"river, {schedule}" for schedule in SCHEDULES}
_RIVER_KTENA: Final = "river, Ktena"
_AT_ONCE: Final = "label at once"
_AS_LATE: Final = "as late for all"
_SHARE: Final = "the share"


KTENA_QUESTIONS_MAX: Final = 20_000


def follow(stream: LateStream) -> dict[str, Followed]:
    """Let all learners follow the stream."""
    share = np.full(len(stream), stream.rows.labels.mean())
    found = {_SHARE: Followed(share), _AT_ONCE: labels_at_once(stream), _AS_LATE: as_late_for_all(stream)}
    found |= {_OURS[schedule]: ours(stream, schedule) for schedule in SCHEDULES}
    if len(stream) <= KTENA_QUESTIONS_MAX:
        found[_KTENA] = ktena(stream)
    if find_spec("river") is not None:
        found |= {_RIVER[schedule]: river(stream, schedule) for schedule in SCHEDULES}
        found[_RIVER_KTENA] = river(stream, "weighted", has_weights_of_ktena=True)
    return found


# ---- cuts


def cuts(stream: LateStream, schedule: Schedule, sizes: Sequence[int], backlog: Topic | None = None) -> dict[str, str]:
    """Return a digest of model, predictions and labels for each size of source batches, and for a backlog in Kafka."""
    records = _records(stream)

    def digest(make: Callable[[Flow], Stream]) -> str:
        reported, parameters, _ = _trained(stream, schedule, make)
        made = hashlib.sha256(orjson.dumps(parameters, option=orjson.OPT_SERIALIZE_NUMPY))
        for field in ("predictions", "targets"):
            made.update(np.concatenate([part[field] for part in reported]).tobytes())
        return made.hexdigest()

    def by(size: int) -> Callable[[Flow], Stream]:
        return lambda flow: _timed(flow.from_source(_source_of(records, size), name="events"))

    found = {f"{size:,}": digest(by(size)) for size in sizes if size < len(records)} | {"all": digest(by(len(records)))}
    if backlog is not None:
        # Without a field of time: the timestamps of the topic.
        found["Kafka"] = digest(lambda flow: flow.source(backlog, stop="latest"))
    return found


def _source_of(records: Columns, size: int) -> type[Source]:
    class Batches(Source):
        def open(self, context: Context, positions: dict[Any, Any] | None) -> None:
            self._at = 0

        def read(self) -> SourceBatch | None:
            batch = records[self._at : self._at + size]
            self._at += size
            return SourceBatch(batch, {"at": self._at}) if len(batch) else None

    return Batches


def fill_backlog(session: Session, stream: LateStream, say: Callable[[str], None]) -> Topic | None:
    """Write the events to a topic of Kafka, with their times as timestamps; None where no broker can be started."""
    try:
        made = topic(f"kafka://{session.kafka}/bench-late-labels-{uuid.uuid4().hex[:8]}")
    except SystemExit as absent:  # No Java, or no Kafka.
        say(f"no backlog in Kafka: {absent}")
        return None
    records = _records(stream)
    fields = {name: array.tolist() for name, array in records.arrays.items()}
    values = [orjson.dumps(dict(zip(fields, row, strict=True))) for row in zip(*fields.values(), strict=True)]

    async def write() -> None:
        await made.create(settings={"retention.ms": "-1"})  # The times begin in 1970.
        async with contextlib.AsyncExitStack() as stack:
            writer = await made.open_writer()
            stack.push_async_callback(writer.close)
            for start in range(0, len(values), _WRITTEN_TOGETHER):
                part = slice(start, start + _WRITTEN_TOGETHER)
                await writer.write(OutgoingBatch(values[part], timestamps_ms=fields["at"][part], partition=0))

    run(write())
    return made


_WRITTEN_TOGETHER: Final = 1_000
_CUT_SIZES: Final = (1, 7, 20, 200, 2_000, 8_000)
_CUT_STREAMS: Final = ("rare, long", "threshold, short")
_CUT_QUESTIONS: Final = 20_000

# ---- the section of the page

TITLE: Final = "## Labels that come later\n"

_ABOUT: Final = """\
Questions come in the order of event time; a question is predicted when it comes, and its label is True or False by an
answer that comes later, or False at the end of its wait. streamiter learns with `train_online(labels=…)` and one of its
three [schedules](learning.md#labels-that-arrive-later); *end* is the default here. The others, record by record:

- *river*: its logistic regression behind `StandardScaler` and `OneHotEncoder`, in the order of events that each
  schedule says. With *weighted* it learns False at the question; a True answer then learns True, and takes back the
  slope with which its question was learned.
- *Ktena*: *weighted* with the weights (1 − p)(1 + p) at the question and 1 + p for a True answer, p the
  prediction at that moment (Ktena et al., 2019, arXiv 1907.06558). streamiter has them on streams of at most
  {ktena:,} questions only (`python -m benchmarks.learning --only late --quick`): its model is called for each row.
- *label at once*: streamiter's model, which learns each label right after the prediction, as nobody can.
- *as late for all*: streamiter's model with true labels; those of questions without an answer come as late as those of
  others, too. So it has the delay, and no bias: what the delay must cost.
- *the share*: always the share of True in the whole stream.
"""

_ABOUT_STREAMS: Final = "The streams, with a question a second where nothing else is said:\n"

_RATIO_MAX: Final = 0.1
_LOSS_MAX: Final = 0.01


def late_section(names: Sequence[str], rows: int, session: Session | None, say: Callable[[str], None]) -> str:
    """Follow the streams; return the section of the page in Markdown. ``session`` starts a broker for the cuts."""
    figures: list[_Figures] = []
    missing: list[str] = []
    for name in names:
        try:
            stream = LATE_STREAMS[name](rows)
        except MissingStream as absent:
            missing.append(f"Left out: {name} ({absent}).\n")
            continue
        say(f"labels that come later: {name}, {len(stream):,} questions")
        figures.append(_Figures.of(stream, follow(stream)))
    shown = [f"- *{each.stream.name}*, {len(each.stream):,} questions: {each.stream.about}" for each in figures]
    parts = [TITLE, _ABOUT.format(ktena=KTENA_QUESTIONS_MAX), _ABOUT_STREAMS, "\n".join([*shown, ""])]
    parts += missing
    parts += ["Log loss of the last nine tenths of the questions:\n", _losses_table(figures, "late")]
    parts += ["Log loss of all questions:\n", _losses_table(figures, "all")]
    parts += [
        _ABOUT_TENTHS,
        _tenths_table(figures),
        _ABOUT_VERDICTS,
        _verdicts(figures),
        _ABOUT_CUTS.format(count=min(rows, _CUT_QUESTIONS)),
        _cuts_table(names, rows, session, say),
    ]
    return "\n".join(parts)


@dataclass(frozen=True)
class _Figures:
    """What the page says about one stream."""

    stream: LateStream
    all: Mapping[str, float]
    """By learner the log loss of all questions."""
    late: Mapping[str, float]
    """By learner that of the last nine tenths."""
    extra: Mapping[str, tuple[float, float]]
    """By learner how much larger that is than *as late for all*, and the standard error of the difference."""
    before: Mapping[str, tuple[float, float]]
    """By learner the mean of the predictions before the first wait was over, by the share, and the largest one."""
    tenths: Mapping[str, list[float]]
    """By learner the mean prediction by the share of True, of each tenth of the questions after the first wait."""
    error: float
    """The standard error of such a share, by the share."""
    rates: Mapping[str, float]

    @classmethod
    def of(cls, stream: LateStream, found: Mapping[str, Followed]) -> _Figures:
        labels, after = stream.rows.labels, stream.is_after_wait()
        start, share = len(labels) // 10, float(labels.mean())
        by_learner = {name: losses(stream.rows, each.predictions) for name, each in found.items()}
        extra = {name: (of_rows - by_learner[_AS_LATE])[start:] for name, of_rows in by_learner.items()}
        before = {name: each.predictions[~after] for name, each in found.items()}
        parts = np.array_split(np.flatnonzero(after), 10)
        return cls(
            stream,
            {name: float(of_rows.mean()) for name, of_rows in by_learner.items()},
            {name: float(of_rows[start:].mean()) for name, of_rows in by_learner.items()},
            {name: (float(rows.mean()), float(rows.std() / len(rows) ** 0.5)) for name, rows in extra.items()},
            {name: (float(some.mean() / labels[~after].mean()), float(some.max())) for name, some in before.items()},
            {
                name: [float(each.predictions[part].mean() / labels[part].mean()) for part in parts]
                for name, each in found.items()
            },
            float(np.sqrt((1.0 - share) / share / len(parts[0]))),
            {name: each.rate for name, each in found.items()},
        )

    def worst(self, name: str) -> float:
        return max(self.tenths[name], key=lambda ratio: abs(ratio - 1.0))


def _losses_table(figures: Sequence[_Figures], field: Literal["all", "late"]) -> str:
    learners = list(figures[0].all)
    known = (_SHARE, _AT_ONCE, _AS_LATE)
    rows = [["stream", *learners]]
    for each in figures:
        of_learners: Mapping[str, float] = getattr(each, field)
        best = min(of_learners[name] for name in learners if name not in known)
        shown = [
            f"**{of_learners[name]:.4f}**"
            if name not in known and of_learners[name] == best
            else f"{of_learners[name]:.4f}"
            for name in learners
        ]
        rows.append([each.stream.name, *shown])
    return markdown_table(rows)


_ABOUT_TENTHS: Final = """\
The mean prediction divided by the share of True, before the first wait is over, and for each tenth of the questions
after it, in the order of the questions. *±* is the standard error of the share of a tenth by chance alone; *worst* is
the tenth that is furthest from 1. Speeds are questions a second of CPU time, their answers included.
"""


def _tenths_table(figures: Sequence[_Figures]) -> str:
    header = ["stream", "schedule", "before", "largest before", *(f"{tenth}" for tenth in range(1, 11)), "±", "worst"]
    rows = [[*header, "river: before", "worst", "questions/CPU-s", "river"]]
    for each in figures:
        for schedule in SCHEDULES:
            name, peer = _OURS[schedule], _RIVER[schedule]
            mean, largest = each.before[name]
            row = [each.stream.name, schedule, f"{mean:.2f}", f"{largest:.2f}"]
            row += [f"{ratio:.2f}" for ratio in each.tenths[name]]
            row += [f"{each.error:.3f}", f"{each.worst(name):.2f}"]
            has_peer = peer in each.tenths
            row += [f"{each.before[peer][0]:.2f}", f"{each.worst(peer):.2f}"] if has_peer else ["–", "–"]
            row += [f"{each.rates[name]:,.0f}", f"{each.rates[peer]:,.0f}" if has_peer else "–"]
            rows.append(row)
    return markdown_table(rows)


_ABOUT_VERDICTS: Final = """\
What the default must keep, and whether it does: in each tenth after the first wait the mean prediction is within 10 %
of the share; before it no prediction is above a half (a dash: some questions have a chance of a half or more, or an
unknown one); the loss of the last nine tenths is at most 1 % above that of *as late for all*. Its own worst tenth shows
what the delay and the drift must cost.
"""


def _verdicts(figures: Sequence[_Figures]) -> str:
    """Return which bounds the default keeps, and where it misses one."""
    rows = [["stream", "worst tenth", "*as late for all*", "kept", "largest before", "kept", "loss above", "kept"]]
    for each in figures:
        name = _OURS[SCHEDULES[0]]
        (extra, error), (_, largest), is_known = each.extra[name], each.before[name], each.stream.chance_max < 0.5
        row = [each.stream.name, f"{each.worst(name):.2f}", f"{each.worst(_AS_LATE):.2f}"]
        row += [_said(abs(each.worst(name) - 1.0) <= _RATIO_MAX)]
        row += [f"{largest:.2f}", _said(largest <= 0.5) if is_known else "–"]
        row += [f"{extra:+.4f} ± {error:.4f}", _said(extra <= _LOSS_MAX * each.late[_AS_LATE])]
        rows.append(row)
    return markdown_table(rows)


def _said(is_kept: bool) -> str:
    return "yes" if is_kept else "**no**"


_ABOUT_CUTS: Final = """\
The same streams of {count:,} questions, read in source batches of several sizes, and as a backlog of a Kafka topic by
the timestamps of its records. *Same bits*: the last model, all predictions and all labels are the same to the last bit.
"""


def _cuts_table(names: Sequence[str], rows: int, session: Session | None, say: Callable[[str], None]) -> str:
    table: list[list[str]] = []
    for name in [name for name in _CUT_STREAMS if name in names]:
        stream = LATE_STREAMS[name](min(rows, _CUT_QUESTIONS))
        backlog = None if session is None else fill_backlog(session, stream, say)
        for schedule in SCHEDULES:
            say(f"cuts: {name}, {schedule}")
            found = cuts(stream, schedule, _CUT_SIZES, backlog)
            table = table or [["stream", "schedule", *found]]
            first = next(iter(found.values()))
            table.append(
                [name, schedule, *("same bits" if each == first else "**other bits**" for each in found.values())]
            )
    return markdown_table(table)
