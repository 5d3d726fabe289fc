"""The HTTP server: its answers, its limits, its token and TLS, over real connections."""

import asyncio
import contextlib
import gc
import os
import socket
import ssl
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import httpx
import pytest
import uvloop
from cli.program import OF_THE_SERVICE, without
from service.http_case import case, problem_of, received, request, status_of
from service.service_models import trips
from support.certificates import Authority
from support.processes import forked_run
from support.waiting import PATIENCE_S, turn, until

from streamiter.errors import ConfigurationError
from streamiter.service.http.connections import ClientConnection
from streamiter.service.http.server import serving
from streamiter.service.observing.observations import Observations
from streamiter.service.settings.tables import HttpSettings
from streamiter.topics.memory import MemoryTopic
from streamiter.topics.memory_log import MemoryTopics
from streamiter.values.helpers.clock import SystemClock


async def test_rows_are_predicted_by_one_version() -> None:
    """A client could not tell by which version a row was predicted."""
    async with case(versions=2) as service:
        answers = [
            await service.client.post("/predict", json={"rows": trips(3)}),
            await service.client.post("/models/late/predict?explain=true", json=trips(1)[0]),
        ]
        for answer, count in zip(answers, (3, 1), strict=True):
            document = answer.json()
            assert answer.status_code == 200
            assert (document["model"], document["generation"], document["version"]) == ("late", 2, 2)
            assert len(document["predictions"]) == count
        assert "contributions" in answers[1].json()["predictions"][0]
        refused = await service.client.post("/predict", json={"rows": [{"km": "far"}, {"km": 1.0}]})
        assert problem_of(refused)["errors"][0]["path"] == "/rows/0/km"
        partial = await service.client.post("/predict?partial=true", json={"rows": [{"km": "far"}, {"km": 1.0}]})
        assert ["error" in row for row in partial.json()["predictions"]] == [True, False]
        assert (await service.client.post("/predict", content=b"{")).status_code == 400
        counts = dict(service.observations.predictions)
        # Two rows that were refused together, one of two, and a request without rows.
        assert counts == {"predicted": 5, "refused": 2 + 1 + 1}
        assert service.observations.requests["/predict", 200] == 2
        assert service.observations.requests["/models/{name}/predict", 200] == 1


async def test_a_misspelt_field_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    """A client sent "amuont" in place of "amount": the answer was .04 and not .92, and nothing said why."""
    async with case() as service:
        for rows in [{"kmm": 300, "sky": "rain"}, {"kmm": 3}, {"km": 3, "kn": 4, "sky": "sun"}, {"id": 3}]:
            assert (await service.client.post("/predict", json=rows)).status_code == 200
    assert [record.getMessage() for record in caplog.records if record.levelname == "WARNING"] == [
        "predictions by 'late': a row has the field 'kmm', which the model does not know, so it has no effect; did you "
        "mean 'km'?"
    ]


async def test_before_the_first_model_clients_are_asked_to_come_again() -> None:
    """A client took the error before the first model for one of its own, and gave up."""
    async with case(versions=0) as service:
        answer = await service.client.post("/predict", json={"rows": [{"km": 3}, {"km": 4}]})
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
        assert "the service is starting" in problem_of(answer)["detail"]
        assert service.observations.predictions == {"no_model": 2}


@pytest.mark.parametrize(
    ("method", "path", "status", "kind"),
    [
        ("GET", "/elsewhere", 404, "not-found"),
        ("GET", "/predict/", 404, "not-found"),
        ("GET", "/predict", 405, "wrong-method"),
        ("DELETE", "/models/late/versions", 405, "wrong-method"),
        ("POST", "/models/early/predict", 404, "unknown-model"),
        ("GET", "/models/early/versions", 404, "unknown-model"),
        ("POST", "/predict?partail=true", 400, "wrong-parameter"),
        ("POST", "/predict?partial=1", 400, "wrong-parameter"),
        ("GET", "/models/late/versions?count=0", 400, "wrong-parameter"),
        ("GET", "/models/late/versions?count=%EF%BC%91", 400, "wrong-parameter"),
        ("GET", "/models/late/compare", 400, "wrong-parameter"),
        ("GET", "/models/late/compare?old=7.7", 404, "unknown-version"),
        ("GET", "/models/late/compare?old=last", 404, "unknown-version"),
        ("GET", "/flow", 503, "not-started"),
        ("GET", "/api/drawing", 503, "not-started"),
    ],
)
async def test_wrong_requests_get_a_problem_document(method: str, path: str, status: int, kind: str) -> None:
    """A client showed its users "Not Found" in plain text, because it could not read the answer."""
    async with case() as service:
        answer = await service.client.request(method, path)
        assert answer.status_code == status
        assert problem_of(answer)["type"] == f"urn:streamiter:problem:{kind}"
        assert "memory:" not in answer.text
        assert answer.headers.get("retry-after") == ("1" if status == 503 else None)


async def test_the_end_of_following_is_logged_and_the_service_is_not_ready(caplog: pytest.LogCaptureFixture) -> None:
    """The topic of the model was deleted, and for weeks the service answered by an old model, green and silent."""
    async with case(flow=True) as service:
        service.observations.enter("running")
        assert (await service.client.get("/readyz")).status_code == 200
        served = service.observations.served
        assert served is not None
        await served.topic.delete()
        await until(lambda: not served.statistics().is_following)
        answer = await service.client.get("/readyz")
        assert (answer.status_code, await service.is_well()) == (503, True)
        [problem] = answer.json()["problems"]
        assert (problem["condition"], "predictions become outdated" in problem["detail"]) == ("model", True)
        assert "memory:" not in answer.text
        [told] = [record for record in caplog.records if record.levelname == "ERROR"]
        assert "following has ended" in told.getMessage()


async def test_versions_are_listed_and_compared() -> None:
    """To see why a model had become worse, one had to read its topic with a program."""
    async with case(versions=3) as service:
        listed = (await service.client.get("/models/late/versions?count=2")).json()
        assert (listed["model"], listed["serving"]) == ("late", "2.3")
        assert [version["version"] for version in listed["versions"]] == [3, 2]
        compared = (await service.client.get("/models/late/compare?old=2.1&count=1")).json()
        assert (compared["old"]["version"], compared["new"]["version"]) == (1, 3)
        assert compared["metrics"]["log_loss"] == [1.0, pytest.approx(1 / 3)]
        assert len(compared["weights"]) == 1
        service.observations.texts_at = lambda places: dict.fromkeys(places, "sky = rain")
        named = (await service.client.get("/models/late/compare?old=2.1&count=20")).json()["weights"]
        assert "sky = rain" in [each["name"] for each in named]


async def test_the_flow_is_a_document_and_a_drawing() -> None:
    """An image of the flow in a page showed its JSON."""
    async with case(flow=True) as service:
        for accept in (
            "*/*",
            "text/csv",
            "application/json",
            "text/html, */*;q=0.8",
            "image/svg+xml;q=0.5, application/json",
        ):
            document = (await service.client.get("/flow", headers={"Accept": accept})).json()
            assert [node["name"] for node in document["graph"]["nodes"]] == ["items", "add", "collect"]
            assert document["statistics"]["state"] == "finished"
        for accept in ("image/svg+xml", "image/avif,image/svg+xml,image/*,*/*;q=0.8"):
            answer = await service.client.get("/flow", headers={"Accept": accept})
            assert answer.headers["content-type"] == "image/svg+xml"
            assert ElementTree.fromstring(answer.text).tag.endswith("svg")


# -- limits


async def test_bodies_and_rows_have_a_limit() -> None:
    """One request of a gigabyte took the memory of the job."""
    async with case(body_bytes_max=100_000, rows_max=10) as service:
        many = await service.client.post("/predict", json={"rows": [{"km": 1.0}] * 11})
        assert (many.status_code, problem_of(many)["title"]) == (413, "Too many rows")
        for size in (100_001, 5_000_000):
            large = await service.client.post("/predict", content=b" " * size)
            assert (large.status_code, problem_of(large)["title"]) == (413, "Body too large")

        async def endless() -> Any:
            while True:
                yield b" " * 65_536

        with contextlib.suppress(httpx.TransportError):  # The connection ends while the client writes.
            assert (await service.client.post("/predict", content=endless())).status_code == 413
        assert service.observations.requests["/predict", 413] == 4
        assert await service.is_well()


async def test_more_requests_at_a_time_are_refused_but_probes_are_answered() -> None:
    """Under an overload the probe was refused, too, and the service was restarted in the middle of the overload."""
    async with case(requests_max=2) as service:
        slow = [await asyncio.open_connection("127.0.0.1", service.port) for _ in range(2)]
        for _, writer in slow:
            writer.write(request("/predict", b"{}")[:-1])
        while (refused := await service.client.post("/predict", json={"km": 1.0})).status_code == 200:
            await turn()
        assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
        problem_of(refused)
        assert (await service.client.get("/livez")).status_code == 200
        for reader, writer in slow:
            writer.write(b"}")
            assert (await reader.readline()).startswith(b"HTTP/1.1 200")
            writer.close()
        assert await service.is_well()


class SilentTopic(MemoryTopic):
    """A topic that is never described."""

    async def describe(self) -> Any:
        await asyncio.Event().wait()


async def test_a_client_that_leaves_gives_back_its_place() -> None:
    """Clients that had left while a topic did not answer kept all places, and the service could not stop."""
    silent = SilentTopic(MemoryTopics(SystemClock()), "silent")
    async with asyncio.timeout(PATIENCE_S), case(requests_max=4) as service:
        assert service.observations.served is not None
        service.observations.served.topic = silent
        asked = request("/models/late/versions", method="GET")
        leaving = [await asyncio.open_connection("127.0.0.1", service.port) for _ in range(4)]
        for _, writer in leaving:
            writer.write(asked)
        while (await service.client.post("/predict", json={"km": 1.0})).status_code != 429:
            await turn()
        for _, writer in leaving:
            writer.close()
        while not await service.is_well():
            await turn()


def is_answering() -> bool:
    """Whether the server is at work on an answer, or waits for a client to read it."""
    return any("run_asgi" in task.get_coro().__qualname__ for task in asyncio.all_tasks())  # type: ignore[union-attr]


async def test_rows_of_a_client_that_leaves_are_not_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients gave up early on a busy machine, and an alert said that their rows were wrong."""

    async def busy(*_: object, **__: object) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr("streamiter.service.http.server.answer_rows", busy)
    async with case() as service:
        with pytest.raises(httpx.ReadTimeout):
            await service.client.post("/predict", json={"km": 1.0}, timeout=httpx.Timeout(PATIENCE_S, read=0.2))
        await until(lambda: not is_answering())
        assert not service.observations.predictions


async def test_slow_clients_are_cut_off_and_delay_no_one() -> None:
    """A few clients that sent one byte a minute held all requests that a service allows."""
    async with case(timeout_s=1.0, requests_max=10) as service:
        head, body = b"POST /predict HTTP/1.1\r\nHost: localhost\r\n", b"Content-Length: 10\r\n\r\n{"
        sent = {b"": b"", b"P": b"408", head: b"408", head + body: b"408"}
        sent[(head + body).replace(b"predict", b"nowhere")] = b"404"
        slow = [service.raw(bytes_sent, closes=False) for bytes_sent in sent for _ in range(2)]
        waiting = asyncio.gather(*slow)
        while not waiting.done():
            assert await service.is_well()
        answers = await waiting
        for answer, status in zip(answers, [status for status in sent.values() for _ in range(2)], strict=True):
            assert answer.split(b" ")[1:2] == ([status] if status else [])
        assert service.observations.requests["none", 408] == 4
        assert service.observations.requests["/predict", 408] == 2


async def test_a_client_that_does_not_read_is_cut_off() -> None:
    """A client that asked and never read took the memory of the server, one answer after the other."""
    async with case(timeout_s=1.0) as service:
        size = len((await service.client.get("/openapi.json")).content)
        loop = asyncio.get_running_loop()
        with socket.socket() as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.setblocking(False)
            await loop.sock_connect(client, ("127.0.0.1", service.port))
            await loop.sock_sendall(client, 30 * request("/openapi.json", method="GET"))
            await until(is_answering)
            while is_answering():
                assert await service.is_well()
            received = 0
            with contextlib.suppress(ConnectionError):
                async with asyncio.timeout(PATIENCE_S):
                    while part := await loop.sock_recv(client, 65_536):
                        received += len(part)
        assert received < 29 * size
        assert 1 < service.observations.requests["/openapi.json", 200] < 30


def connection_of(port: int) -> ClientConnection | None:
    """Return the server's connection to the client at this port of this machine."""
    found = [each for each in gc.get_objects() if type(each) is ClientConnection]
    return next((each for each in found if each.client is not None and each.client[1] == port), None)


async def test_a_client_that_does_not_read_the_last_bytes_is_cut_off() -> None:
    """Half a request behind answers that nobody read held its connection for ever; 512 of these locked the server."""
    async with case(timeout_s=PATIENCE_S) as service:
        loop = asyncio.get_running_loop()
        with socket.socket() as client, contextlib.suppress(ConnectionError):
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.setblocking(False)
            await loop.sock_connect(client, ("127.0.0.1", service.port))
            port = client.getsockname()[1]
            await until(lambda: connection_of(port) is not None)
            connection = connection_of(port)
            assert connection is not None
            # The kernel would make room for megabytes, the more the slower the machine is.
            transport = connection.transport._transport
            transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
            # Few bytes wait in the server, so that its writing is not paused.
            while not transport.get_write_buffer_size():
                answered = service.observations.requests["none", 404]
                await loop.sock_sendall(client, request("/" + 900 * "x", method="GET"))
                await until(lambda before=answered: service.observations.requests["none", 404] > before)
            connection._request_s = 0.2  # Until here, a busy machine may take longer.
            await loop.sock_sendall(client, request("/predict", b"{}")[:-1])
            await until(lambda: connection not in connection.connections)
        assert service.observations.requests["/predict", 408] == 1
        assert await service.is_well()


async def test_requests_before_answers_have_a_limit() -> None:
    """A client that sent requests without an end took the memory of the job: all of them waited for their turn."""
    async with case() as service:
        answer = await service.raw(10_000 * request("/openapi.json", method="GET"), closes=False)
        assert answer.count(b"HTTP/1.1 200 OK") < 33
        assert sum(service.observations.requests.values()) < 34
        assert [code for _, code in service.observations.requests if code != 200] == [429]
        assert await service.is_well()


@pytest.mark.parametrize(
    "sent",
    [
        pytest.param(b"GET /" + b"a" * 300_000, id="an endless path"),
        pytest.param(b"GET / HTTP/1.1\r\n" + b"X: y\r\n" * 50_000, id="endless headers"),
        pytest.param(
            b"POST /predict HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n"
            + b"X: y\r\n" * 50_000,
            id="endless trailers",
        ),
    ],
)
async def test_heads_have_a_limit(sent: bytes) -> None:
    """Headers without an end took the memory of the job, because only bodies had a limit."""
    async with case() as service:
        answer = await service.raw(sent, closes=False)
        assert not answer or status_of(answer) == 431
        assert [code for _, code in service.observations.requests] == [431]
        assert await service.is_well()


async def test_an_answer_is_sent_at_once() -> None:
    """Head and body were two packets: each cost the service a call of the system, and woke the client up."""
    async with case() as service:
        with socket.create_connection(("127.0.0.1", service.port)) as client:
            client.setblocking(False)
            loop = asyncio.get_running_loop()
            for _ in range(5):  # Two packets may still be read as one.
                await loop.sock_sendall(client, request("/livez", method="GET"))
                head, _, body = (await loop.sock_recv(client, 65536)).partition(b"\r\n\r\n")
                assert head.startswith(b"HTTP/1.1 200")
                assert b'"status"' in body


async def test_idle_connections_give_room_to_new_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """A program that held 512 connections kept out the probe, and the service was restarted."""
    monkeypatch.setattr("streamiter.service.http.connections.CONNECTIONS_MAX", 4)
    probe = request("/livez", b"", "Connection: close", method="GET")
    begun = request("/predict", b"{}", "Expect: 100-continue")[:-1]

    async def begin(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Send a part of a request, and wait until the server has read it."""
        writer.write(begun)
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 100")

    async with case() as service:
        held = [await asyncio.open_connection("127.0.0.1", service.port) for _ in range(4)]
        (part, its_writer), (in_request, writer), (idle, _), _ = held
        its_writer.write(probe[:9])
        await begin(in_request, writer)
        answers = [await service.raw(probe, closes=False) for _ in range(9)]
        assert [status_of(answer) for answer in answers] == [200] * 9
        assert await received(idle) == b""
        for reader, each, rest in ((in_request, writer, b"}"), (part, its_writer, probe[9:])):
            each.write(rest)
            assert (await reader.readline()).startswith(b"HTTP/1.1 200")
        for _, each in held:
            each.close()

        busy = [await asyncio.open_connection("127.0.0.1", service.port) for _ in range(4)]
        for reader, writer in busy:
            await begin(reader, writer)
        assert await service.raw(probe, closes=False) == b""
        for reader, writer in busy:
            writer.write(b"}")
            assert (await reader.readline()).startswith(b"HTTP/1.1 200")
            writer.close()


async def test_requests_in_a_pipeline_are_answered_in_order() -> None:
    """A client that sent two requests at once got one answer."""
    async with case() as service:
        sent = (
            request("/predict", b'{"km": 1}')
            + request("/livez", method="GET")
            + request("/no", b"", "Connection: close")
        )
        answer = await service.raw(sent, closes=False)
        assert [int(part.split(b" ")[1]) for part in answer.split(b"HTTP/1.1")[1:]] == [200, 200, 404]


# -- who may ask


async def test_a_request_without_host_is_refused() -> None:
    """The service answered a request of HTTP/1.1 without Host, on a port where it refuses other hosts."""
    async with case() as service:
        answer = await service.raw(b"GET /openapi.json HTTP/1.1\r\nConnection: close\r\n\r\n")
        assert answer.startswith(b"HTTP/1.1 400")
        assert b"no-host" in answer
        assert (await service.raw(b"GET /openapi.json HTTP/1.0\r\n\r\n")).split(b" ")[1] == b"200"


async def test_other_hosts_are_refused_on_loopback() -> None:
    """A page on the web had its name resolved to 127.0.0.1, and read the service in the browser of a developer."""
    async with case() as service:
        for host in ("evil.example", "evil.example:8080", "localhost.evil.example", "[::2]"):
            answer = await service.client.get("/openapi.json", headers={"Host": host})
            assert (answer.status_code, problem_of(answer)["title"]) == (421, "Other host")
            assert (await service.client.get("/livez", headers={"Host": host})).status_code == 200
        for host in ("localhost", "LOCALHOST:1", "127.0.0.1:9", "[::1]:8080"):
            assert (await service.client.get("/openapi.json", headers={"Host": host})).status_code == 200


async def test_a_token_is_needed_by_all_but_probes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A probe without a token restarted the service, and metrics with the names of topics were open to all."""
    file = tmp_path / "token"
    file.write_text("s3cret-ü\n", "utf-8")
    token = "s3cret-ü".encode()
    async with case(token_file=str(file)) as service:
        for given in (
            None,
            b"Bearer",
            b"Bearer s3cret",
            b"Bearer " + token + b"x",
            b"Basic " + token,
            b"Digest " + token,
        ):
            answer = await service.client.get("/metrics", headers={} if given is None else {b"Authorization": given})
            assert (answer.status_code, problem_of(answer)["title"]) == (401, "No token")
            assert answer.headers["www-authenticate"] == 'Basic realm="streamiter"'
        allowed: list[dict[Any, Any]] = [
            {b"Authorization": b"Bearer " + token},
            {b"Authorization": b"bearer  " + token},
            {b"Authorization": httpx.BasicAuth(b"anyone", token)._auth_header.encode(), b"Host": b"other.example"},
        ]
        for headers in allowed:
            assert (await service.client.get("/openapi.json", headers=headers)).status_code == 200
        assert (await service.client.get("/livez")).status_code == 200
    monkeypatch.setenv("SERVICE_TOKEN", "other")
    async with case(token_env="SERVICE_TOKEN") as service:
        assert (await service.client.get("/metrics")).status_code == 401
        assert (await service.client.get("/metrics", headers={"Authorization": "Bearer other"})).status_code == 200


async def test_tls(tmp_path: Path) -> None:
    """A token was sent in the clear through a network of others."""
    authority = Authority(tmp_path, "authority")
    certificate, key = authority.sign("service", "IP:127.0.0.1")
    trusting = ssl.create_default_context(cafile=str(authority.certificate))
    settings = {"tls_certificate": str(certificate), "tls_key": str(key)}
    async with case(client={"verify": trusting}, **settings) as service:
        assert service.address.startswith("https://")
        assert await service.is_well()
        assert b"200" not in await service.raw(request("/livez", method="GET"))
        with pytest.raises(httpx.ConnectError, match="certificate"):
            await httpx.AsyncClient(trust_env=False).get(f"{service.address}/livez")
        assert await service.is_well()


@pytest.mark.parametrize("new_loop", [asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
def test_connections_without_tls_have_a_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, new_loop: Any) -> None:
    """A scanner opened a thousand connections and sent nothing: the job had no descriptor left for its checkpoint."""
    monkeypatch.setattr("streamiter.service.http.connections.CONNECTIONS_MAX", 4)
    authority = Authority(tmp_path, "authority")
    certificate, key = authority.sign("service", "IP:127.0.0.1")
    trusting = ssl.create_default_context(cafile=str(authority.certificate))
    settings = {"tls_certificate": str(certificate), "tls_key": str(key), "timeout_s": 1.0}

    async def scan() -> None:
        async with case(client={"verify": trusting}, **settings) as service:
            silent = [await asyncio.open_connection("127.0.0.1", service.port) for _ in range(12)]
            for reader, _ in silent[:8]:
                assert await received(reader) == b""
            for _ in range(3):
                assert await service.is_well()
            # The first request comes with the last bytes of the handshake.
            for sent, answer in ((request("/livez", method="GET"), b"HTTP/1.1 200"), (b"\0" * 99, b"HTTP/1.1 400")):
                reader, writer = await asyncio.open_connection("127.0.0.1", service.port, ssl=trusting)
                writer.write(sent)
                assert (await reader.readline()).startswith(answer)
                writer.close()
            for reader, _ in silent:  # Those that are left end by the time limit.
                assert await received(reader) == b""
            for _, writer in silent:
                writer.close()
            assert await service.is_well()

    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(scan())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"address": "192.0.2.1:0"}, "http.address: expected an address of this machine with a free port"),
        (
            {"token_file": "./missing"},
            "expected token_file to name a file with token in it, given ../missing., which cannot",
        ),
        ({"token_env": "NO_SUCH_TOKEN"}, "expected the environment variable NO_SUCH_TOKEN to hold token"),
        ({"token_env": "EMPTY_TOKEN"}, "EMPTY_TOKEN to hold token .token_env., given an empty one"),
        ({"tls_certificate": "missing.pem", "tls_key": "missing.key"}, "given missing.pem and missing.key"),
    ],
)
async def test_wrong_settings_are_told_before_the_job_starts(
    settings: dict[str, str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A service without its token served everyone."""
    monkeypatch.setenv("EMPTY_TOKEN", " \n")
    with pytest.raises(ConfigurationError, match=message):
        async with serving(Observations("late"), HttpSettings(**settings)):
            raise AssertionError


@pytest.mark.parametrize("package", OF_THE_SERVICE)
def test_a_missing_package_is_told(tmp_path: Path, package: str) -> None:
    """A service without its extra ended with a trace that named a package that the user did not know."""
    command = without(package, program="import streamiter.service.http.server")
    run = forked_run(command, cwd=tmp_path, limit_s=PATIENCE_S)
    assert f"ConfigurationError: the service needs the package '{package}'; install it with: pip install" in run.stderr


async def test_an_address_in_use_is_told() -> None:
    """A second service on a port ended with a trace of the server's own exit."""
    async with case() as service:
        with pytest.raises(ConfigurationError, match=f"given 127.0.0.1:{service.port} .*in use"):
            async with serving(Observations("late"), HttpSettings(f"127.0.0.1:{service.port}")):
                raise AssertionError
        assert await service.is_well()


# -- the end


async def test_an_answer_under_way_is_ended_and_the_port_is_free() -> None:
    """A service that was restarted lost the requests it was answering, and then did not find its port free."""
    async with case() as service:
        port = service.port
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        idle = await asyncio.open_connection("127.0.0.1", port)
        writer.write(request("/predict", b'{"km": 1}')[:-1])
        await writer.drain()
        assert await service.is_well()
        asyncio.get_running_loop().call_later(0.05, writer.write, b"}")
    assert status_of(await received(reader)) == 200
    assert await received(idle[0]) == b""
    for _, each in ((reader, writer), idle):
        each.close()
    async with serving(Observations("late"), HttpSettings(f"127.0.0.1:{port}")):
        pass


async def test_no_signal_handler_and_no_descriptor_is_left() -> None:
    """Ctrl-C ended the server, and the job ran on without it."""
    import signal

    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    descriptors = len(os.listdir("/proc/self/fd"))
    async with case() as service:
        assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == before
        assert await service.is_well()
    assert len(os.listdir("/proc/self/fd")) <= descriptors
