"""Labels that come later than their questions: how events are read, and when a question meets its answer.

Predictions are made where the model is, so the join is there, too: :class:`LabelJoin` is a one-to-one interval join
(``operators.timed.joining``) whose left side are predicted questions, and whose right side are answers.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any, Final, Literal, NamedTuple, TypedDict, final

import numpy as np

from streamiter.errors import CheckpointError, ModelError
from streamiter.learn.answer_delays import AnswerDelays
from streamiter.learn.delayed_labels import DelayedLabels, come_with_questions
from streamiter.learn.labels import Label, counts_as_false
from streamiter.learn.row_reading import (
    LabelFields,
    NumberedBatch,
    Position,
    ReadFeatures,
    ReadsLabels,
    record_of_features,
)
from streamiter.learn.rows import BadRows, blaming_rows, of_numbered_rows, row_weights
from streamiter.operators.declared_state import (
    EVERY,
    FIRST_KNOWN,
    GREATEST,
    NESTED,
    DeclaredState,
    Form,
    declared,
    for_all,
)
from streamiter.operators.definitions import Definition
from streamiter.operators.due import DueHeap
from streamiter.operators.operator import Context
from streamiter.operators.output import Output
from streamiter.operators.timed.joining import LEFT, RECORD, RECORD_ARRIVAL, RECORD_TIME, RIGHT, OneToOneJoin, Side
from streamiter.values.named_rows import NamedRows, named_matrix
from streamiter.values.numbers import Floats, Indices, plain_scalar
from streamiter.values.records import Batch, take
from streamiter.values.sparse_rows import SparseRows
from streamiter.values.times import MAX_TIME, MIN_TIME, before_end, in_seconds


@final
class EventsToLearn(TypedDict):
    """Questions and answers, as a worker read them: plain data, from a worker to the owner."""

    position: Position
    count: int
    """The number of events of the mini-batch, those that were refused included."""
    numbers: Indices
    records: Batch
    times: list[int] | None
    """The timestamps of the events; None without event time."""
    before: list[int] | None
    """For each event the watermark behind the events before it; None without event time."""
    keys: list[Hashable]
    """For each event the key that an answer shares with its question."""
    is_answer: list[bool]
    labels: list[Label]
    """For each event the label; None for a question, and for an answer after which there will be no label. Rows that a
    join has labelled have the label in their question."""
    weights: Floats | None
    """For each event with a label its sample weight; None: all are 1."""
    features: dict[str, Any]
    """A row for each question."""
    label_fields: list[str]
    """The fields that the user's label function has read so far."""


def no_events() -> EventsToLearn:
    """Return the events of an empty mini-batch: only time has passed."""
    return {
        "position": (0, 0),
        "count": 0,
        "numbers": np.empty(0, np.intp),
        "records": [],
        "times": None,
        "before": None,
        "keys": [],
        "is_answer": [],
        "labels": [],
        "weights": None,
        "features": record_of_features(named_matrix(np.empty((0, 0)))),
        "label_fields": [],
    }


WAIT_IS_OVER: Final = "wait is over"
"""The payload of the timer of :meth:`LabelJoin.wait`."""


class Outcome(NamedTuple):
    """What happened to a question or an answer."""

    question: Any
    """The question, or None: the answer has no question."""
    answer: Any
    """The answer, or None."""
    kind: Literal["answered", "over", "forgotten", "assumed"]
    """Whether the question has got its answer, its wait is over, it is forgotten, or it waits further and counts as a
    question without an answer."""


@dataclass(slots=True, eq=False)
class _Waiting:
    """A question that waits."""

    question: Any
    time: int
    number: int
    when: int | None = None
    """When it counts as unanswered, ``MAX_TIME`` for never; None: it is learned at the end of its wait."""
    is_open: bool = True


_COUNTED: Final = Outcome(None, None, "answered")
"""The end of the wait of a question that has been learned."""

# The limit of a question that waits without end: the end of the stream.
_TO_THE_END: Final = MAX_TIME

# Of the questions that have been learned, each is in every checkpoint until its wait is over: this many take some 25
# ms. What is delivered twice comes again within seconds or minutes.
_IN_CHECKPOINT_MAX: Final = 100_000


_AS_IT_IS: Final = Form(lambda record: record, lambda record: record)


class LabelJoin(DeclaredState):
    """Joins the questions that an operator has predicted with their answers, and ends their waits. Pure data, no I/O.

    With ``schedule="end"`` a question that has its answer waits further, to the end of its wait. With ``"expected"``,
    too, until enough delays of answers are known.
    """

    _settled: OrderedDict[Hashable, int] = declared(
        made=OrderedDict,
        form=Form(
            lambda settled: [list(settled), list(settled.values())], lambda pair: OrderedDict(zip(*pair, strict=True))
        ),
        share=for_all(lambda many: _settled_of_all(many)),
    )
    """By key the time of a question that has got its answer, in this order, until its wait would be over."""
    _asked = declared(0, share=for_all(lambda many: len(many) * (1 + max(many))))
    _latest = declared(MIN_TIME, share=GREATEST)
    """The latest time of an event."""
    _delays = declared(made=AnswerDelays, form=NESTED, share=for_all(AnswerDelays.merged))
    _other_label: Label = declared(None, share=FIRST_KNOWN)
    """The first label that is another one than that of a question without an answer."""
    false_label: Label = declared(form=Form(plain_scalar, plain_scalar), share=FIRST_KNOWN)
    """The label with which questions are learned, or were in an earlier run, before theirs is known."""
    is_false_otherwise: bool = declared(share=EVERY)
    """Whether a question without an answer counts as False beside the labels so far."""

    def __init__(
        self, labels: DelayedLabels, *, is_timed: bool, questions: Form = _AS_IT_IS, answers: Form = _AS_IT_IS
    ) -> None:
        """``questions`` and ``answers`` are their forms in a snapshot."""
        self._questions, self._answers = questions, answers
        self.is_timed = is_timed
        self.schedule = labels.chosen_schedule()
        self.otherwise = labels.otherwise
        self.false_label = labels.otherwise if self.schedule in ("expected", "weighted") else None
        self._unknown = labels.unknown
        self._ignores_unknown = come_with_questions(labels)
        self._within_ms = None if labels.within_s is None else round(in_seconds(labels.within_s) * 1000)
        upper_ms = None if self._within_ms is None else self._within_ms - 1
        self._kept_max = labels.waiting_max
        self._join = OneToOneJoin(0, upper_ms, "full", kept_max=labels.waiting_max, in_order=not is_timed)
        self._answered = DueHeap(0, 2)
        """The questions that wait with their answers, by limit and number."""
        self._learned = DueHeap(1, 2)
        """The questions whose answers have been learned, until the end of their wait counts."""
        self.is_false_otherwise = counts_as_false(self.otherwise)
        self._assumed = DueHeap(2, 2)
        """The questions by the time at which they count as ones without an answer; also questions with an answer."""
        self._restored: list[Outcome] = []
        """The outcomes of a restore, because waits are longer now, or fewer questions may wait."""
        self._timer_at = MAX_TIME

    @property
    def _may_assume(self) -> bool:
        """Whether questions count as ones without an answer, once enough delays of answers are known."""
        return self.schedule == "expected" and self.is_false_otherwise

    @property
    def has_share(self) -> bool:
        """Whether the share of True is the share of answers other than ``otherwise``: not always so for two texts."""
        return self.is_false_otherwise or not isinstance(self.otherwise, str)

    def open(self, context: Context) -> None:
        """Take the time from the step, and set its timers."""
        self._context = context

    # ---- by the clock

    def wait(self) -> None:
        """By the clock, set a timer for the end of the first wait that gives a label: its payload is ``WAIT_IS_OVER``.

        Call :meth:`heard` and this when it fires.
        """
        while self._assumed and not self._assumed.peek()[-1].is_open:
            self._assumed.take_first()
        waits = (self._join.next_due() or MAX_TIME, self._answered.first(), self._assumed.first())
        due = min(MAX_TIME if first is None else first for first in waits)
        if not self.is_timed and (self.otherwise is not None or self._answered) and due < self._timer_at:
            self._timer_at = due
            self._context.set_timer(max(0, due - self._context.clock.now_ms()) / 1000, WAIT_IS_OVER)

    def heard(self) -> None:
        """Forget the timer, which has fired."""
        self._timer_at = MAX_TIME

    def now(self) -> int:
        """Return the time before the next events, where the events do not tell it: the time of the clock."""
        return MIN_TIME if self.is_timed else self._context.clock.now_ms()

    # ---- events

    def reach(self, watermark: int) -> list[Outcome]:
        """End all waits that are over by a watermark; return the outcomes in the order of (end of the wait, arrival).

        A watermark that is not higher than an earlier one has no effect.
        """
        join, restored = self._join, self._restored
        if restored:
            self._restored = []
            return [*restored, *self.reach(watermark)]
        if watermark <= join.watermark:
            return []
        join.advance(watermark)
        if self._settled:
            self._forget_settled()
        # At the end of the stream a question that still waits has no answer so far, which says nothing.
        counted_to = watermark if watermark < MAX_TIME else self._latest
        ended: list[tuple[int, int, Outcome, bool]] = []
        for when, number, _, waiting in self._assumed.until(watermark):
            if waiting.is_open and when < self._limit(waiting) and when <= counted_to:
                waiting.when = MAX_TIME
                ended.append((when, number, Outcome(waiting.question, None, "assumed"), False))
        for _, (waiting, answer) in join.take_results() if join.results else ():
            if waiting is None:
                ended.append((MIN_TIME, 0, Outcome(None, answer, "over"), True))
            else:
                limit, waiting.is_open = self._limit(waiting), False
                ended.append((limit, waiting.number, Outcome(waiting.question, None, "over"), False))
        for limit, number, _, (waiting, answer) in self._answered.until(watermark):
            ended.append((limit, number, Outcome(waiting.question, answer, "over"), True))
        for limit, number, *_ in self._learned.until(watermark):
            ended.append((limit, number, _COUNTED, True))
        if len(ended) > 1:
            ended.sort(key=_by_limit)
        # The order is the same wherever batches are cut.
        outcomes: list[Outcome] = []
        for limit, _, outcome, is_answered in ended:
            if outcome.kind == "assumed":
                if not self._delays.learns_now(is_answered=False):
                    continue  # It waits further.
            elif outcome is _COUNTED or outcome.question is not None:
                if self._may_assume and limit <= counted_to:
                    self._delays.ended(is_answered=is_answered)
                if outcome is _COUNTED:
                    continue
            outcomes.append(outcome)
        return outcomes

    def _limit(self, waiting: _Waiting) -> int:
        return _TO_THE_END if self._within_ms is None else waiting.time + self._within_ms

    def ask(self, key: Hashable, time: int | None, question: Any) -> list[Outcome]:
        """Add a question; ``time`` None is the time of the clock. A late one counts as a question at the watermark.

        A question with the key and the time of a question that has got its answer is a repetition, and is forgotten.
        """
        if time is not None and self._settled.get(key) == time:
            return [Outcome(question, None, "forgotten")]
        time = self._time(time)
        self._asked += 1
        waiting = _Waiting(question, time, self._asked)
        if self._may_assume and self._delays.are_known():
            age = self._delays.age_of(self._asked)
            self._assume(waiting, MAX_TIME if age is None else time + age)
        self._join.add(LEFT, key, time, waiting)
        return self._outcomes(key) if self._join.results else []

    def note_label(self, label: Label, positive: Label) -> None:
        """Note the label of an answer: then the label of a question without an answer may be one of several classes.

        No effect once so many labels have come that the model refuses such a label.
        """
        if label in (self.otherwise, self._other_label) or not self.is_false_otherwise or self._delays.are_known():
            return
        has_two = self._other_label is None or not isinstance(label, str)
        self.is_false_otherwise = has_two and counts_as_false(self.otherwise, label, positive)
        self._other_label = plain_scalar(label)

    def _assume(self, waiting: _Waiting, when: int | None) -> None:
        waiting.when = when
        if when is not None and when < self._limit(waiting):
            self._assumed.push((when, waiting.number), waiting)

    def answer(self, key: Hashable, time: int | None, answer: Any) -> list[Outcome]:
        """Add an answer. A late answer counts as an answer at the watermark: its question may still wait."""
        self._join.add(RIGHT, key, self._time(time), answer)
        return self._outcomes(key) if self._join.results else []

    def _time(self, time: int | None) -> int:
        reached = self._join.watermark
        time = reached if time is None or time < reached else time
        self._latest = max(self._latest, time)
        return time

    def _forget_settled(self) -> None:
        """Forget the settled questions whose wait would be over, and the oldest if there are too many."""
        settled, within_ms = self._settled, self._within_ms
        while settled and (
            len(settled) > _IN_CHECKPOINT_MAX
            or (within_ms is not None and next(iter(settled.values())) + within_ms <= self._join.watermark)
        ):
            settled.popitem(last=False)

    def _outcomes(self, key: Hashable = None) -> list[Outcome]:
        """Return the outcome of the last event, which had this key; None: there is more than one."""
        outcomes: list[Outcome] = []
        for time, (waiting, answer) in self._join.take_results():
            if waiting is None:
                outcomes.append(Outcome(None, answer, "over"))
                continue
            waiting.is_open, question = False, waiting.question
            if answer is None:
                outcomes.append(Outcome(question, None, "forgotten"))
                waiting.question = None  # It may be among those that reach their age.
                continue
            if self._may_assume:
                self._delays.answered(time - waiting.time)
            if self.is_timed and key is not None and not self._ignores_unknown:
                self._settled[key] = waiting.time
                self._settled.move_to_end(key)
            may_learn = waiting.when is not None and self._may_assume
            if self.schedule in ("weighted", "at once") or (may_learn and self._delays.learns_now(is_answered=True)):
                outcomes.append(Outcome(question, answer, "answered"))
                waiting.question = None
                if self._may_assume:
                    self._count_later(waiting.time, waiting.number)
            else:
                self._answered.push((self._limit(waiting), waiting.number), (waiting, answer))
                if len(self._answered) > self._kept_max:
                    first, its_answer = self._answered.take_first()[-1]
                    outcomes.append(Outcome(first.question, its_answer, "over"))
        return outcomes

    def _count_later(self, time: int, number: int) -> None:
        """Count the end of the wait of a question that has been learned; of too many, count the oldest now."""
        self._learned.push((time + (self._within_ms or 0), number), None)
        if len(self._learned) > min(self._kept_max, _IN_CHECKPOINT_MAX):
            self._learned.take_first()
            self._delays.ended(is_answered=True)

    def end(self) -> list[Outcome]:
        """Return the outcomes of all that wait, since no other events come; none if all would be forgotten."""
        has_labels = self.otherwise is not None or bool(self._answered or self._restored)
        return self.reach(MAX_TIME) if self.is_timed or has_labels else []

    def refuse(self, answer: Any, out: Output) -> None:
        """Refuse an answer without a question, or skip it; if its question was refused, that has been said."""
        if self._ignores_unknown:
            return
        is_refused = self._unknown == "refuse" or (self._unknown == "report" and out.tolerates_rejections)
        refuse = out.reject if is_refused else out.skip
        refuse(answer, ModelError("an answer without a question that waits for it"))

    # ---- state

    def definition(self) -> Definition:
        """Return the settings on which the meaning of the state depends.

        How long questions wait, and their schedule, may change: each of them says whether it has been learned as False.
        """
        return {"labels": "later, in event time" if self.is_timed else "later, by the clock"}

    @property
    def waiting(self) -> int:
        """The number of events that wait."""
        return self._join.kept + len(self._answered)

    def questions(self) -> list[Any]:
        """Return the questions that wait."""
        return [
            *(record[RECORD].question for side, _, record in self._join.waiting() if side == LEFT),
            *(waiting.question for *_, (waiting, _) in self._answered),
            *(outcome.question for outcome in self._restored if outcome.question is not None),
        ]

    def state(self) -> dict[str, Any]:
        """Return all that waits as plain data, in the order of arrival: times, not limits, which may change."""
        plain_question, plain_answer = self._questions.plain, self._answers.plain

        def plain(side: Side, event: Any) -> tuple[int, Any, int | None]:
            if side == LEFT:
                return event.number, plain_question(event.question), event.when
            return 0, plain_answer(event), None

        waiting = sorted(self._join.waiting(), key=lambda each: each[2][RECORD_ARRIVAL])
        return super().state() | {
            "watermark": self._join.watermark if self.is_timed else MIN_TIME,
            "waiting": [
                (side, key, record[RECORD_TIME], *plain(side, record[RECORD])) for side, key, record in waiting
            ],
            "answered": [
                (each.time, each.number, plain_question(each.question), plain_answer(answer))
                for _, _, _, (each, answer) in sorted(self._answered, key=itemgetter(1))
            ],
            "restored": [
                (question and plain_question(question), answer and plain_answer(answer), kind)
                for question, answer, kind in self._restored
            ],
            "learned": [(limit - (self._within_ms or 0), number) for limit, number, *_ in self._learned],
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Resume from a :meth:`state`. Questions wait for as long as ``within_s`` says now."""
        question_of, answer_of, own_label = self._questions.of, self._answers.of, self.false_label
        super().restore(state)
        self.is_false_otherwise = self.is_false_otherwise and counts_as_false(self.otherwise)
        self.false_label = own_label if self.false_label is None else self.false_label
        if self.schedule == "expected":
            for time, number in state["learned"]:
                self._count_later(time, number)
        for side, key, time, number, event, when in state["waiting"]:
            if side == LEFT:
                waiting = _Waiting(question_of(event), time, number)
                self._assume(waiting, when if self.schedule == "expected" else None)
                self._join.add(side, key, time, waiting)
            else:
                self._join.add(side, key, time, answer_of(event))
        for time, number, question, answer in state["answered"]:
            waiting = _Waiting(question_of(question), time, number)
            self._answered.push((self._limit(waiting), number), (waiting, answer_of(answer)))
        if self.is_timed:
            # A wait that has become shorter, and is over, ends with the next event.
            due = self._join.next_due()
            self._join.watermark = max(
                self._join.watermark, state["watermark"] if due is None else min(state["watermark"], due - 1)
            )
        else:
            # The clock of another machine may be behind, and an answer is not earlier than its question.
            times = (time for _, _, time, *_ in state["waiting"])
            self._join.watermark = max(times, default=self._join.watermark)
        for question, answer, kind in state["restored"]:
            self._restored.append(Outcome(question_of(question), answer_of(answer), kind))
        # With longer waits questions meet answers. If fewer may wait than before, the oldest are forgotten.
        self._restored += self._outcomes()
        self.wait()

    @staticmethod
    def without_end(state: dict[str, Any]) -> dict[str, Any]:
        """Return a :meth:`state` for a stream that goes on after it had ended."""
        return {**state, "watermark": before_end(state["watermark"])}

    @classmethod
    def redistribute(cls, states: Sequence[Mapping[str, Any]], parallelism: int) -> list[dict[str, Any]]:
        """Give a single join what waited in several; each question gets a number of its own."""
        if parallelism > 1:
            # A mini-batch on its way has events of many keys, and cannot be divided among the owners of the keys.
            raise CheckpointError("only one worker can take over questions that wait for labels")
        many = len(states)
        [shared] = super().redistribute(states, 1)
        waiting = {
            "watermark": min(state["watermark"] for state in states),
            "waiting": [
                (*event[:3], event[3] * many + place, *event[4:])
                for place, state in enumerate(states)
                for event in state["waiting"]
            ],
            "answered": [
                (time, number * many + place, question, answer)
                for place, state in enumerate(states)
                for time, number, question, answer in state["answered"]
            ],
            "restored": [outcome for state in states for outcome in state["restored"]],
            "learned": [
                (time, number * many + place) for place, state in enumerate(states) for time, number in state["learned"]
            ],
        }
        return [shared | waiting]


def _settled_of_all(many: Sequence[Sequence[Any]]) -> list[list[Any]]:
    """Return the keys and times of all subtasks by time: the first ones are forgotten first."""
    settled = sorted((pair for each in many for pair in zip(*each, strict=True)), key=itemgetter(1))
    return [[key for key, _ in settled], [time for _, time in settled]]


def _by_limit(ended: tuple[int, int, Outcome, bool]) -> tuple[int, int]:
    return ended[:2]


def answers_and_keys(labels: DelayedLabels, events: Batch) -> tuple[list[bool], list[Hashable]]:
    """Return for each event whether it is an answer, and its key. Raises BadRows for events without a key."""

    def read(some: Batch) -> tuple[list[bool], list[Hashable]]:
        are_answers, keys = list(map(bool, map(labels.is_answer, some))), list(map(labels.key_of, some))
        if None in frozenset(keys):  # TypeError for a key without a hash.
            raise ValueError("expected a key that a question and its answer share, given None")
        return are_answers, keys

    return blaming_rows(read, events, read)


class TimedEvents(NamedTuple):
    """The events of a mini-batch that come in the order of event time; a list with an item for each event."""

    before: list[int]
    """The watermark behind the events before it."""
    times: list[int]
    records: list[Any]
    keys: list[Hashable] | None = None
    """The number of the row, for rows that a join has labelled."""
    is_answer: list[bool] | None = None
    """For such rows, whether their label, which they bring with their question, is known now."""

    @classmethod
    def of(cls, mini_batch: Batch) -> TimedEvents:
        """Return the events of the records that ``InOrder``, or ``SpansInOrder``, emits."""
        return cls(*map(list, zip(*mini_batch, strict=True))) if len(mini_batch) else cls([], [], [])

    def taken(self, rows: Sequence[int]) -> TimedEvents:
        """Return some of the events."""
        return TimedEvents(*(None if items is None else [items[row] for row in rows] for items in self))  # type: ignore[arg-type]


class EventReader(ReadsLabels):
    """Reads questions and answers, for the owner; of each mini-batch it emits one record."""

    def __init__(
        self, events: DelayedLabels, read: ReadFeatures, *, is_timed: bool = False, made_of: LabelFields | None = None
    ) -> None:
        super().__init__(events.features, made_of)
        self._events = events
        self._read = read
        self._is_timed = is_timed

    def process(self, given: NumberedBatch, out: Output) -> None:
        """Emit the events of a mini-batch; questions without features and answers without a label are refused."""
        (at, first), records = given["position"], given["records"]
        count = len(records)
        timed = TimedEvents.of(records) if self._is_timed else None

        def read(records: Batch, numbers: Indices) -> dict[str, Any]:
            events = None if timed is None else timed.taken((numbers - first).tolist())
            return {
                "numbers": numbers,
                "records": records,
                "times": None if events is None else events.times,
                "before": None if events is None else events.before,
                **self._read_events(records, events, out),
            }

        found = of_numbered_rows(read, records if timed is None else timed.records, first, out) or {}
        out.emit(
            no_events() | found | {"position": (at, first), "count": count, "label_fields": self.fields_of_label()}
        )

    def _label_of(self, answer: Any, out: Output) -> Label:
        """Return the label of an answer. If it is refused, its question has no label, and waits no longer."""
        try:
            return self._events.target_of(answer)
        except Exception as error:
            out.reject(answer, error)
            return None

    def _read_events(self, records: Batch, events: TimedEvents | None, out: Output) -> dict[str, Any]:
        if events is None or events.keys is None or events.is_answer is None:
            are_answers, keys = answers_and_keys(self._events, records)
            labelled = None
        else:
            are_answers, keys = events.is_answer, events.keys
            labelled = [not is_answer for is_answer in are_answers]
        target_of, weight_of = self._events.target_of, self._events.weight_of
        has_label, weights = labelled or are_answers, None
        if weight_of is not None:
            weights = row_weights("train_online", self._values(weight_of, records, has_label, 1.0), len(records))
        # The label of a row says which of its fields are features. A refused answer is not read again with its batch.
        labels = [] if labelled is None else self._values(target_of, records, labelled)
        asked = [row for row, is_answer in enumerate(are_answers) if not is_answer]
        features = record_of_features(self._read_questions(records, asked))
        if labelled is None:
            labels = [self._label_of(event, out) if has_label[row] else None for row, event in enumerate(records)]
        return {"keys": keys, "is_answer": are_answers, "labels": labels, "weights": weights, "features": features}

    @staticmethod
    def _values(value_of: Callable[[Any], Any], records: Batch, labelled: list[bool], default: Any = None) -> list[Any]:
        """Return a value of each event that has a label."""

        def values_of(rows: Sequence[tuple[Any, bool]]) -> list[Any]:
            return [value_of(event) if has_label else default for event, has_label in rows]

        return blaming_rows(values_of, list(zip(records, labelled, strict=True)), values_of)

    def _read_questions(self, records: Batch, asked: list[int]) -> NamedRows | SparseRows:
        if not asked:
            return named_matrix(np.empty((0, 0)))
        questions = take(records, asked)
        self._unnamed.look_at(questions)
        try:
            return blaming_rows(self._read, questions, self._read)
        except BadRows as bad:
            reasons = {asked[row]: reason for row, reason in bad.reasons.items()}
            raise BadRows([asked[row] for row in bad.rows], bad.reason, reasons) from bad
