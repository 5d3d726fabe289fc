"""The answers of all routes: JSON documents, and errors as ``application/problem+json`` of RFC 9457."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Final, NotRequired, TypedDict

import orjson
from msgspec import Meta
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from streamiter.service.observing.observations import Observations

if TYPE_CHECKING:
    from streamiter.engine.job.job import Job

FRESH: Final = {"Cache-Control": "no-store"}
"""The headers of an answer that changes."""

CONTENT_TYPE: Final = "application/problem+json"
RETRY_SOON: Final = {"Retry-After": "1"}


class BadValue(TypedDict):
    """A value of the request that is wrong."""

    path: Annotated[str, Meta(description="Where the value is: a JSON Pointer such as /rows/3/km")]
    detail: Annotated[str, Meta(description="What was expected, what was given")]


class ProblemDocument(TypedDict):
    """An error: what is wrong with the request, or with the service."""

    type: Annotated[str, Meta(description="The kind of the problem, which never changes")]
    title: Annotated[str, Meta(description="The kind of the problem in words")]
    status: Annotated[int, Meta(description="The status of the answer")]
    detail: Annotated[str, Meta(description="What was expected, what was given, what to do")]
    errors: NotRequired[Annotated[list[BadValue], Meta(description="All wrong values of the request")]]


class Problem(Exception):
    """A request that cannot be answered, with the status and the document of its answer.

    >>> Problem(404, "unknown-model", "expected the model 'ctr', given 'ctx'").document()["title"]
    'Unknown model'
    """

    def __init__(
        self,
        status: int,
        kind: str,
        detail: str,
        *,
        errors: list[BadValue] | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(detail)
        self.status = status
        self.kind = kind
        self.errors = errors
        self.headers = dict(headers or {})

    def document(self) -> ProblemDocument:
        """Return the document."""
        document: ProblemDocument = {
            "type": f"urn:streamiter:problem:{self.kind}",
            "title": self.kind.replace("-", " ").capitalize(),
            "status": self.status,
            "detail": str(self),
        }
        if self.errors is not None:
            document["errors"] = self.errors
        return document

    def body(self) -> bytes:
        """Return the document as JSON."""
        return orjson.dumps(self.document())


class RawEndpoint:
    """Lets a route call a method as it would call an application."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._app(scope, receive, send)


def json_answer(body: bytes, status: int = 200) -> Response:
    """Return an answer with a document that is encoded."""
    return Response(body, status, headers={"Content-Type": "application/json", **FRESH})


def refusal(problem: Problem) -> Response:
    """Return the answer to a request that cannot be answered."""
    return Response(problem.body(), problem.status, headers={"Content-Type": CONTENT_TYPE, **FRESH, **problem.headers})


def started_job(observations: Observations) -> Job:
    """Return the job that runs, or ran last; raise a Problem before the first one."""
    if observations.phase.phase == "following":
        given = f"a {observations.role}, which follows its model only"
        detail = f"expected a service with a flow, given {given}; ask the service itself"
        raise Problem(404, "no-flow", detail)
    if observations.job is None:
        detail = f"expected a flow that has been started, but the service is {observations.phase.phase}; ask again"
        raise Problem(503, "not-started", detail, headers=RETRY_SOON)
    return observations.job
