"""The OpenAPI document of the service: its routes by hand, the schemas from the types of its answers."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Mapping
from typing import Annotated, Any, Final, Literal, NotRequired, TypedDict

import msgspec
from msgspec import Meta

from streamiter.engine.graph.statistics import JobStatistics
from streamiter.flow.drawing.picture import Picture
from streamiter.models.differences import ModelDifference
from streamiter.models.versions import ModelVersion
from streamiter.service.http.answers import CONTENT_TYPE, ProblemDocument
from streamiter.service.http.candidates import CandidateRequest
from streamiter.service.http.predictions import PredictionAnswer
from streamiter.service.observing.health import HealthProblem
from streamiter.service.observing.observations import ProcessRole, TaskRates
from streamiter.service.observing.page_documents import FlowDrawing, PageDetails, PageHistory, PageState
from streamiter.service.settings.tables import HttpSettings


class PredictionRequest(TypedDict):
    """Many rows; one row may be sent as it is."""

    rows: Annotated[
        list[dict[str, Any] | list[float | None]],
        Meta(description="Objects of named fields, or lists of numbers for a model of a matrix"),
    ]


class VersionList(TypedDict):
    """The last versions of a model."""

    model: str
    serving: Annotated[str | None, Meta(description="The version that answers now, such as 2.17")]
    versions: Annotated[list[ModelVersion], Meta(description="The newest first")]


class FlowDocument(TypedDict):
    """The graph of a flow, with live statistics."""

    flow: str
    graph: Annotated[Picture, Meta(description="Nodes and links, as the drawing shows them; boxes are iterations")]
    statistics: JobStatistics
    rates: Annotated[tuple[TaskRates, ...], Meta(description="The work of each task in the last second")]


class HealthDocument(TypedDict):
    """Whether the service is alive, or ready."""

    status: Literal["ok", "failing"]
    role: Annotated[
        ProcessRole, Meta(description="What the process is for: a leader learns, a standby would take over")
    ]
    problems: Annotated[tuple[HealthProblem, ...], Meta(description="Each condition that does not hold")]
    catching_up: NotRequired[
        Annotated[str, Meta(description="How far the history has been read that comes before the topic")]
    ]


_TYPES: Final = (
    PredictionRequest,
    CandidateRequest,
    PredictionAnswer,
    ProblemDocument,
    VersionList,
    ModelDifference,
    FlowDocument,
    HealthDocument,
    PageState,
    PageHistory,
    PageDetails,
    FlowDrawing,
)

_FLAGS: Final = {
    "partial": "Predict the other rows if some are wrong; a wrong row has an error instead of a prediction.",
    "explain": "Add the contribution of each feature to the score; for linear models.",
}
_REFUSALS: Final[Mapping[int, str]] = {
    400: "The request is malformed.",
    401: "The request has no token, or another one.",
    403: "The token permits other requests only.",
    404: "There is no such path, model or version.",
    405: "The path has no such method; Allow has its methods.",
    408: "The request took too long.",
    413: "The body or the number of rows is too large.",
    415: "The body has a coding.",
    421: "The request is to another host.",
    422: "Rows are wrong; errors has all wrong values.",
    429: "Too many requests at a time.",
    431: "The path and the headers are too large.",
    500: "A bug in streamiter; its log describes it.",
    503: "There is no model yet, or its topic does not answer.",
}
_OF_PAGE: Final[Mapping[str, tuple[str, type, tuple[int, ...]]]] = {
    "/api/state": ("All figures of now", PageState, ()),
    "/api/history": ("The last hour", PageHistory, ()),
    "/api/details": ("Weights, versions, drifts, checkpoints and dead letters", PageDetails, ()),
    "/api/drawing": ("The place of each step in the drawing of the page", FlowDrawing, (404, 503)),
}
_OF_GATE: Final = (400, 401, 403, 405, 408, 421, 429, 431, 500)


def openapi_document(settings: HttpSettings) -> dict[str, Any]:
    """Return the document (OpenAPI 3.1) of a service with these settings.

    >>> openapi_document(HttpSettings())["paths"]["/predict"]["post"]["summary"]
    'Predict one row or many, or rank candidates'
    """
    _, schemas = msgspec.json.schema_components(_TYPES, ref_template="#/components/schemas/{name}")
    document: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {
            "title": "streamiter",
            "version": importlib.metadata.version("streamiter"),
            "description": "Predictions of a model that learns from a stream, and the state of its service. "
            f"Limits: a body of {settings.body_bytes_max:,} bytes, {settings.rows_max:,} rows, "
            f"{settings.requests_max:,} requests at a time, {settings.timeout_s:g} s.",
        },
        "paths": _paths(),
        "components": {"schemas": schemas},
    }
    if settings.has_token:
        document["components"]["securitySchemes"] = {"token": {"type": "http", "scheme": "bearer"}}
        document["security"] = [{"token": []}]
    return document


def _paths() -> dict[str, Any]:
    name = {"name": "name", "in": "path", "required": True, "schema": {"type": "string"}}
    prediction = _operation(
        "Predict one row or many, or rank candidates",
        PredictionAnswer,
        refusals=(404, 413, 415, 422, 503),
        parameters=[_parameter(flag, text, {"type": "boolean", "default": False}) for flag, text in _FLAGS.items()],
        body={
            "oneOf": [
                _ref(PredictionRequest),
                _ref(CandidateRequest),
                {"type": "object", "not": {"anyOf": [{"required": ["rows"]}, {"required": ["candidates"]}]}},
            ]
        },
    )
    version = {"type": "string", "pattern": r"^\d+(\.\d+)?$"}
    count = _parameter("count", "The largest number", {"type": "integer", "minimum": 1, "maximum": 100, "default": 20})
    health = {200: "Yes.", 503: "No; the document has each condition that fails."}
    return {
        "/livez": {"get": _probe("Whether the process is alive", health)},
        "/readyz": {"get": _probe("Whether the service does its work", health)},
        "/metrics": {
            "get": _operation(
                "Metrics for Prometheus",
                {"text/plain": {"type": "string"}, "application/openmetrics-text": {"type": "string"}},
            )
        },
        "/predict": {"post": prediction},
        "/models/{name}/predict": {"parameters": [name], "post": prediction},
        "/models/{name}/versions": {
            "parameters": [name],
            "get": _operation("List the last versions", VersionList, refusals=(404, 503), parameters=[count]),
        },
        "/models/{name}/compare": {
            "parameters": [name],
            "get": _operation(
                "Compare two versions: their metrics, and the weights that moved most",
                ModelDifference,
                refusals=(404, 503),
                parameters=[
                    _parameter("old", "Such as 2.17, or 2 for the last of a generation", version, required=True),
                    _parameter("new", "The newest version if it is left out", version),
                    count,
                ],
            ),
        },
        "/flow": {
            "get": _operation(
                "The graph with live statistics, or a drawing of it",
                {"application/json": _ref(FlowDocument), "image/svg+xml": {"type": "string"}},
                refusals=(404, 503),
            )
        },
        **{
            path: {"get": _operation(summary, kind, refusals=refusals)}
            for path, (summary, kind, refusals) in _OF_PAGE.items()
        },
        "/api/events": {
            "get": _operation(
                "Server-sent events: the state each second, and the details when they have changed",
                {"text/event-stream": {"type": "string"}},
            )
        },
        "/openapi.json": {"get": _operation("This document", {"application/json": {"type": "object"}})},
    }


def _ref(kind: type) -> dict[str, str]:
    return {"$ref": f"#/components/schemas/{kind.__name__}"}


def _parameter(name: str, description: str, schema: dict[str, Any], *, required: bool = False) -> dict[str, Any]:
    return {"name": name, "in": "query", "description": description, "required": required, "schema": schema}


def _operation(
    summary: str,
    answers: type | Mapping[str, dict[str, Any]],
    *,
    refusals: tuple[int, ...] = (),
    parameters: list[dict[str, Any]] | None = None,
    body: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Return an operation; ``answers`` is the type of a JSON document, or the schema of each content type."""
    if isinstance(answers, type):
        answers = {"application/json": _ref(answers)}
    problem = {CONTENT_TYPE: {"schema": _ref(ProblemDocument)}}
    content = {kind: {"schema": schema} for kind, schema in answers.items()}
    operation: dict[str, Any] = {
        "summary": summary,
        "parameters": parameters or [],
        "responses": {
            "200": {"description": "The answer.", "content": content},
            **{
                str(status): {"description": _REFUSALS[status], "content": problem}
                for status in sorted({*_OF_GATE, *refusals})
            },
        },
    }
    if body is not None:
        operation["requestBody"] = {"required": True, "content": {"application/json": {"schema": body}}}
    return operation


def _probe(summary: str, answers: Mapping[int, str]) -> dict[str, Any]:
    content = {"application/json": {"schema": _ref(HealthDocument)}}
    return {
        "summary": summary,
        "security": [],
        "responses": {str(status): {"description": text, "content": content} for status, text in answers.items()},
    }
