"""From the JSON of a request to its predictions: rows, wrong values with their paths, contributions of features.

All rows of an answer are predicted by one version of the model. A thousand rows are predicted in groups, and other
tasks of the event loop run between two groups.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Annotated, Any, Final, NotRequired, TypedDict

import numpy as np
import orjson
from msgspec import Meta

from streamiter.errors import ModelError, did_you_mean, shortened
from streamiter.models.explanations import Explanation
from streamiter.models.linear_predictor import LinearPredictor
from streamiter.models.served import ServedVersion
from streamiter.service.http.answers import BadValue, Problem
from streamiter.values.helpers.clock import Clock

# Each name that the model does not know costs up to 40 µs, because it is hashed if its value is missing.
_UNKNOWN_FIELDS_MAX: Final = 256

# A name is compared with each field that the row lacks, 20 µs each.
_NAMES_COMPARED_MAX: Final = 16
_FIELDS_COMPARED_MAX: Final = 64
_LIKENESS: Final = 0.8

# A group takes about 2 ms, also if its rows are wrong and are looked at one by one.
_GROUP: Final = 256
_GROUP_ONE_BY_ONE: Final = 16

_log = logging.getLogger("streamiter.service.http")

_NUMBERS: Final = (int, float, type(None))


class PredictedRow(TypedDict, total=False):
    """The prediction for one row: a probability, a value, the probabilities of labels, or the reason why none."""

    id: Annotated[str, Meta(description="The id in the log of predictions; absent if it is not logged")]
    probability: Annotated[float, Meta(ge=0, le=1, description="The probability of true, or of the label `positive`")]
    value: Annotated[Any, Meta(description="The value that the model predicts")]
    probabilities: Annotated[dict[str, float], Meta(description="The probability of each label")]
    unseen: Annotated[float, Meta(description="The probability of a label that has not come in training yet")]
    score: Annotated[Any, Meta(description="The sum of intercept and contributions; for labels, by label")]
    intercept: Annotated[Any, Meta(description="The score of a row of which nothing is known")]
    contributions: Annotated[dict[str, Any], Meta(description="The part of each feature in the score")]
    error: Annotated[str, Meta(description="Why the row has no prediction (?partial=true)")]
    errors: Annotated[list[BadValue], Meta(description="All wrong values of the row (?partial=true)")]
    candidate: Annotated[int, Meta(ge=0, description="The position of the candidate in the request")]
    model: Annotated[str, Meta(description="The challenger, where it has predicted this row and not all of them")]
    generation: Annotated[int, Meta(description="The generation of its version")]
    version: Annotated[int, Meta(description="Its version")]


class PredictionAnswer(TypedDict):
    """Predictions for all rows of a request, by one version of the model."""

    model: str
    generation: Annotated[int, Meta(description="The generation of the version")]
    version: Annotated[int, Meta(description="The version of the model that has predicted all rows")]
    age_s: Annotated[float, Meta(description="Seconds since this version was made")]
    positive: NotRequired[Annotated[str, Meta(description="The label that `probability` is of; absent: true, or 1")]]
    predictions: Annotated[
        list[PredictedRow], Meta(description="One for each row, in their order; or the best candidates")
    ]


async def answer_rows(
    version: ServedVersion,
    rows: list[Any],
    path: str,
    clock: Clock,
    *,
    others: Sequence[ServedVersion | None] = (),
    partial: bool = False,
    explain: bool = False,
) -> PredictionAnswer:
    """Return the predictions for the rows of a request, whose list has this path in its document.

    ``others`` has for each row None, or the version of the challenger, which answers for this row. Raises
    :class:`~streamiter.service.http.answers.Problem`: 422 for wrong rows, unless ``partial``: then a wrong row has its
    error instead of a prediction.
    """
    of_version = VersionRows(version, path)
    of_version.check_names(rows)
    predictions = await of_version.predicted(rows, explain)
    if (other := next(filter(None, others), None)) is not None:
        of_other, update = VersionRows(other, path), other.update
        of_other.check_names(rows)
        name: PredictedRow = {"model": update.model, "generation": update.generation, "version": update.version}
        for at, predicted in enumerate(await of_other.predicted(rows, explain)):
            if others[at] is not None:
                predictions[at] = {**predicted, **name}
    if not partial and (wrong := [row["errors"] for row in predictions if "errors" in row]):
        raise Problem(
            422,
            "wrong-rows",
            f"expected rows as the model {version.update.model!r} has learned from, given {len(wrong)} of {len(rows)} "
            "that are wrong; mend their values (see errors), or add ?partial=true to predict the other rows",
            errors=list(chain.from_iterable(wrong)),
        )
    return of_version.answer(predictions, clock)


def answer_row(version: ServedVersion, row: Any, path: str, clock: Clock) -> PredictionAnswer | None:
    """Return the prediction for one row at once; None if the row is wrong, which :func:`answer_rows` explains."""
    of_version = VersionRows(version, path)
    of_version.check_names([row])
    predictions = of_version.together([row])
    return None if predictions is None else of_version.answer(predictions, clock)


def requested_document(body: bytes) -> dict[str, Any]:
    """Return the document of a request.

    Raises :class:`~streamiter.service.http.answers.Problem`: 400 for bytes that are no JSON, 422 for what is no
    object.
    """
    try:
        given = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise Problem(400, "not-json", f"expected a JSON document in UTF-8, given {len(body)} bytes: {error}") from None
    if not isinstance(given, dict):
        raise wrong_document("", f'expected {{"rows": [...]}} or one row as an object, given {shortened(given)}')
    return given


def requested_rows(given: dict[str, Any], rows_max: int) -> tuple[list[Any], str]:
    """Return the rows of a request and the path of their list, which is empty if the document is one row.

    Raises :class:`~streamiter.service.http.answers.Problem`: 413 for too many rows, 422 for a document of another form.

    >>> requested_rows({"rows": [{"km": 3}]}, 1000), requested_rows({"km": 3}, 1000)
    (([{'km': 3}], '/rows'), ([{'km': 3}], ''))
    """
    rows = given.get("rows")
    if "rows" not in given or (len(given) > 1 and not isinstance(rows, (list, dict))):
        return [given], ""
    if not isinstance(rows, list):
        raise wrong_document("/rows", f"expected a list of rows, given {shortened(rows)}")
    if len(given) > 1:
        others = [name for name in given if name != "rows"]
        raise wrong_document("", f"expected no other names than 'rows', given {shortened(others)}")
    if len(rows) > rows_max:
        raise Problem(
            413,
            "too-many-rows",
            f"expected at most {rows_max:,} rows in a request, given {len(rows):,}; send several requests",
        )
    return rows, "/rows"


def wrong_document(path: str, detail: str) -> Problem:
    """Return the problem of a document that is wrong at this path."""
    return Problem(422, "wrong-rows", detail, errors=[{"path": path, "detail": detail}])


class MisspeltFields:
    """Says once in the log that rows have a field with nearly the name of one that they lack: it has no effect."""

    def __init__(self) -> None:
        self._seen: set[str] = set()

    def look_at(self, version: ServedVersion, row: Any) -> None:
        """Compare the first names that the model does not know with the fields that the row lacks."""
        predictor = version.predict
        if not isinstance(predictor, LinearPredictor) or not isinstance(row, dict):
            return
        missing = sorted(predictor.fields - row.keys())[:_FIELDS_COMPARED_MAX]
        for name in sorted(row.keys() - predictor.fields - self._seen)[: _NAMES_COMPARED_MAX if missing else 0]:
            if len(self._seen) >= _UNKNOWN_FIELDS_MAX:
                return
            self._seen.add(name)
            if meant := did_you_mean(name, missing, likeness=_LIKENESS):
                _log.warning(
                    "predictions by %r: a row has the field %s, which the model does not know, so it has no effect%s",
                    version.update.model,
                    shortened(name),
                    meant,
                )


class VersionRows:
    """The rows of a request, predicted by one version of a model."""

    def __init__(self, version: ServedVersion, path: str) -> None:
        self._version = version
        self._path = path
        predictor = version.predict
        self._linear = predictor if isinstance(predictor, LinearPredictor) else None
        self._classes: list[Any] | None = getattr(predictor, "classes", None)
        self._labels = [_label(label) for label in self._classes or ()]
        parameters = version.update.parameters
        self._is_probability = isinstance(parameters, dict) and parameters.get("link") == "logit"

    def answer(self, predictions: list[PredictedRow], clock: Clock) -> PredictionAnswer:
        """Return the answer with these predictions."""
        update = self._version.update
        answer: PredictionAnswer = {
            "model": update.model,
            "generation": update.generation,
            "version": update.version,
            "age_s": update.age_s(clock),
            "predictions": predictions,
        }
        if (positive := getattr(self._version.predict, "positive", None)) is not None:
            answer["positive"] = _label(positive)
        return answer

    def check_names(self, rows: list[Any]) -> None:
        """Refuse rows with more fields that the model does not know than can be hashed in a short time."""
        if self._linear is None:
            return
        if len(rows) == 1 and len(rows[0] if isinstance(rows[0], dict) else ()) <= _UNKNOWN_FIELDS_MAX:
            return
        names = set(chain.from_iterable(row for row in rows if isinstance(row, dict)))
        unknown = names - self._linear.fields
        if len(unknown) > _UNKNOWN_FIELDS_MAX:
            detail = (
                f"expected at most {_UNKNOWN_FIELDS_MAX} fields that the model does not know, given {len(unknown):,}, "
                f"such as {shortened(min(unknown))}"
            )
            raise wrong_document(self._path, detail)

    async def predicted(self, rows: list[Any], explain: bool) -> list[PredictedRow]:
        """Return a prediction or an error for each row."""
        found: list[PredictedRow] = []
        for start in range(0, len(rows), _GROUP):
            if start:
                await asyncio.sleep(0)
            group = rows[start : start + _GROUP]
            if not explain and (together := self.together(group)) is not None:
                found += together
                continue
            for at, row in enumerate(group, start):
                if at % _GROUP_ONE_BY_ONE == _GROUP_ONE_BY_ONE - 1:
                    await asyncio.sleep(0)
                found.append(self._alone(row, f"{self._path}/{at}" if self._path else "", explain))
        return found

    @np.errstate(over="ignore", invalid="ignore")
    def together(self, rows: list[Any]) -> list[PredictedRow] | None:
        """Return the predictions of a group, or None if the group has a wrong row."""
        try:
            if len(rows) == 1:
                return [self._predicted(rows[0])]
            for row in rows:
                _check_kind(row)
            values = self._version.predict(rows)
            return [self.shown(value) for value in (values.tolist() if isinstance(values, np.ndarray) else values)]
        except ModelError:
            return None

    @np.errstate(over="ignore", invalid="ignore")
    def _alone(self, row: Any, path: str, explain: bool) -> PredictedRow:
        try:
            predicted = self._predicted(row)
            if explain:
                self.add_explanation(predicted, row)
        except ModelError as error:
            errors = self.wrong_values(row, path) or [{"path": path, "detail": self.without_subject(error)}]
            return {"error": errors[0]["detail"], "errors": errors}
        return predicted

    def _predicted(self, row: Any) -> PredictedRow:
        _check_kind(row)
        # A row of numbers is predicted as a matrix, in which a list of rows has no place.
        value = self._version.predict(row) if isinstance(row, dict) else self._version.predict([row])[0]
        return self.shown(value.tolist() if isinstance(value, (np.ndarray, np.generic)) else value)

    def shown(self, value: Any) -> PredictedRow:
        """Return the prediction of a value. Raises ``ModelError`` for a value that is no finite number."""
        numbers = value if isinstance(value, list) else (value,)
        if any(isinstance(number, float) and not math.isfinite(number) for number in numbers):
            raise ModelError("expected values for which the model predicts a finite number, given larger ones")
        if self._classes is not None:
            row: PredictedRow = {"probabilities": dict(zip(self._labels, value, strict=False))}
            if len(value) > len(self._labels):
                row["unseen"] = value[-1]
            return row
        return {"probability": value} if self._is_probability else {"value": value}

    def add_explanation(self, predicted: PredictedRow, row: Any) -> None:
        """Add the parts of the score. Raises ``Problem`` for a model that is not linear."""
        if self._linear is None:
            raise Problem(
                422,
                "not-explainable",
                f"expected a linear model to explain predictions of, given {self._version.update.model!r} with a "
                "predictor of its own; leave out ?explain=true",
            )
        explained: Explanation = self._linear.explain(row)
        predicted["score"] = self._by_label(explained.score)
        predicted["intercept"] = self._by_label(explained.intercept)
        ranked = list(explained.ranked.items())
        if self._classes is not None:  # By what is shown: there is no contribution to a label that has not come yet.
            ranked.sort(key=lambda each: -float(np.abs(each[1][: len(self._labels)]).sum()))
        predicted["contributions"] = {name: self._by_label(part) for name, part in ranked}

    def _by_label(self, part: Any) -> Any:
        return part if self._classes is None else dict(zip(self._labels, part.tolist(), strict=False))

    def wrong_values(self, row: Any, path: str) -> list[BadValue]:
        """Return the fields that are wrong also in a row of their own."""
        wrong: list[BadValue] = []
        if self._linear is not None and isinstance(row, dict):
            for name in row.keys() & self._linear.fields:
                try:
                    self._linear({name: row[name]})
                except ModelError as error:
                    wrong.append({"path": f"{path}/{_escaped(name)}", "detail": self.without_subject(error)})
        return sorted(wrong, key=lambda each: each["path"])

    def without_subject(self, error: ModelError) -> str:
        """Return the message without the model and its topic, which clients need not know."""
        model = f"model {self._version.update.model!r}: "
        return str(error).removeprefix(f"{self._version.subject}: ").removeprefix(model)


def _check_kind(row: Any) -> None:
    if isinstance(row, Mapping):
        return
    if not isinstance(row, list) or not all(isinstance(value, _NUMBERS) for value in row):
        raise ModelError(f"expected a row as an object of named fields or a list of numbers, given {shortened(row)}")


def _label(label: Any) -> str:
    """Return a label as a name of JSON: a text itself, another label as JSON writes it."""
    return label if isinstance(label, str) else orjson.dumps(label, option=orjson.OPT_SERIALIZE_NUMPY).decode()


def _escaped(name: str) -> str:
    """Return the name as a part of a JSON Pointer.

    >>> _escaped("km/h ~")
    'km~1h ~0'
    """
    return name.replace("~", "~0").replace("/", "~1")
