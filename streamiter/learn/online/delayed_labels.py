"""Labels that come later than the question: predict now, learn when the answer is known."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from streamiter.errors import ModelError
from streamiter.learn.online.gradient_worker import GradientWorker, WorkerOptions
from streamiter.learn.rows.checks import BadRows
from streamiter.learn.rows.examples import Examples
from streamiter.learn.rows.good_rows import blaming_rows, without
from streamiter.operators.output import Output
from streamiter.records import Batch
from streamiter.sparse_rows import SparseRows

__all__ = ["DelayedGradientWorker", "DelayedLabels"]

# Indices and values, as lists: some eight features in numpy arrays of their own would take ten times as long.
_Row = tuple[list[int], list[float]]
_Answered = tuple[Any, _Row, float, float]
"""The answer, the features and prediction of its question, the target."""


@dataclass(frozen=True, slots=True)
class DelayedLabels:
    """How questions and answers are told apart in one stream of events, in time order.

    ``key_of(event)`` is what an answer shares with its question (int, str, bytes or a tuple of these);
    ``is_answer(event)`` tells which it is;
    ``features(questions)`` gives the rows of a list of questions; ``target_of(answer)`` the target, None
    where there will never be one (the question is forgotten). At most ``waiting_max`` questions wait at each
    worker; the oldest is forgotten beyond that.
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
        """Predict all questions, then go through the events in order; learn from the answers together."""
        asked = self._ask([event for event in mini_batch if not self._labels.is_answer(event)], out)
        answered: list[_Answered] = []
        for event in mini_batch:
            if not self._labels.is_answer(event):
                question = next(asked)
                if question is not None:
                    self._wait(event, *question)
            elif (answer := self._answered(event, out)) is not None:
                answered.append(answer)
        self._learn_from(answered, out)

    def _ask(self, questions: list[Any], out: Output) -> Iterator[tuple[_Row, float] | None]:
        """Features and prediction of each question, None for one that has no features."""
        if not questions:
            return iter(())
        try:
            rows, predictions = blaming_rows(self._predicted, questions, self._labels.features)
        except BadRows as bad:
            good = iter(self._ask(list(without(questions, bad, out)), out))
            return iter([None if row in bad.rows else next(good) for row in range(len(questions))])
        return zip(rows.rows(), predictions, strict=True)

    def _predicted(self, questions: Sequence[Any]) -> tuple[SparseRows, list[float]]:
        rows = self._labels.features(questions)
        return rows, self._model.predict(rows).tolist()

    def _wait(self, question: Any, row: _Row, prediction: float) -> None:
        key = self._labels.key_of(question)
        self._waiting.pop(key, None)  # Asked again it is the youngest.
        self._waiting[key] = (row, prediction)
        if len(self._waiting) > self._labels.waiting_max:
            del self._waiting[next(iter(self._waiting))]

    def _answered(self, answer: Any, out: Output) -> _Answered | None:
        waiting = self._waiting.pop(self._labels.key_of(answer), None)
        if waiting is None:
            out.reject(answer, ModelError("an answer without a question that waits for it"))
            return None
        try:
            target = self._labels.target_of(answer)
            return None if target is None else (answer, *waiting, float(target))
        except Exception as error:
            out.reject(answer, error)
            return None

    def _learn_from(self, answered: list[_Answered], out: Output) -> None:
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
