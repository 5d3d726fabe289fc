"""The HTTP server of a service, in the event loop of its job: :func:`serving`.

Every request passes the :class:`RequestGate`: who may ask, how many may ask at once, and errors as documents.
:class:`Routes` has the answers. The server computes in the loop of the job, so no answer may compute for long:
predictions of many rows yield to the job, another thread makes a drawing, and topics are read for one request at a
time.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import socket
from collections.abc import AsyncIterator, Mapping
from typing import Any, Final, Literal

import orjson

from streamiter.errors import ConfigurationError, RecordTooLarge, TopicError
from streamiter.flow.drawing.formats import svg
from streamiter.flow.drawing.picture import picture_of
from streamiter.models import NoModel, NoSuchVersion, ServedModel, find_update, model_difference, model_versions
from streamiter.models.differences import with_texts
from streamiter.models.served import ServedVersion
from streamiter.models.update import shown_rank
from streamiter.service.http.access import Access, permits
from streamiter.service.observing.health import HealthFacts, HealthProblem, facts_of, liveness, readiness
from streamiter.service.observing.observations import Observations
from streamiter.service.settings.tables import HttpSettings
from streamiter.values.helpers.files import in_thread

try:
    from starlette.exceptions import HTTPException
    from starlette.requests import ClientDisconnect, Request
    from starlette.responses import Response
    from starlette.routing import Route, Router
    from starlette.types import Message, Receive, Scope, Send
    from uvicorn import Config

    from streamiter.service.http.answers import (
        FRESH,
        RETRY_SOON,
        Problem,
        RawEndpoint,
        json_answer,
        refusal,
        started_job,
    )
    from streamiter.service.http.candidates import RequestedCandidates
    from streamiter.service.http.connections import KEEP_ALIVE_S, ClientConnection, EmbeddedServer, KnownHeads
    from streamiter.service.http.openapi import FlowDocument, HealthDocument, VersionList, openapi_document
    from streamiter.service.http.page import EVENTS_PATH, page_routes
    from streamiter.service.http.predictions import (
        MisspeltFields,
        answer_row,
        answer_rows,
        requested_document,
        requested_rows,
    )
    from streamiter.service.observing.metrics import MetricsNow, exposition
except ImportError as error:
    raise ConfigurationError(
        f"the service needs the package {str(error.name).partition('.')[0]!r}; install it with: pip install "
        "'streamiter[service]'"
    ) from error

_log = logging.getLogger("streamiter.service.http")

# An answer that is under way when the service stops may take this long.
_GRACE_S: Final = 2.0
# A body that is too large is read up to this size, because a client that still writes does not see the answer.
_READ_ON_BYTES: Final = 16 << 20
_VERSIONS_MAX: Final = 100
_UNREAD_BYTES: Final = 128 * 1024

# Health needs no token, and is answered under any load.
_PROBES: Final = frozenset({"/livez", "/readyz"})


@contextlib.asynccontextmanager
async def serving(
    observations: Observations, settings: HttpSettings, access: Access | None = None
) -> AsyncIterator[str]:
    """Serve until the ``async with`` ends, with the address of the server, such as ``http://127.0.0.1:8080``.

    A failure of the server cancels the body. At the end answers that are under way have 2 s. Raises ConfigurationError
    for an address that is in use, and for a token or a certificate that cannot be read.
    """
    access, heads = access or Access(settings), KnownHeads()
    access.on_change = heads.clear
    context = access.tls
    listener = _listening(settings)
    host, port = listener.getsockname()[:2]
    address = f"{'http' if context is None else 'https'}://{f'[{host}]' if ':' in host else host}:{port}"

    def refused(scope: Mapping[str, Any], status: int) -> None:
        observations.requested(route_of(scope), status)

    config = Config(
        RequestGate(Routes(observations, settings).router(), observations, settings, access),
        http=functools.partial(ClientConnection, settings.timeout_s, refused, heads),  # type: ignore[arg-type]
        loop="none",
        ws="none",
        lifespan="off",
        log_config=None,
        log_level="warning",
        proxy_headers=False,
        server_header=False,
        headers=[("x-content-type-options", "nosniff")],
        timeout_keep_alive=KEEP_ALIVE_S,
    )
    server = EmbeddedServer(config, context, settings.timeout_s)
    async with asyncio.TaskGroup() as group:
        running = group.create_task(server.serve([listener]), name="HTTP server")
        _log.info("HTTP at %s", address)
        try:
            yield address
        finally:
            await server.stop(running, _GRACE_S)


def _listening(settings: HttpSettings) -> socket.socket:
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    try:
        listener = socket.create_server((settings.host, settings.port), family=family, backlog=512)
        # Otherwise the kernel keeps megabytes for each client that does not read.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _UNREAD_BYTES)
        return listener
    except OSError as error:
        raise ConfigurationError(
            f"http.address: expected an address of this machine with a free port, given {settings.address} "
            f"({error.strerror or error}); choose another port, or end the program that uses it"
        ) from error


class RequestGate:
    """What each request passes, and where errors become documents; it counts all requests."""

    def __init__(self, router: Router, observations: Observations, settings: HttpSettings, access: Access) -> None:
        self._router = router
        # Starlette searches a route by regular expressions, one after the other.
        self._exact = {
            route.path: route for route in router.routes if isinstance(route, Route) and "{" not in route.path
        }
        self._observations = observations
        self._requests_max = settings.requests_max
        self._access = access
        # Otherwise a web page could have its own name resolved to 127.0.0.1, and read the service in a browser.
        own_names = {b"localhost", b"127.0.0.1", b"[::1]", settings.host.encode()}
        self._hosts = (
            own_names if settings.is_loopback and not access.needs_token and not settings.behind_proxy else None
        )
        self._running = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        status = 0

        async def send_and_note(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        scope["app"] = self  # Then Starlette raises errors, and does not answer them.
        try:
            if scope["path"] in _PROBES:
                await self._answer(scope, receive, send_and_note)
            else:
                self._admit(scope)
                place = int(scope["path"] != EVENTS_PATH)  # Open pages have a limit of their own.
                self._running += place
                try:
                    await self._answer(scope, receive, send_and_note)
                finally:
                    self._running -= place
        except ClientDisconnect:
            return
        except Exception as error:
            problem = self._problem(error, scope)
            if status:
                raise  # The server cuts the connection, so that the client does not take this for the whole answer.
            await refusal(problem)(scope, receive, send_and_note)
        self._observations.requested(route_of(scope), status)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        route = self._exact.get(scope["path"])
        if route is None:
            await self._router(scope, receive, send)
        else:
            scope["route"], scope["path_params"] = route, {}
            await route.handle(scope, receive, send)

    def _admit(self, scope: Scope) -> None:
        headers: dict[bytes, bytes] = dict(scope["headers"])
        if b"host" not in headers and scope["http_version"] == "1.1":  # RFC 9112, 3.2.
            raise Problem(400, "no-host", "expected the header Host, as HTTP/1.1 requires, given a request without")
        if self._hosts is not None and b"host" in headers:
            host = headers[b"host"]
            name = host[: host.find(b"]") + 1] if host.startswith(b"[") else host.partition(b":")[0]
            if name.lower() not in self._hosts:
                raise Problem(
                    421,
                    "other-host",
                    f"expected a request to localhost, given one to {host.decode('latin-1')!r}; a service for others "
                    "has a token (http.token_file)",
                )
        role = self._access.role_of(headers)
        if role is None:
            raise Problem(
                401,
                "no-token",
                "expected the header 'Authorization: Bearer TOKEN' with the token of the service",
                # Chromium asks for a password only if Basic is the one scheme of the header.
                headers={"WWW-Authenticate": 'Basic realm="streamiter"'},
            )
        if not permits(role, scope["method"], scope["path"]):
            asked = f"{scope['method']} {scope['path']}"
            raise Problem(403, "other-role", f"expected a token that permits {asked}, given one for {role}")
        if self._running >= self._requests_max:
            raise Problem(
                429,
                "too-many-requests",
                f"expected at most {self._requests_max} requests at a time; ask again, or send more rows in a request",
                headers=RETRY_SOON,
            )

    def _problem(self, error: Exception, scope: Scope) -> Problem:
        if isinstance(error, Problem):
            return error
        if isinstance(error, HTTPException) and error.status_code == 405:
            detail = f"expected one of {(error.headers or {}).get('Allow')}, given {scope['method']}"
            return Problem(405, "wrong-method", detail, headers=error.headers)
        if isinstance(error, HTTPException):
            return Problem(error.status_code, "not-found", "expected a path that /openapi.json describes")
        _log.error("HTTP %s failed", route_of(scope), exc_info=error)
        return Problem(500, "internal-error", "a bug in streamiter, which its log describes; please report it")


def route_of(scope: Mapping[str, Any]) -> str:
    """Return the pattern of a request's path; unknown paths are one route, because metrics have few labels."""
    return getattr(scope.get("route"), "path", "none")


class Routes:
    """The answers of the server."""

    def __init__(self, observations: Observations, settings: HttpSettings) -> None:
        self._observations = observations
        self._settings = settings
        self._one_reader = asyncio.Lock()
        """Topics are read for one request at a time, and drawings are made one at a time."""
        self._openapi = b""
        self._misspelt = MisspeltFields()

    def router(self) -> Router:
        """Return the routes."""
        predict = RawEndpoint(self.predict)
        return Router(
            [
                Route("/predict", predict, methods=["POST"]),
                Route("/models/{name}/predict", predict, methods=["POST"]),
                Route("/livez", self.livez),
                Route("/readyz", self.readyz),
                Route("/metrics", self.metrics),
                Route("/models/{name}/versions", self.versions),
                Route("/models/{name}/compare", self.compare),
                Route("/flow", self.flow),
                Route("/openapi.json", self.openapi),
                *page_routes(self._observations),
            ],
            redirect_slashes=False,
        )

    async def livez(self, request: Request) -> Response:
        """Answer whether the process is alive."""
        return self._of_health(liveness(self._facts()))

    async def readyz(self, request: Request) -> Response:
        """Answer whether the service does its work now."""
        facts = self._facts()
        return self._of_health(readiness(facts), facts.catching_up)

    def _of_health(self, problems: tuple[HealthProblem, ...], catching_up: str | None = None) -> Response:
        status: Literal["ok", "failing"] = "failing" if problems else "ok"
        document: HealthDocument = {"status": status, "role": self._observations.role, "problems": problems}
        if catching_up is not None:
            document["catching_up"] = catching_up
        return _json(document, 503 if problems else 200)

    def _facts(self) -> HealthFacts:
        return facts_of(self._observations, self._observations.statistics())

    async def predict(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Predict the rows, or rank the candidates; without objects for request and answer, as slow as uvicorn."""
        observations = self._observations
        began_s = observations.clock.monotonic_s()
        flags = _flags(scope, "partial", "explain") if scope["query_string"] else {}
        served = self._served(scope)
        body = await _body(scope, receive, self._settings.body_bytes_max)
        rows = {"refused": 1}
        try:
            document, rows_max = requested_document(body), self._settings.rows_max
            candidates = RequestedCandidates.of(document, rows_max)
            given, path = (candidates.candidates, "") if candidates else requested_rows(document, rows_max)
            rows = {"refused": len(given)}
            version = served.version_now()
            others = self._challengers(served, [candidates.row] if candidates else given)
            if others and None not in others:
                version, others = others[0] or version, []
            if candidates is not None:
                answer = await candidates.answer(version, observations.clock, **flags)
                given = candidates.whole_rows(answer["predictions"])
            else:
                answer = await answer_rows(version, given, path, observations.clock, others=others, **flags)
            for row in given[:1]:
                self._misspelt.look_at(version, row)
            if (log := observations.prediction_log) is not None:
                log.add([each or version for each in others or [None] * len(given)], given, answer["predictions"])
                if log.waits:
                    await log.stored()
            wrong = sum("error" in row for row in answer["predictions"]) if "partial" in flags else 0
            rows = {
                "predicted": (len(given) if candidates is None else len(candidates.candidates)) - wrong,
                "refused": wrong,
            }
            if not flags and (log is None or not log.waits):
                scope["again"] = functools.partial(self._predict_again, route_of(scope), served)
            await _send_json(send, orjson.dumps(answer))
        except NoModel:
            rows = {"no_model": len(given)}
            raise self._no_model() from None
        except RecordTooLarge as error:
            detail = f"expected rows that the log of predictions takes, given larger ones ({error}); send smaller rows"
            raise Problem(413, "not-on-record", detail) from None
        except TopicError:
            rows = {"not_on_record": len(given)}
            detail = (
                "expected a file that takes each prediction before it is answered, but it cannot be written; ask "
                "again, and see the log of the service"
            )
            raise Problem(503, "not-on-record", detail, headers=RETRY_SOON) from None
        except asyncio.CancelledError:  # The client has left.
            rows = {}
            raise
        finally:
            observations.predicted(observations.clock.monotonic_s() - began_s, **rows)

    def _challengers(self, served: ServedModel, rows: list[Any]) -> list[ServedVersion | None]:
        """Return for each row the version of the challenger, or None where the service answers; none if all are so."""
        challenger = self._observations.challenger
        if challenger is None or challenger.settings.share is None or served is challenger.served:
            return []
        found = [challenger.version_for(row) for row in rows]
        return found if any(found) else []

    def _predict_again(self, route: str, served: ServedModel, body: bytes) -> bytes | None:
        """Answer a request with the head of one that was answered, if its body has one good row; see ``predict``."""
        observations = self._observations
        began_s = observations.clock.monotonic_s()
        try:
            document, rows_max = requested_document(body), self._settings.rows_max
            if "candidates" in document and RequestedCandidates.of(document, rows_max) is not None:
                return None
            rows, path = requested_rows(document, rows_max)
            if len(rows) != 1:
                return None
            [version] = self._challengers(served, rows) or [None]
            version = version or served.version_now()
            answer = answer_row(version, rows[0], path, observations.clock)
            if answer is not None and (log := observations.prediction_log) is not None:
                log.add([version], rows, answer["predictions"])
            answered = orjson.dumps(answer)
        except Exception:  # What is wrong is said, counted and logged where all requests are answered.
            return None
        if answer is None:
            return None
        observations.predicted(observations.clock.monotonic_s() - began_s, predicted=1)
        observations.requested(route, 200)
        return answered

    async def metrics(self, request: Request) -> Response:
        """Answer with all metrics."""
        now = MetricsNow(self._observations)
        body, content_type = await in_thread(exposition, now, request.headers.get("accept", ""))
        return Response(body, headers={"Content-Type": content_type, **FRESH})

    async def versions(self, request: Request) -> Response:
        """List the last versions of the model, the newest first."""
        served, (count,) = self._served(request.scope), _numbers(request, count=20)
        async with self._one_reader, _topic_errors(served):
            found = await model_versions(served.topic, served.model, count)
        update = served.update
        serving_now = None if update is None else shown_rank(update.rank)
        listed: VersionList = {"model": served.model, "serving": serving_now, "versions": found[::-1]}
        return _json(listed)

    async def compare(self, request: Request) -> Response:
        """Compare two versions of the model; without ``new`` the newest."""
        served, (count,) = self._served(request.scope), _numbers(request, "old", "new", count=20)
        if "old" not in request.query_params:
            raise Problem(400, "wrong-parameter", "expected ?old=GENERATION.VERSION, given no version to compare with")
        async with self._one_reader, _topic_errors(served):
            old, new = [
                await find_update(served.topic, served.model, request.query_params.get(name)) for name in ("old", "new")
            ]
            difference = await in_thread(model_difference, old, new, count)
            return _json(await in_thread(with_texts, difference, self._observations.texts_at))

    async def flow(self, request: Request) -> Response:
        """Describe the graph with live statistics, or draw it."""
        job = started_job(self._observations)
        statistics = job.statistics()
        accept = request.headers.get("accept", "")
        if "image/svg+xml" in accept and "application/json" not in accept:
            async with self._one_reader:
                drawing = await in_thread(lambda: svg(picture_of(job.flow, job.steps, statistics)))
            return Response(drawing, headers={"Content-Type": "image/svg+xml", **FRESH})
        document: FlowDocument = {
            "flow": job.flow,
            "graph": picture_of(job.flow, job.steps),
            "statistics": statistics,
            "rates": self._observations.rates,
        }
        return _json(document)

    async def openapi(self, request: Request) -> Response:
        """Describe all routes."""
        if not self._openapi:
            self._openapi = orjson.dumps(openapi_document(self._settings))
        return Response(self._openapi, headers={"Content-Type": "application/json"})

    def _served(self, scope: Scope) -> ServedModel:
        name, model = scope["path_params"].get("name"), self._observations.name
        if (challenger := self._observations.challenger) is not None and name == challenger.name:
            return challenger.served
        if name not in (None, model):
            raise Problem(404, "unknown-model", f"expected the model {model!r}, given {name[:200]!r}")
        if self._observations.served is None:
            raise self._no_model()
        return self._observations.served

    def _no_model(self) -> Problem:
        return Problem(
            503,
            "no-model",
            f"expected a published version of the model {self._observations.name!r}, given none yet (the service is "
            f"{self._observations.phase.phase}); ask again, and see /readyz",
            headers=RETRY_SOON,
        )


def _json(document: Any, status: int = 200) -> Response:
    return json_answer(orjson.dumps(document, option=orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_NON_STR_KEYS), status)


@contextlib.asynccontextmanager
async def _topic_errors(served: ServedModel) -> AsyncIterator[None]:
    try:
        yield
    except NoSuchVersion as error:
        detail = str(error).removeprefix(f"{served.topic.url}: ")
        raise Problem(404, "unknown-version", detail) from None
    except TopicError as error:
        _log.warning("HTTP: %s", error)
        detail = "expected the topic of the model to answer, but it does not; ask again, and see the log"
        raise Problem(503, "topic-unavailable", detail, headers=RETRY_SOON) from None


async def _send_json(send: Send, body: bytes) -> None:
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": body})


async def _body(scope: Scope, receive: Receive, bytes_max: int) -> bytes:
    """Return the body of the request."""
    for name, value in scope["headers"]:
        if name == b"content-encoding" and value != b"identity":
            coding = value[:40].decode("latin-1")
            raise Problem(415, "encoded-body", f"expected a body without a coding, given Content-Encoding: {coding}")
    parts: list[bytes] = []
    size, is_more = 0, True
    while is_more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnect
        size += len(message["body"])
        is_more = message["more_body"]
        if size <= bytes_max:
            parts.append(message["body"])
        elif size > _READ_ON_BYTES:
            break
    if size > bytes_max:
        raise Problem(
            413,
            "body-too-large",
            f"expected a body of at most {bytes_max:,} bytes, given more; send several requests",
            headers={"Connection": "close"},
        )
    return b"".join(parts)


def _flags(scope: Scope, *names: str) -> dict[str, bool]:
    """Return the parameters of these names, each true or false."""
    given = _parameters(Request(scope), *names)
    if wrong := [name for name, value in given.items() if value not in ("true", "false")]:
        raise Problem(400, "wrong-parameter", f"expected ?{wrong[0]}=true or false, given {given[wrong[0]][:80]!r}")
    return {name: value == "true" for name, value in given.items()}


def _numbers(request: Request, *others: str, **defaults: int) -> list[int]:
    """Return parameters that are numbers of at least 1; ``others`` may be given, too."""
    given = _parameters(request, *others, *defaults)
    numbers = []
    for name, default in defaults.items():
        text = given.get(name, str(default))
        if not (text.isascii() and text.isdigit() and len(text) < 5 and 1 <= int(text) <= _VERSIONS_MAX):
            detail = f"expected ?{name}= as a number from 1 to {_VERSIONS_MAX}, given {text[:80]!r}"
            raise Problem(400, "wrong-parameter", detail)
        numbers.append(int(text))
    return numbers


def _parameters(request: Request, *names: str) -> Mapping[str, str]:
    given = request.query_params
    if unknown := [name for name in given if name not in names]:
        known = ", ".join(names)
        raise Problem(400, "wrong-parameter", f"expected parameters of the names {known}, given {unknown[0][:80]!r}")
    return given
