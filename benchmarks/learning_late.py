"""Labels that come later: each schedule of ``train_online``, and river record by record in the same order.

The flow reports the events of the question and of its label for each prediction, and :func:`ours` checks the labels.
"""

from __future__ import annotations

import hashlib
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from operator import itemgetter
from typing import Any, Final, Literal, NamedTuple, get_args

import numpy as np
import orjson

from benchmarks import kafka
from benchmarks.learning_late_streams import LATE_STREAMS, SCHEDULES, LateStream, Schedule, order
from benchmarks.learning_peers import Floats, River, losses, without_flow
from benchmarks.learning_streams import LearningStream, MissingStream
from benchmarks.measuring import Stopwatch, run_to_end
from benchmarks.report import markdown_table
from benchmarks.session import Session
from streamiter import Columns, Flow, Stream, topic
from streamiter.learn import DelayedLabels, train_online
from streamiter.operators import Context, Source, SourceBatch
from streamiter.topics.topic import Topic

__all__ = ["TITLE", "Followed", "cuts", "follow", "late_section", "ours"]

# ---- who follows the streams


class Followed(NamedTuple):
    """What a learner predicted, by question."""

    predictions: Floats
    rate: float = float("nan")
    """Questions a second of CPU time."""


def _features(stream: LateStream) -> Columns:
    assert isinstance(stream.rows.features, Columns)
    return stream.rows.features


def _records(stream: LateStream) -> Columns:
    events, times = stream.events()
    rows, is_answer = events // 2, events % 2 == 1
    of_events = {"row": rows, "answer": is_answer, "label": stream.rows.labels[rows], "at": times}
    return Columns({**_features(stream)[rows].arrays, **of_events})


def _trained(
    stream: LateStream, schedule: Schedule | None, make: Callable[[Flow], Stream]
) -> tuple[dict[str, Any], Any, float]:
    """Return what the flow reports of its predictions, its last model, and the CPU seconds."""
    labels = DelayedLabels(
        key_of=itemgetter("row"),
        is_answer=itemgetter("answer"),
        features=list(_features(stream).names),
        target_of=itemgetter("label"),
        within_s=None if schedule is None else stream.within_ms / 1_000,
        otherwise=None if schedule is None else False,
        schedule=schedule,
    )
    flow = Flow("late labels")
    training = train_online(make(flow), labels=labels, task="regression" if stream.rows.task == "number" else None)
    predicted, models = training.predictions.collect(), training.models.collect()
    with Stopwatch() as watch:
        run_to_end(flow)
    fields = ("predictions", "targets", "questions")
    reported = {field: np.concatenate([part[field] for part in predicted.items]) for field in fields}
    return reported, models.items[-1].parameters, watch.cpu_seconds


def _timed(stream: Stream) -> Stream:
    return stream.event_time("at", unit="ms", check_unit=False)


def ours(stream: LateStream, schedule: Schedule | None) -> Followed:
    """Learn with ``train_online(labels=…)``; a schedule of None needs an answer to each question."""
    records = _records(stream)
    reported, _, cpu_seconds = _trained(stream, schedule, lambda flow: _timed(flow.from_items(records)))
    rows = stream.events()[0][reported["questions"]] // 2
    # Before the first label nothing is known of numbers.
    first = np.searchsorted(stream.asked_ms, stream.answered_ms.min()) if stream.rows.task == "number" else 0
    is_each = np.array_equal(np.sort(rows), np.arange(first, len(stream)))
    if not (is_each and np.array_equal(reported["targets"], stream.rows.labels[rows])):
        raise AssertionError(f"{stream.about}, {schedule}: expected each question once, with its label")
    predictions = np.full(len(stream), np.nan)
    predictions[rows] = reported["predictions"]
    return Followed(predictions, len(stream) / cpu_seconds)


_Ordered = Literal["end", "weighted", "at once"]


def river(stream: LateStream, schedule: _Ordered, *, has_weights_of_ktena: bool = False) -> Followed:
    """Learn with river's logistic regression, record by record.

    A True answer to a question that was learned as False is learned, and the slope for False is taken back, as in
    streamiter; or both steps have the weights of Ktena et al. (2019). The scaler counts each question once.
    """
    learner = River(stream.rows)
    happened = list(order(stream, schedule))
    predictions = np.empty(len(stream))
    assumed: dict[int, float] = {}
    with Stopwatch() as watch:
        for kind, row, _ in happened:
            if kind == "predict":
                predictions[row] = learner.predict(row)
            elif kind == "assume":
                assumed[row] = learner.predict(row)
                weight = 1.0 - assumed[row] ** 2 if has_weights_of_ktena else 1.0
                learner.learn_weighted(row, label=False, weight=weight, is_new=True)
            elif kind == "learn" and row not in assumed:
                learner.learn(row)
            elif kind == "learn":
                weight = 1.0 + learner.predict(row) if has_weights_of_ktena else 1.0
                learner.learn_weighted(row, label=True, weight=weight, is_new=False)
                if not has_weights_of_ktena:
                    # The slope for False is the prediction.
                    taken_back = -assumed[row] / learner.predict(row)
                    learner.learn_weighted(row, label=False, weight=taken_back, is_new=False)
    return Followed(predictions, len(stream) / watch.cpu_seconds)


def _without_flow(rows: LearningStream) -> Followed:
    found = without_flow(rows)
    return Followed(np.where(np.isnan(found), 0.5, found))


def as_late_for_all(stream: LateStream) -> Followed:
    """Learn each question with its label, which comes for all as late as for those that are answered.

    A question without an answer gets the delay of one that has it. So this learner has the delay, and no bias.
    """
    delays = stream.answered_ms - stream.asked_ms
    has_answer = (stream.answered_ms >= 0) & (delays < stream.within_ms)
    drawn = np.random.default_rng(7).choice(delays[has_answer], len(stream))
    events, _ = replace(stream, answered_ms=stream.asked_ms + np.where(has_answer, delays, drawn)).events()
    return _without_flow(replace(stream.rows, events=events))


def share_so_far(stream: LateStream) -> Followed:
    """Predict the share of True of the questions whose wait is over, and a half before there are any."""
    over = np.searchsorted(stream.asked_ms + stream.within_ms, stream.asked_ms, side="right")
    true = np.concatenate([[0], np.cumsum(stream.rows.labels)])[over]
    return Followed((true + 1.0) / (over + 2.0))


_SHARE: Final = "share so far"
_BEST: Final = "best possible"
_AT_ONCE: Final = "label at once"
_AS_LATE: Final = "as late for all"
_BESIDE: Final = (_SHARE, _BEST, _AT_ONCE)
_DEFAULT: Final = f"streamiter, {SCHEDULES[0]}"


def follow(stream: LateStream) -> dict[str, Followed]:
    """Let all learners follow the stream."""
    unknown = np.full(len(stream), np.nan)
    found = {
        _SHARE: share_so_far(stream),
        _BEST: Followed(unknown if stream.chances is None else stream.chances),
        _AT_ONCE: _without_flow(stream.rows),
        _AS_LATE: as_late_for_all(stream),
    }
    found |= {f"streamiter, {schedule}": ours(stream, schedule) for schedule in SCHEDULES}
    if find_spec("river") is not None:
        found |= {f"river, {schedule}": river(stream, schedule) for schedule in get_args(_Ordered)}
        found["river, Ktena"] = river(stream, "weighted", has_weights_of_ktena=True)
    return found


# ---- cuts


def cuts(stream: LateStream, schedule: Schedule, sizes: Sequence[int], backlog: Topic | None = None) -> dict[str, str]:
    """Return a digest of model, predictions and labels for each size of source batches, and for a backlog in Kafka."""
    records = _records(stream)

    def digest(make: Callable[[Flow], Stream]) -> str:
        reported, parameters, _ = _trained(stream, schedule, make)
        made = hashlib.sha256(orjson.dumps(parameters, option=orjson.OPT_SERIALIZE_NUMPY))
        for field in ("predictions", "targets"):
            made.update(reported[field].tobytes())
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
    kafka.run(made.create(settings={"retention.ms": "-1"}))  # The times begin in 1970.
    flow = Flow("backlog")
    flow.from_items(_records(stream)).sink(made, timestamp=itemgetter("at"))
    run_to_end(flow)
    return made


_CUT_SIZES: Final = (1, 7, 20, 200, 2_000, 8_000)
_CUT_STREAMS: Final = ("rare, long", "threshold, short", "flights")
_CUT_QUESTIONS: Final = 20_000

# ---- the section of the page

TITLE: Final = "## Labels that come later\n"

_ABOUT: Final = """\
Questions come in the order of event time; a question is predicted when it comes, and its label is True or False by an
answer that comes later, or False at the end of its wait. All losses and means are of these predictions, for all
questions, also those from before the first label. streamiter learns with `train_online(labels=…)` and one of its four
[schedules](late-labels.md); *expected* is the default here. The others, record by record:

- *river*: its logistic regression behind `StandardScaler` and `OneHotEncoder`, in the order of events that each
  schedule says. With *weighted* it learns False at the question; a True answer then learns True, and takes back the
  slope with which its question was learned. *Ktena* is *weighted* with
  the weights (1 − p)(1 + p) at the question and 1 + p for a True answer, p the prediction at that moment (Ktena et al.,
  2019, arXiv 1907.06558).
- *share so far*: the share of True of the questions whose wait is over; before the first one a half.
- *best possible*: the chance of True with which the stream was made.
- *label at once*: streamiter's model, which learns each label right after the prediction, as nobody can.
- *as late for all*: streamiter's model with true labels; those of questions without an answer come as late as those of
  others, too. So it has the delay, and no bias: what the delay must cost.

The streams, with a question a second where nothing else is said:
"""

_ABOUT_BOUNDS: Final = """\
The mean prediction divided by the share of True: before the first wait is over, and for each tenth of the questions
after it. *±* is the standard error of the share of a tenth by chance alone. A learner should keep three bounds: each
tenth is within 10 % of the share; before it no prediction is above a half (*largest*; where at most a tenth are
True); the loss of the last nine tenths of all questions is at most 1 % above that of *as late for all* (*loss above*,
with its standard error). *as late for all* shows which tenths the delay and the drift must miss. Speeds are questions
a second of CPU time, their answers included.
"""

_ABOUT_CUTS: Final = """\
Streams of {count:,} questions, read in source batches of several sizes, and as a backlog of a Kafka topic by the
timestamps of its records. *Same bits*: the last model, all predictions and all labels are the same to the last bit.
"""

_RATIO_MAX: Final = 0.1
_LOSS_MAX: Final = 0.01
_RARE_MAX: Final = 0.1


@dataclass(frozen=True)
class _Result:
    """How one learner did on a stream."""

    loss: float
    """The log loss of all questions."""
    later: Floats
    """The log losses of the last nine tenths."""
    before: Floats
    """The predictions before the first wait was over."""
    ratios: Floats
    """The mean prediction before that, and in each tenth after it, divided by the share of True."""
    error: float
    """The standard error of the share of such a tenth, divided by the share."""
    rate: float

    def kept(self, as_late: _Result, *, is_rare: bool) -> list[bool | None]:
        """Return which bounds were kept: tenths, predictions before the first wait (None: does not apply), loss."""
        tenths = bool((abs(self.ratios[1:] - 1.0) <= _RATIO_MAX).all())
        largest = bool(self.before.max() <= 0.5) if is_rare else None
        return [tenths, largest, bool(self.later.mean() <= (1.0 + _LOSS_MAX) * as_late.later.mean())]


def _results(stream: LateStream) -> dict[str, _Result]:
    labels, found = stream.rows.labels, {}
    is_after = stream.asked_ms >= stream.asked_ms[0] + stream.within_ms
    parts = [np.flatnonzero(~is_after), *np.array_split(np.flatnonzero(is_after), 10)]
    share = labels.mean()
    error = float(np.sqrt((1.0 - share) / share / len(parts[1])))
    for name, (predictions, rate) in follow(stream).items():
        of_rows = losses(stream.rows, predictions)
        ratios = np.array([predictions[part].mean() / labels[part].mean() for part in parts])
        later = of_rows[len(labels) // 10 :]
        found[name] = _Result(float(of_rows.mean()), later, predictions[~is_after], ratios, error, rate)
    return found


def late_section(names: Sequence[str], rows: int, session: Session | None, say: Callable[[str], None]) -> str:
    """Follow the streams; return the section of the page in Markdown. ``session`` starts a broker for the cuts."""
    about, missing, bounds, misses = [], [], [], []
    of_later: list[list[str]] = []
    of_all: list[list[str]] = []
    cut: list[list[str]] = []
    for name in names:
        try:
            stream = LATE_STREAMS[name](rows)
        except MissingStream as absent:
            missing.append(f"Left out: {name} ({absent}).\n")
            continue
        say(f"labels that come later: {name}, {len(stream):,} questions")
        about.append(f"- *{name}*, {len(stream):,} questions: {stream.about}")
        found = _results(stream)
        of_later = of_later or [["stream", *found]]
        of_later.append([name, *_best_in_bold({key: float(each.later.mean()) for key, each in found.items()})])
        of_all = of_all or [["stream", *found]]
        of_all.append([name, *_best_in_bold({key: each.loss for key, each in found.items()})])
        bounds += _bounds(name, stream, found)
        kept = found[_DEFAULT].kept(found[_AS_LATE], is_rare=_is_rare(stream))
        missed = [what for what, each in zip(("tenths", "before", "loss"), kept, strict=True) if each is False]
        misses += [f"{name} ({', '.join(missed)})"] if missed else []
        if name in _CUT_STREAMS:
            cut += _cuts(name, min(rows, _CUT_QUESTIONS), session, say, has_header=not cut)
    verdict = f"The default, *{SCHEDULES[0]}*, misses a bound on: {'; '.join(misses) or 'no stream'}.\n"
    parts = [TITLE, _ABOUT, "\n".join([*about, ""]), *missing]
    if of_all:
        parts += ["Log loss of the last nine tenths of the questions:\n", markdown_table(of_later)]
        parts += ["Log loss of all questions:\n", markdown_table(of_all)]
        parts += [_ABOUT_BOUNDS, verdict, markdown_table([_HEADER, *bounds])]
    if cut:
        parts += [_ABOUT_CUTS.format(count=min(rows, _CUT_QUESTIONS)), markdown_table(cut)]
    return "\n".join(parts)


def _is_rare(stream: LateStream) -> bool:
    return bool(stream.rows.labels.mean() <= _RARE_MAX)


def _best_in_bold(found: Mapping[str, float]) -> list[str]:
    """Return the losses; the lowest one of those that can be had is bold."""
    best = min(value for name, value in found.items() if name not in (*_BESIDE, _AS_LATE))
    shown = {name: "–" if np.isnan(value) else f"{value:.4f}" for name, value in found.items()}
    is_best = {name: value == best and name not in (*_BESIDE, _AS_LATE) for name, value in found.items()}
    return [f"**{text}**" if is_best[name] else text for name, text in shown.items()]


_TENTHS: Final = [f"{tenth}" for tenth in range(1, 11)]
_HEADER: Final = [
    "stream",
    "learner",
    "before",
    *_TENTHS,
    "±",
    "kept",
    "largest",
    "kept",
    "loss above",
    "kept",
    "speed",
]


def _bounds(stream_name: str, stream: LateStream, found: Mapping[str, _Result]) -> list[list[str]]:
    rows: list[list[str]] = []
    as_late, is_rare = found[_AS_LATE], _is_rare(stream)
    for name, each in found.items():
        if name in _BESIDE:
            continue
        extra = each.later - as_late.later
        tenths, largest, has_loss = (_SAID[kept] for kept in each.kept(as_late, is_rare=is_rare))
        row = [stream_name, name, *(f"{ratio:.2f}" for ratio in each.ratios), f"{each.error:.3f}", tenths]
        row += [f"{each.before.max():.2f}", largest]
        row += [f"{extra.mean():+.4f} ± {extra.std() / len(extra) ** 0.5:.4f}", has_loss]
        rows.append([*row, "–" if np.isnan(each.rate) else f"{each.rate:,.0f}"])
    return rows


_SAID: Final = {True: "yes", False: "**no**", None: "–"}


def _cuts(
    name: str, rows: int, session: Session | None, say: Callable[[str], None], *, has_header: bool
) -> list[list[str]]:
    table: list[list[str]] = []
    stream = LATE_STREAMS[name](rows)
    backlog = None if session is None else fill_backlog(session, stream, say)
    for schedule in SCHEDULES:
        say(f"cuts: {name}, {schedule}")
        found = cuts(stream, schedule, _CUT_SIZES, backlog)
        table += [["stream", "schedule", *found]] if has_header and not table else []
        first = next(iter(found.values()))
        table.append([name, schedule, *("same bits" if each == first else "**other bits**" for each in found.values())])
    return table
