"""What the routes of the server and those of the page share."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from streamiter.service.observations import Observations
from streamiter.service.problems import Problem

if TYPE_CHECKING:
    from streamiter.runtime.job import Job

FRESH: Final = {"Cache-Control": "no-store"}
"""The headers of an answer that changes."""
RETRY_SOON: Final = {"Retry-After": "1"}
"""The headers of a problem that soon is over."""


class RawEndpoint:
    """Lets a route call a method as it would call an application."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._app(scope, receive, send)


def json_answer(body: bytes, status: int = 200) -> Response:
    """Return an answer with a document that is encoded."""
    return Response(body, status, headers={"Content-Type": "application/json", **FRESH})


def started_job(observations: Observations) -> Job:
    """Return the job that runs, or ran last; raise a Problem before the first one."""
    if observations.job is None:
        detail = f"expected a flow that has been started, but the service is {observations.phase.phase}; ask again"
        raise Problem(503, "not-started", detail, headers=RETRY_SOON)
    return observations.job
