"""The page of a service, at ``/``, and its documents under ``/api/``.

The page is four files, which load nothing from elsewhere. It reads ``/api/history`` once, and then ``/api/events``,
server-sent events of the same documents that ``/api/state`` and ``/api/details`` return: the state each second, the
details when they have changed. Each document is encoded once for all clients. A client that reads slowly skips states,
because its next state is taken when it has read the one before.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from functools import partial
from importlib.resources import files
from typing import Final

import orjson
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from streamiter.engine.graph.graph import Step
from streamiter.models.differences import ModelDifference, model_difference, with_texts
from streamiter.models.documents import SHAPES, members_in
from streamiter.models.explanations import Effects
from streamiter.models.linear_predictor import LinearPredictor
from streamiter.models.update import ModelUpdate
from streamiter.service.http.answers import FRESH, Problem, RawEndpoint, json_answer, started_job
from streamiter.service.observing.observations import SAMPLE_S, Observations
from streamiter.service.observing.page_documents import (
    effects_shown,
    flow_drawing,
    page_details,
    page_history,
    page_state,
)
from streamiter.values.helpers.files import in_thread

EVENTS_PATH: Final = "/api/events"
# A page open in each of some browsers; each is a connection and an encoded state in its buffer.
_STREAMS_MAX: Final = 32
_DETAILS_EVERY: Final = 5
_WEIGHTS: Final = 12

_POLICY: Final = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'"
)
_FILES: Final = {
    "index.html": ("/", "text/html; charset=utf-8"),
    "page.css": ("/page.css", "text/css; charset=utf-8"),
    "page.js": ("/page.js", "text/javascript; charset=utf-8"),
    "icon.svg": ("/icon.svg", "image/svg+xml"),
}


def page_routes(observations: Observations) -> list[Route]:
    """Return the routes of the page and of its documents."""
    return _Page(observations).routes()


class _Page:
    """The answers of the page."""

    def __init__(self, observations: Observations) -> None:
        self._observations = observations
        self._streams = 0
        self._drawn: tuple[Sequence[Step], bytes] | None = None
        self._weights: tuple[float, ModelDifference] | None = None
        self._effects: tuple[float, Effects | None] | None = None
        self._encoded: dict[str, tuple[float, bytes]] = {}
        """The newest documents, and the time of each by the monotonic clock."""
        self._lock = asyncio.Lock()
        """A drawing, and a comparison of weights, are made by one thread at a time."""

    def routes(self) -> list[Route]:
        folder = files("streamiter.service") / "page"
        shown = [
            Route(path, partial(_file, (folder / name).read_bytes(), kind)) for name, (path, kind) in _FILES.items()
        ]
        return [
            *shown,
            Route("/api/state", self.state),
            Route("/api/history", self.history),
            Route("/api/details", self.details),
            Route("/api/drawing", self.drawing),
            Route(EVENTS_PATH, RawEndpoint(self.events), methods=["GET"]),
        ]

    async def state(self, request: Request) -> Response:
        """Return all figures of now."""
        return json_answer(self._state())

    async def history(self, request: Request) -> Response:
        """Return the last hour."""
        return json_answer(self._newest("history", lambda: page_history(self._observations)))

    async def details(self, request: Request) -> Response:
        """Return weights, effects, versions, drifts, checkpoints and dead letters."""
        return json_answer(await self._details())

    async def drawing(self, request: Request) -> Response:
        """Return the place of each step."""
        job = started_job(self._observations)
        async with self._lock:
            if self._drawn is None or self._drawn[0] is not job.steps:
                drawn = await in_thread(flow_drawing, job.flow, job.steps)
                self._drawn = job.steps, orjson.dumps(drawn)
            return json_answer(self._drawn[1])

    async def events(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the state each second, and the details when they have changed, until the service ends."""
        if self._streams >= _STREAMS_MAX:
            detail = f"expected at most {_STREAMS_MAX} open pages, given one more; close some"
            raise Problem(429, "too-many-pages", detail)
        headers = {"Content-Type": "text/event-stream", **FRESH, "X-Accel-Buffering": "no"}
        self._streams += 1
        try:
            await StreamingResponse(self._events(), headers=headers)(scope, receive, send)
        finally:
            self._streams -= 1

    async def _events(self) -> AsyncIterator[bytes]:
        sent, number = b"", 0
        while True:
            # The server ends with its phase, and would wait for this answer; the last state tells that it has ended.
            is_last = self._observations.phase.phase in ("finished", "suspended", "aborted", "failed")
            if is_last:  # A document of the last half second may be older than the end.
                self._encoded.pop("state", None)
            yield _event("state", self._state())
            if number % _DETAILS_EVERY == 0 and (details := await self._details()) != sent:
                sent = details
                yield _event("details", details)
            if is_last:
                return
            number += 1
            await self._observations.clock.sleep(SAMPLE_S)

    def _state(self) -> bytes:
        return self._newest("state", lambda: page_state(self._observations))

    async def _details(self) -> bytes:
        weights, effects = await self._difference(), await self._effects_now()
        return self._newest("details", lambda: page_details(self._observations, weights, effects))

    def _newest(self, name: str, make: Callable[[], object]) -> bytes:
        """Return a document of the last half second, encoded."""
        now_s = self._observations.clock.monotonic_s()
        made = self._encoded.get(name)
        if made is None or now_s - made[0] > SAMPLE_S / 2:
            made = self._encoded[name] = now_s, orjson.dumps(make(), option=orjson.OPT_SERIALIZE_NUMPY)
        return made[1]

    async def _difference(self) -> ModelDifference | None:
        """Return the weights that changed most, compared at most once in some seconds for all clients."""
        async with self._lock:
            new, compared = self._observations.model, self._observations.compared
            if new is None or not compared or compared[0].rank == new.rank:
                return None
            now_s = self._observations.clock.monotonic_s()
            if self._weights is None or now_s - self._weights[0] >= _DETAILS_EVERY * SAMPLE_S:
                self._weights = now_s, await in_thread(self._compare, compared[0], new)
            return self._weights[1]

    def _compare(self, old: ModelUpdate, new: ModelUpdate) -> ModelDifference:
        return with_texts(model_difference(old, new, _WEIGHTS), self._observations.texts_at)

    async def _effects_now(self) -> Effects | None:
        """Return the effects of fields, computed at most once in some seconds for all clients."""
        async with self._lock:
            update, now_s = self._observations.model, self._observations.clock.monotonic_s()
            if update is None or members_in(update.parameters, SHAPES) is None:
                return None
            if self._effects is None or now_s - self._effects[0] >= _DETAILS_EVERY * SAMPLE_S:
                self._effects = now_s, await in_thread(self._find_effects, update)
            return self._effects[1]

    def _find_effects(self, update: ModelUpdate) -> Effects | None:
        effects = LinearPredictor(update.parameters).effects
        return None if effects is None else effects_shown(effects, self._observations)


def _event(name: str, document: bytes) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (name.encode(), document)


async def _file(content: bytes, kind: str, request: Request) -> Response:
    headers = {
        "Content-Type": kind,
        "Cache-Control": "no-cache",
        "Content-Security-Policy": _POLICY,
        "Referrer-Policy": "no-referrer",
    }
    return Response(content, headers=headers)
