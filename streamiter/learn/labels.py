"""Labels: what they are, and how each of them becomes the number that a model learns from.

A :class:`LabelReader` decides from the first labels what is learned: a truth value or one of two labels, one of several
classes, or a number. It decides for each label in turn, so no cut of batches changes the decision.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import compress, pairwise
from operator import attrgetter
from typing import Any, Final, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from streamiter.errors import ConfigurationError, ModelError, shortened
from streamiter.learn.asked_questions import QuestionPredictions
from streamiter.learn.rows import BadRows
from streamiter.operators.declared_state import DeclaredState, Form, declared
from streamiter.operators.definitions import Definition
from streamiter.values.field_kinds import HUGE, number_of_text
from streamiter.values.named_rows import is_missing
from streamiter.values.numbers import Floats, plain_scalar

_log = logging.getLogger("streamiter.learn")

LearningTask = Literal["classification", "binary", "multiclass", "regression"]

Label = Any
"""A number, a truth value or a text; the user's value."""

Labels = Sequence[Label] | npt.NDArray[Any]

LabelKind = Literal["binary", "classes", "number"]

FIRST_LABELS: Final = 1_000
"""The number of labels that the kind is decided from: if one label in 200 is a count above 1, such a label is among
them with a probability of 99 %. Their rows are kept meanwhile, a quarter of a mini-batch."""

# More classes are most likely numbers that were taken for classes.
_CLASSES_MAX: Final = 1_000

# Squares of targets are added up, and stay finite.
_TARGET_MAX: Final = HUGE

_TASKS: Final = ("classification", "binary", "multiclass", "regression")


@dataclass(frozen=True)
class Reading:
    """How labels are read."""

    kind: LabelKind
    names: tuple[Label, ...] = ()
    """The classes in the order of their numbers; of two labels the negative, then the positive one; None if not known.
    """
    first: Label = None
    """The label that came first, of two."""
    is_sure: bool = True
    """Whether no later label changes the kind."""
    count: int = 0
    """The number of labels before a reading was given up, up to ``FIRST_LABELS``."""

    @cached_property
    def codes(self) -> dict[Label, float]:
        """The number of each label that is known, of classes and of two labels."""
        return {name: float(number) for number, name in enumerate(self.names) if name is not None}

    @property
    def labels(self) -> list[Label] | None:
        """The labels as users see them, None for a label that has not come; None for numbers and truth values."""
        are_truths = self.kind == "binary" and all(name in (None, 0, 1) for name in self.names)
        return None if are_truths or not self.names else list(self.names)

    @property
    def numbers(self) -> tuple[float, float]:
        """Two labels as numbers; a negative one that has not come is 0."""
        negative, positive = map(number_of_label, self.names)
        return negative or 0.0, positive or 0.0

    def goes_on_in(self, later: Reading) -> bool:
        """Whether a model that has learned from labels of this reading continues with the labels of ``later``."""
        is_same = self.kind == later.kind
        return is_same and all(later.codes.get(name) == code for name, code in self.codes.items())

    def targets(self, given: Labels, learns: npt.NDArray[np.bool_]) -> Floats | None:
        """Return labels as numbers, 0 for rows that are not learned from; None if another label is not known."""
        if not learns.all():
            targets = np.zeros(len(learns))
            some = given[learns] if isinstance(given, np.ndarray) else list(compress(given, learns.tolist()))
            found = self.targets(some, np.ones(len(some), dtype=np.bool_))
            if found is None:
                return None
            targets[learns] = found
            return targets
        if isinstance(given, np.ndarray) and given.dtype == object:
            given = given.tolist()
        is_plain = isinstance(given, np.ndarray) and given.dtype.kind in "biuf" and given.ndim == 1
        if self.kind == "number":
            return _numbers(given)
        if self.names == (0, 1) and not is_plain and {bool}.issuperset(map(type, given)):
            return np.array(given, dtype=np.float64)
        if is_plain and self.names == (0, 1):
            targets = np.asarray(given).astype(np.float64)
            return targets if ((targets == 0.0) | (targets == 1.0)).all() else None
        try:
            numbers = list(map(self.codes.get, given.tolist() if isinstance(given, np.ndarray) else given))
        except TypeError:  # A label without a hash.
            return None
        return None if None in numbers else np.array(numbers, dtype=np.float64)

    def in_terms_of(self, earlier: Reading, predictions: Floats) -> Floats:
        """Return probabilities that were predicted while labels were read as ``earlier``, as predictions of this kind.

        A probability becomes a number between both labels; the probability of one of two labels becomes the
        probability of its class. By the rule of Laplace, a class that had not come in n labels has the
        probability 1 / (n + 2).
        """
        negative, positive = earlier.names
        if self.kind == "number":
            lowest, highest = earlier.numbers
            return lowest + predictions * (highest - lowest)
        if self.kind == "binary":
            return predictions if earlier.goes_on_in(self) else 1.0 - predictions
        found = np.zeros((len(predictions), len(self.names) + 1))
        found[np.isnan(predictions)] = np.nan
        # A probability of ½ counts for the positive label.
        against = np.where(predictions == 0.5, np.nextafter(0.5, 0.0), 1.0 - predictions)
        for name, chances in ((negative, against), (positive, predictions)):
            found[:, -1 if name is None else int(self.codes[name])] = chances
        if None not in earlier.names:
            found[:, -1] = 1.0 / (earlier.count + 2.0)
        return found


class LabelPart(NamedTuple):
    """Some labels one after the other, all read in one way."""

    start: int
    stop: int
    reading: Reading
    targets: Floats


_READING: Final = Form(
    attrgetter("kind", "names", "first", "is_sure", "count"),
    lambda plain: Reading(plain[0], tuple(plain[1]), *plain[2:]),
)
_READINGS: Final = Form(
    lambda readings: list(map(_READING.plain, readings)), lambda plain: list(map(_READING.of, plain))
)


class LabelReader(DeclaredState):
    """Decides how labels are read, from the first ones or as it is told.

    ``task="classification"`` is the truth value or one of two labels, and classes if a third label comes; ``"binary"``
    refuses a third label, ``"multiclass"`` has classes from the start, and ``"regression"`` numbers. None: numbers
    besides 0 and 1, or -1 and 1, are numbers to predict, and so are three texts that are numbers, if one of them has a
    fraction; everything else is as for ``"classification"``. Where labels are numbers, texts may be numbers.
    ``classes`` are all labels. ``positive`` is the label whose probability is predicted, of two; None: the larger
    number, or the later text in alphabetical order. Numbers below ``least`` are refused.
    """

    has_open_class: bool = declared()
    """Whether there may be a class that has not come yet."""
    reading: Reading | None = declared(None, form=_READING)
    """How labels are read now; None before the first one."""
    earlier: list[Reading] = declared(made=list, form=_READINGS)
    """The readings that were given up, in their order; all of them are of two labels. Scores of questions begin with
    their number."""
    count = declared(0)
    """The number of labels so far; it ends at ``FIRST_LABELS``."""

    def __init__(
        self,
        owner: str,
        task: LearningTask | None,
        classes: Sequence[Label] | None = None,
        positive: Label = None,
        least: float | None = None,
    ) -> None:
        if task not in (None, *_TASKS):
            raise ConfigurationError(f"{owner}(task=): expected {_one_of(_TASKS)}, given {task!r}")
        if classes is not None and (task == "regression" or len(set(classes)) < 2):
            raise ConfigurationError(
                f"{owner}(classes=): expected two different classes or more, of a classification, given "
                f"{list(classes)!r} and task={task!r}"
            )
        self._owner = owner
        self._least = least
        self.task: LearningTask | None = task
        self.positive = _plain(positive)
        self._closed = None if classes is None else tuple(dict.fromkeys(map(_plain, classes)))
        self._has_classes = task == "multiclass" or len(self._closed or ()) > 2
        if positive is not None:
            if self._has_classes or task == "regression" or (self._closed and self.positive not in self._closed):
                raise ConfigurationError(
                    f"{owner}(positive=): expected one of two labels, given {positive!r}, task={task!r} and "
                    f"classes={classes!r}"
                )
            self.task = "binary"
        self.has_open_class = self._closed is None

    @property
    def known(self) -> list[Label] | None:
        """The labels as users see them, see :attr:`Reading.labels`; before the first one, the given labels."""
        if self.reading is not None:
            return self.reading.labels
        return None if self._closed is None else list(self._closed if self._has_classes else self._pair(*self._closed))

    @property
    def is_settled(self) -> bool:
        """Whether later labels no longer change how the first labels are read."""
        return self.reading is not None and (self.reading.is_sure or self.count >= FIRST_LABELS)

    @property
    def earlier_targets(self) -> tuple[float, float] | None:
        """The numbers, or the numbers of classes, that two labels became; None if labels are as they seemed."""
        reading = self.reading
        if not self.earlier or reading is None or reading.kind == "binary":
            return None
        if reading.kind == "number":
            return self.earlier[-1].numbers
        negative, positive = self.earlier[-1].names
        return reading.codes.get(negative, 0.0), reading.codes.get(positive, 0.0)

    @property
    def given_up(self) -> Reading | None:
        """How labels are read until another reading is taken over."""
        return None if self.reading is None else replace(self.reading, count=self.count)

    @property
    def is_positive_known(self) -> bool:
        """Whether it is decided which of two labels is positive; until then it is the label that has not come yet."""
        return self.reading is None or self.is_settled or self.reading.names[-1] is not None

    def read(self, labels: Labels, learns: npt.NDArray[np.bool_]) -> list[LabelPart]:
        """Return the labels as numbers, in parts that are read in one way; steps before the first label have no part.

        Changes nothing: :meth:`take_over` does. Raises ``BadRows`` for labels that do not fit.
        """
        if len(labels) != len(learns):
            raise ModelError(f"{self._owner}: expected {len(learns)} labels, one for each row, given {len(labels)}")
        reading, count = self.reading, self.count
        if reading is not None and self.is_settled and (targets := self._targets_in_range(labels, learns)) is not None:
            return [LabelPart(0, len(labels), reading, targets)]
        given = labels.tolist() if isinstance(labels, np.ndarray) else list(labels)
        bounds: list[tuple[int, Reading]] = []
        bad: list[int] = []
        start = 0
        for place in np.flatnonzero(learns).tolist():
            label, later = given[place], None
            if is_label(label) and not self._is_too_small(label):
                is_first = count < FIRST_LABELS and not (reading is not None and reading.is_sure)
                later = self._after(reading, _plain(label), is_first)
            if later is None:
                bad.append(place)
                continue
            count += 1
            if reading is None:
                start = place
            elif not reading.goes_on_in(later):
                bounds.append((place, reading))
            reading = later
        if bad:
            raise self._refused(reading, bad, given)
        if reading is None:
            return []
        parts = []
        for stop, each in [*bounds, (len(given), reading)]:
            found = each.targets(given[start:stop], learns[start:stop])
            assert found is not None
            parts.append(LabelPart(start, stop, each, found))
            start = stop
        return parts

    def _is_too_small(self, label: Label) -> bool:
        number = None if self._least is None else number_of_label(label)
        return self._least is not None and number is not None and number < self._least

    def _targets_in_range(self, labels: Labels, learns: npt.NDArray[np.bool_]) -> Floats | None:
        """Return the labels as numbers, as they are read now; None if one does not fit."""
        targets = None if self.reading is None else self.reading.targets(labels, learns)
        if targets is None or self._least is None:
            return targets
        return targets if (targets[learns] >= self._least).all() else None

    def take_over(self, part: LabelPart, labels: int) -> None:
        """Read the next labels in the way of this part, and count the labels of its rows that are learned from."""
        before, now = self.reading, part.reading
        if before is not None and not before.goes_on_in(now):
            self.earlier.append(replace(before, count=self.count))
        if before is None or before.names != now.names:
            self._say(before, now)
        self.reading = now
        self.count = min(self.count + labels, FIRST_LABELS)

    def as_now(self, predictions: QuestionPredictions) -> Floats:
        """Return predictions that were made under earlier readings in the present form.

        A class that was not known then has the probability 0; the class that had not come yet is the last one.
        """
        reading = self.reading
        assert reading is not None
        width = len(reading.names) + self.has_open_class if reading.kind == "classes" else 1
        found = np.zeros((len(predictions.made), width))
        # Mostly there is one group: nothing has changed.
        starts = np.flatnonzero(np.diff(predictions.readings, prepend=-2) | np.diff(predictions.widths, prepend=0))
        firsts = zip(predictions.readings[starts].tolist(), predictions.widths[starts].tolist(), strict=True)
        for earlier, given in set(firsts):
            rows = np.flatnonzero((predictions.readings == earlier) & (predictions.widths == given))
            made = predictions.made[rows, :given]
            if 0 <= earlier < len(self.earlier):
                told = made[:, 0]
                for before, now in pairwise([*self.earlier, reading][earlier:]):
                    told = now.in_terms_of(before, told)
                found[rows] = told.reshape(len(rows), -1)
            elif given < width:
                # The class that had not come then is still the last one.
                found[rows, : given - 1], found[rows, -1] = made[:, :-1], made[:, -1]
            else:
                found[rows] = made
        return found if reading.kind == "classes" else found[:, 0]

    def _say(self, before: Reading | None, now: Reading) -> None:
        """Say what the labels are, once it is certain, and each time that it turns out to be something else."""
        if before is not None and before.kind == "binary" != now.kind:
            negative, positive = before.names
            if now.kind == "number":
                shown = 0 if negative is None else negative
                what = f"not only {shown!r} and {positive!r}, so they are numbers to predict"
            else:
                what = f"not only {negative!r} and {positive!r}, but also {now.names[-1]!r}, so they are classes"
            is_early = self.count < FIRST_LABELS
            _log.log(
                logging.INFO if is_early else logging.WARNING,
                "%s: the labels are %s; %s. Predictions until now were probabilities of %r; task=%r says it at once",
                self._owner,
                what,
                f"the {self.count} rows so far are learned again" if is_early else "the model keeps its weights",
                positive,
                "regression" if now.kind == "number" else "multiclass",
            )
        elif now.kind == "binary" and now.labels is not None and None not in now.names:
            _log.info(
                "%s: the labels are %r and %r, and predictions are the probability of %r; positive= chooses the other",
                self._owner,
                *now.names,
                now.names[1],
            )

    def targets(self, labels: Labels) -> Floats:
        """Return labels that were learned from as numbers, as they are read now."""
        if self.reading is None:
            raise ModelError(f"{self._owner}: expected to have learned from a row first, given none so far")
        targets = self.reading.targets(labels, np.ones(len(labels), dtype=np.bool_))
        if targets is None:
            raise ModelError(f"{self._owner}: expected labels that were learned from, given others")
        return targets

    # ---- what a label decides

    def _begin(self, label: Label) -> Reading | None:
        """Return how labels are read from the first label on; None if it is refused."""
        is_number = not isinstance(label, str)
        if self.task == "regression":
            return Reading("number") if number_of_label(label) is not None else None
        if self._closed is not None and label not in self._closed:
            return None
        if self._has_classes:
            return Reading("classes", self._closed or (label,))
        if self._closed is not None:
            return Reading("binary", self._pair(*self._closed), label)
        if isinstance(label, bool):
            return Reading("binary", (False, True), label)
        if self.positive is not None:
            pair = (None if label == self.positive else label, self.positive)
            return Reading("binary", pair, label, is_sure=None not in pair)
        if self.task is not None or not is_number:
            return Reading("binary", (label, None), label, is_sure=False)
        if label not in (-1, 0, 1):
            return Reading("number")
        return Reading("binary", (None if label == 1 else label, 1), label, is_sure=False)

    def _after(self, reading: Reading | None, label: Label, is_first: bool) -> Reading | None:
        """Return how labels are read from this label on; None if it is refused. ``is_first``: it is an early label."""
        if reading is None:
            return self._begin(label)
        if reading.kind == "number":
            return None if number_of_label(label) is None else reading
        if label in reading.codes:
            return reading
        if reading.kind == "classes":
            has_room = self.has_open_class and len(reading.names) < _CLASSES_MAX
            return replace(reading, names=(*reading.names, label)) if has_room else None
        negative, positive = reading.names
        if reading.is_sure or (self._is_numeric(reading) and isinstance(label, str)):
            return None
        if self._is_numeric(reading):
            if negative is None and label in (-1, 0):
                return replace(reading, names=(label, positive))
            return Reading("number") if is_first else None
        if None in reading.names:
            known = positive if negative is None else negative
            pair = (label, known) if negative is None else self._pair(known, label) if is_first else (known, label)
            return replace(reading, names=pair, is_sure=self.task == "binary")
        if is_first and self.task is None and _are_fractions((*reading.names, label)):
            return Reading("number")
        # The order in which they came; after the first labels, the model has weights for the two labels that it knows.
        names = sorted(reading.names, key=lambda name: name != reading.first) if is_first else reading.names
        return Reading("classes", (*names, label))

    def _is_numeric(self, reading: Reading) -> bool:
        """Whether two labels may still turn out to be numbers."""
        return self.task is None and reading.kind == "binary" and not isinstance(reading.first, str)

    def _pair(self, one: Label, other: Label) -> tuple[Label, Label]:
        """Return the negative label and the positive one."""
        if self.positive is not None:
            return (other, one) if one == self.positive else (one, other)
        first, second = sorted((one, other), key=_order)
        return first, second

    def _refused(self, reading: Reading | None, bad: Sequence[int], given: Sequence[Label]) -> BadRows:
        """Return the error for labels that do not fit."""
        reasons = {}
        for place in bad:
            expected, advice = self._expected(reading, given[place])
            if given[place] is None or (isinstance(given[place], float) and math.isnan(given[place])):
                advice = 'leave out rows without a label, or give the step on_error="skip"'
            message = f"{self._owner}: expected a label that is {expected}, given {shortened(given[place])}"
            reasons[place] = message + (f"; {advice}" if advice else "")
        return BadRows(bad, reasons[bad[0]], reasons)

    def _expected(self, reading: Reading | None, label: Label) -> tuple[str, str]:
        """Return the label that was expected instead of this one, and what to do."""
        of_classes = 'give task="classification" for more than two classes'
        if self.task == "binary":
            of_classes = 'give task="multiclass", in a service kind = "multiclass", for more than two classes'
        if self._closed is not None and is_label(label):
            return f"one of the classes {', '.join(map(repr, self._closed))}", ""
        if reading is None and self.task != "regression":
            return "a number, a truth value or a text", ""
        if reading is None or reading.kind == "number":
            advice = 'give task="classification" for classes' if isinstance(label, str) and self.task is None else ""
            least = "" if self._least is None else f" and at least {self._least:g}"
            return f"a number of at most {_TARGET_MAX:g} in size{least}", advice
        if self._is_numeric(reading) or reading.names == (0, 1):
            pair = "-1 or 1" if reading.names[0] == -1 else "0, 1 or a truth value"
            return f"{pair}, like the first label", f'give task="regression" for numbers, {of_classes[5:]}'
        if not is_label(label):
            return "a text, a number or a truth value", ""
        if reading.kind == "classes":
            return f"one of at most {_CLASSES_MAX} classes", 'give task="regression" if labels are numbers'
        without = "" if self.positive is None else ", without positive="
        return _one_of([name for name in reading.names if name is not None]), of_classes + without

    # ---- published models, state

    def start_from(self, kind: LabelKind, labels: Sequence[Label] | None, *, has_open_class: bool) -> None:
        """Read labels like the labels that a published model has learned from."""
        self.has_open_class = has_open_class and kind == "classes"
        names = tuple(labels or ())
        if kind == "binary":
            is_sure = not names or (self.task == "binary" and None not in names)
            reading = Reading(kind, names or (False, True), is_sure=is_sure)
        else:
            reading = Reading(kind, names)
        self._check(reading)
        self.reading = reading
        self.settle()

    def settle(self) -> None:
        """No longer change how the first labels were read: their rows are not kept."""
        self.count = FIRST_LABELS

    def definition(self) -> Definition:
        """Return what the reader was told of labels."""
        closed = None if self._closed is None else list(self._closed)
        return {"task": self.task, "positive": self.positive, "classes": closed}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Take on a :meth:`state`. Raises ModelError if this reader was told another task or another positive label."""
        super().restore(state)
        if self.reading is not None:
            self._check(self.reading)

    def _check(self, reading: Reading) -> None:
        fits = self.task is None or (reading.kind == "number") == (self.task == "regression")
        is_pair = reading.kind == "binary"
        fits &= is_pair or self.task != "binary"
        fits &= not (is_pair and self._has_classes)
        fits &= not is_pair or self.positive in (None, reading.names[1])
        if not fits:
            raise ModelError(
                f"{self._owner}: expected a model of task={self.task!r}, positive={self.positive!r}, given one of "
                f"the kind {reading.kind!r} with the labels {list(reading.names)}; make the model with the same "
                "options, or start without the earlier one"
            )


def _numbers(given: Labels) -> Floats | None:
    """Return labels that are numbers; None if one of them is not, or is too large."""
    try:
        targets = np.array(given)
    except ValueError:  # Sequences of several lengths.
        return None
    if targets.dtype.kind not in "biuf" or targets.ndim != 1:
        found = list(map(number_of_label, given))  # Integers above 2**64, and texts.
        if None in found:
            return None
        targets = np.array(found)
    targets = targets.astype(np.float64)
    return None if is_missing(targets).any() else targets


def is_label(label: Label) -> bool:
    """Whether a label can be one: a text, a truth value or a number that is not too large; not None, not NaN."""
    plain = plain_scalar(label)
    return isinstance(plain, str) or (isinstance(plain, (int, float)) and abs(plain) <= _TARGET_MAX)


def number_of_label(label: Label) -> float | None:
    """Return the number that a label or its text is; None for a label that is none.

    >>> number_of_label(3), number_of_label(" 2.50"), number_of_label("2,5"), number_of_label(None)
    (3.0, 2.5, None, None)
    """
    if isinstance(label, str):
        return number_of_text(label)
    return float(label) if is_label(label) else None


def _are_fractions(labels: Sequence[Label]) -> bool:
    """Whether labels are texts of numbers, and not whole numbers alone, which may be names of classes."""
    numbers = [number_of_label(label) for label in labels if isinstance(label, str)]
    return len(numbers) == len(labels) and None not in numbers and any(n is not None and n % 1 for n in numbers)


def is_truth(label: Label) -> bool:
    """Whether a label is True or False, or 1 or 0."""
    return isinstance(label, (bool, int, float, np.number, np.bool_)) and label in (0, 1)


def counts_as_false(label: Label, other: Label = None, positive: Label = None) -> bool:
    """Whether a label is False, 0, or the negative one of two texts; without ``other``, whether it may be negative.

    ``positive`` is the label whose probability is asked for, None for no choice.

    >>> counts_as_false("no", "yes"), counts_as_false("yes", "no"), counts_as_false("yes", "no", positive="no")
    (True, False, True)
    """
    if positive is not None and label == positive:
        return False
    if not isinstance(label, str):
        return is_truth(label) and not label and (other is None or is_truth(other))
    if other is None or positive is not None:
        return other is None or other == positive
    return isinstance(other, str) and _order(label) < _order(other)


def _plain(label: Label) -> Label:
    """Return the label as plain Python data, so that equal labels of numpy and Python are one class."""
    plain = plain_scalar(label)
    return int(plain) if isinstance(plain, float) and plain.is_integer() else plain


def _order(label: Label) -> tuple[Any, ...]:
    """Return the sort key of a label: numbers by size, then texts by their letters, texts with a minus first."""
    if not isinstance(label, str):
        return 0, label
    return 1, not label.strip().startswith(("-", "−")), label.casefold(), label


def _one_of(names: Sequence[Label]) -> str:
    quoted = [f'"{name}"' if isinstance(name, str) else repr(name) for name in names]
    return " or ".join([", ".join(quoted[:-1]), quoted[-1]]) if len(quoted) > 1 else quoted[0]
