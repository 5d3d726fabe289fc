"""From a request with candidates to the best of them: ``{"row": {...}, "candidates": [{...}, ...], "top": 10}``.

All candidates are predicted by one version of the model, in groups between which other tasks of the event loop run.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from itertools import chain
from typing import Annotated, Any, Final, NotRequired, TypedDict

import numpy as np
from msgspec import Meta

from streamiter.errors import ModelError, shortened
from streamiter.models.linear_predictor import LinearPredictor
from streamiter.models.ranking import best_of
from streamiter.models.served import ServedVersion
from streamiter.service.http.answers import BadValue, Problem
from streamiter.service.http.predictions import PredictedRow, PredictionAnswer, VersionRows, wrong_document
from streamiter.values.helpers.clock import Clock

_TOP: Final = 10
# A group takes about 2 ms.
_GROUP: Final = 256
_NAMES: Final = frozenset({"row", "candidates", "top"})


class CandidateRequest(TypedDict):
    """A row, and candidates with the fields that differ; the answer has the best of them."""

    candidates: Annotated[list[dict[str, Any]], Meta(description="The fields of each candidate")]
    row: NotRequired[Annotated[dict[str, Any], Meta(description="The fields that all candidates share")]]
    top: NotRequired[Annotated[int, Meta(ge=1, description="How many of the best are in the answer; 10 without it")]]


@dataclass(frozen=True, slots=True)
class RequestedCandidates:
    """The checked document of a request."""

    row: dict[str, Any]
    candidates: list[dict[str, Any]]
    top: int

    @staticmethod
    def of(document: dict[str, Any], rows_max: int) -> RequestedCandidates | None:
        """Return the request; None for a document that is a row. Raises ``Problem`` for wrong requests."""
        candidates, row, top = document.get("candidates"), document.get("row", {}), document.get("top", _TOP)
        are_objects = isinstance(candidates, list) and all(isinstance(each, dict) for each in candidates)
        if not are_objects or not document.keys() <= _NAMES:
            return None
        assert isinstance(candidates, list)
        if not isinstance(row, dict):
            raise wrong_document("/row", f"expected the fields that all candidates share, given {shortened(row)}")
        if type(top) is not int or top < 1:
            raise wrong_document("/top", f"expected a whole number of at least 1, given {shortened(top)}")
        if len(candidates) > rows_max:
            raise Problem(
                413,
                "too-many-rows",
                f"expected at most {rows_max:,} candidates in a request, given {len(candidates):,}; send fewer, or "
                "raise http.rows_max",
            )
        return RequestedCandidates(row, candidates, top)

    async def answer(
        self, version: ServedVersion, clock: Clock, *, partial: bool = False, explain: bool = False
    ) -> PredictionAnswer:
        """Return the predictions for the best candidates, the best first. Raises ``Problem`` for wrong candidates."""
        if partial:
            raise Problem(400, "wrong-parameter", "expected no ?partial=true with candidates, given it; leave it out")
        if not isinstance(version.predict, LinearPredictor) or version.predict.classes is not None:
            raise wrong_document(
                "/candidates",
                f"expected a model with one score to rank candidates, given {version.update.model!r}, which has "
                "several classes, or a predictor of its own; send rows",
            )
        VersionRows(version, "").check_names([self.row, *self.candidates])
        values = await self._values(version.predict, version)
        rows = VersionRows(version, "/candidates")
        predictions: list[PredictedRow] = []
        for position in best_of(values, self.top).tolist():
            predicted = rows.shown(float(values[position]))
            if explain:
                rows.add_explanation(predicted, self._whole(position))
            predictions.append({**predicted, "candidate": position})
        return rows.answer(predictions, clock)

    def whole_rows(self, predictions: list[PredictedRow]) -> list[dict[str, Any]]:
        """Return the rows of predictions of an answer."""
        return [self._whole(each["candidate"]) for each in predictions]

    def _whole(self, position: int) -> dict[str, Any]:
        return {**self.row, **self.candidates[position]}

    async def _values(self, predict: LinearPredictor, version: ServedVersion) -> Any:
        found = [np.zeros(0)]
        for start in range(0, len(self.candidates), _GROUP):
            if start:
                await asyncio.sleep(0)
            try:
                with np.errstate(over="ignore", invalid="ignore"):
                    found.append(predict.predict_candidates(self.row, self._group(start)))
            except ModelError as error:
                raise self._refusal(version, start, error) from None
        return np.concatenate(found)

    def _group(self, start: int) -> list[dict[str, Any]]:
        return self.candidates[start : start + _GROUP]

    def _refusal(self, version: ServedVersion, start: int, error: ModelError) -> Problem:
        """Return the problem of a group: the wrong values of the row, or else of its candidates."""
        rows = VersionRows(version, "")
        wrong: list[BadValue] = rows.wrong_values(self.row, "/row")
        if not wrong:
            each = (
                rows.wrong_values(candidate, f"/candidates/{at}")
                for at, candidate in enumerate(self._group(start), start)
            )
            wrong = list(chain.from_iterable(each))
        wrong = wrong or [{"path": "/candidates", "detail": rows.without_subject(error)}]
        return Problem(
            422,
            "wrong-rows",
            f"expected candidates as the model {version.update.model!r} has learned from, given others; mend their "
            "values (see errors)",
            errors=wrong,
        )
