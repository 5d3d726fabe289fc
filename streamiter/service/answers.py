"""What the routes of the server and those of the page share."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeVar

from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from streamiter.service.observations import Observations
from streamiter.service.problems import RETRY_SOON, Problem

if TYPE_CHECKING:
    from streamiter.runtime.job import Job

T = TypeVar("T")

FRESH: Final = {"Cache-Control": "no-store"}
"""The headers of an answer that changes."""


class RawEndpoint:
    """Lets a route call a method as it would call an application."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._app(scope, receive, send)


async def in_thread(function: Callable[..., T], *arguments: Any) -> T:
    """Return the result of a call in a thread. If the client leaves, wait for the thread: a lock must hold until then.

    Otherwise clients that ask and leave would start one thread after the other.
    """
    called = asyncio.get_running_loop().run_in_executor(None, partial(function, *arguments))
    try:
        return await asyncio.shield(called)
    except asyncio.CancelledError:
        await asyncio.wait([called])
        raise


def json_answer(body: bytes, status: int = 200) -> Response:
    """Return an answer with a document that is encoded."""
    return Response(body, status, headers={"Content-Type": "application/json", **FRESH})


def started_job(observations: Observations) -> Job:
    """Return the job that runs, or ran last; raise a Problem before the first one."""
    if observations.job is None:
        detail = f"expected a flow that has been started, but the service is {observations.phase.phase}; ask again"
        raise Problem(503, "not-started", detail, headers=RETRY_SOON)
    return observations.job
