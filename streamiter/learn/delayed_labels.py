"""Labels that come later than the question: predict now, learn when the answer is known."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from streamiter.errors import ModelError
from streamiter.learn.checks import BadRows
from streamiter.learn.examples import Examples
from streamiter.learn.gradient_worker import GradientWorker, WorkerOptions, without
from streamiter.learn.sparse import SparseRows
from streamiter.operators.output import Output
from streamiter.records import Batch

__all__ = ["DelayedGradientWorker", "DelayedLabels"]

# Indices and values, as lists: some eight features in numpy arrays of their own would take ten times as long.
_Row = tuple[list[int], list[float]]


@dataclass(frozen=True, slots=True)
class DelayedLabels:
    """How questions and answers are told apart in one stream of events, in time order.

    ``key_of(event)`` is what an answer shares with its question; ``is_answer(event)`` tells which it is;
    ``features(questions)`` gives the rows of a list of questions; ``target_of(answer)`` the target, None
    where there will never be one (the question is forgotten). At most ``waiting_max`` questions wait;
    the oldest is forgotten beyond that.
    """

    key_of: Callable[[Any], Hashable]
    is_answer: Callable[[Any], bool]
    features: Callable[[Sequence[Any]], SparseRows]
    target_of: Callable[[Any], float | None]
    waiting_max: int = 1_000_000


class DelayedGradientWorker(GradientWorker):
    """Predicts each question with the parameters of its time, and learns from it when its answer comes.

    What is validated is that first prediction.
    """

    def __init__(self, options: WorkerOptions, labels: DelayedLabels) -> None:
        super().__init__(options)
        self._labels = labels
        self._waiting: dict[Hashable, tuple[_Row, float]] = {}

    def process_examples(self, mini_batch: Batch, out: Output) -> None:
        """The questions of a mini-batch of events, then its answers."""
        is_answer = self._labels.is_answer
        questions = [event for event in mini_batch if not is_answer(event)]
        if questions:
            self._ask(questions, out)
        answers = [event for event in mini_batch if is_answer(event)]
        if answers:
            self._learn_from(answers, out)

    def _ask(self, questions: list[Any], out: Output) -> None:
        try:
            rows = self._labels.features(questions)
        except BadRows as bad:
            good = without(questions, bad, out)
            if len(good):
                self._ask(list(good), out)
            return
        predictions = self._model.predict(rows).tolist()
        for question, row, prediction in zip(questions, rows.rows(), predictions, strict=True):
            self._waiting[self._labels.key_of(question)] = (row, prediction)
        while len(self._waiting) > self._labels.waiting_max:
            del self._waiting[next(iter(self._waiting))]

    def _learn_from(self, answers: list[Any], out: Output) -> None:
        answered = []
        for answer in answers:
            waiting = self._waiting.pop(self._labels.key_of(answer), None)
            if waiting is None:
                out.reject(answer, ModelError("an answer without a question that waits for it"))
                continue
            target = self._labels.target_of(answer)
            if target is not None:
                answered.append((answer, *waiting, target))
        while answered:
            events, rows, predictions, targets = zip(*answered, strict=True)
            try:
                examples = Examples(SparseRows.from_rows(rows, self._model.width), np.array(targets))
                self.emit_gradient(examples, np.array(predictions), out)
            except BadRows as bad:
                without(list(events), bad, out)
                answered = [entry for row, entry in enumerate(answered) if row not in bad.rows]
            else:
                return

    def snapshot(self) -> dict[str, Any]:
        waiting = [(key, *row, prediction) for key, (row, prediction) in self._waiting.items()]
        return super().snapshot() | {"waiting": waiting}

    def restore(self, state: dict[str, Any]) -> None:
        super().restore(state)
        self._waiting = {
            key: ((indices, values), prediction) for key, indices, values, prediction in state["waiting"]
        }
