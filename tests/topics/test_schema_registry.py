"""The registry of schemas: look-ups, outages and credentials."""

import asyncio
import base64
import urllib.request
from collections.abc import Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any
from urllib.error import HTTPError

import pytest
from support.registry_server import RegistryServer
from support.waiting import PATIENCE_S
from topics.test_schema_formats import CLICK, CLICKS, decoded, encoded, encoder
from topics.topic_case import ManualClock, created, write

from streamiter import Flow
from streamiter.errors import DecodeError, JobFailed, TopicDenied, TopicError, TopicUnavailable
from streamiter.topics import Avro, MemoryBroker, SchemaRegistry, TopicBatch
from streamiter.values.helpers.clock import SystemClock


class RegistryProxy(ThreadingHTTPServer):
    """Forwards requests to a registry; remembers them, may ask for a user, and may answer in place of the registry."""

    def __init__(self, registry: str) -> None:
        self.registry = registry
        self.asked: list[str] = []
        self.login: str | None = None
        self.answers: list[tuple[int, bytes, Mapping[str, str]]] = []
        super().__init__(("127.0.0.1", 0), _Forward)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class OnlyPausesTakeTime(SystemClock):
    """A clock whose time advances by pauses alone, however long an answer takes."""

    def __init__(self) -> None:
        self._paused_s = 0.0

    def monotonic_s(self) -> float:
        return self._paused_s

    async def sleep(self, delay_s: float) -> None:
        self._paused_s += delay_s


class _Forward(BaseHTTPRequestHandler):
    server: RegistryProxy

    def do_GET(self) -> None:
        self.server.asked.append(f"{self.command} {self.path}")
        body = self.rfile.read(int(self.headers.get("content-length", 0))) or None
        if self.server.login not in (None, self.headers.get("authorization")):
            self._answer(401, b'{"error_code": 401, "message": "no such user"}', {})
        elif self.server.answers:
            self._answer(*self.server.answers.pop(0))
        else:
            request = urllib.request.Request(
                self.server.registry + self.path, body, {"content-type": "application/json"}
            )
            try:
                with urllib.request.urlopen(request, timeout=PATIENCE_S) as response:
                    self._answer(response.status, response.read(), {})
            except HTTPError as error:
                self._answer(error.code, error.read(), {})

    do_POST = do_GET

    def _answer(self, status: int, body: bytes, headers: Mapping[str, str]) -> None:
        self.send_response(status)
        for name, value in {"content-length": str(len(body)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Write no log."""


@pytest.fixture
def proxy(schema_registry: RegistryServer) -> Iterator[RegistryProxy]:
    with RegistryProxy(schema_registry.url) as server:
        thread = Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()


# -- look-ups -------------------------------------------------------------------------------------------------


async def test_an_id_is_looked_up_once(
    schema_registry: RegistryServer, proxy: RegistryProxy, topic_prefix: str
) -> None:
    """One look-up for each id of a batch, and none for later batches; also for an id that the registry lacks."""
    writer = await encoder(Avro(schema_registry.url, CLICK), topic_prefix)
    values = list(writer.encode(CLICKS * 500).values)
    form, clock = Avro(proxy.url), ManualClock()
    for _ in range(3):
        await form.before_decoding(TopicBatch(values=[*values, b"\0\x7f\0\0\0x", None, b"short"]), clock)
        assert form.decode(TopicBatch(values=values)) == CLICKS * 500
    asked = {f"GET /schemas/ids/{writer.schema_id}", f"GET /schemas/ids/{0x7F000000}"}
    assert set(proxy.asked) == asked
    assert len(proxy.asked) == 2
    clock.advance(61)  # the registry may have the schema by now
    await form.before_decoding(TopicBatch(values=[b"\0\x7f\0\0\0x"]), clock)
    assert len(proxy.asked) == 3


async def test_sinks_register_one_schema_at_the_same_moment(schema_registry: RegistryServer, topic_prefix: str) -> None:
    """A sink of two subtasks ended its job at every second first start: the registry refused one of both."""
    for turn in range(5):
        sinks = [encoder(Avro(schema_registry.url, CLICK), f"{topic_prefix}{turn}") for _ in range(3)]
        assert len({sink.schema_id for sink in await asyncio.gather(*sinks)}) == 1


async def test_few_schemas_are_kept(
    schema_registry: RegistryServer, proxy: RegistryProxy, topic_prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A batch with more ids than are kept is decoded all the same."""
    monkeypatch.setattr("streamiter.topics.schema_formats._READERS_MAX", 2)
    values = [
        (
            await encoded(
                Avro(schema_registry.url, {**CLICK, "doc": f"{topic_prefix}{number}"}), topic_prefix, CLICKS[:1]
            )
        )[0]
        for number in range(4)
    ]
    form = Avro(proxy.url)
    assert await decoded(form, values) == CLICKS[:1] * 4
    assert len(form._readers) == 2
    seen = len(proxy.asked)
    assert await decoded(form, [values[-1]]) == CLICKS[:1]
    assert len(proxy.asked) == seen


async def test_a_decoder_outside_of_a_flow_looks_up_itself(schema_registry: RegistryServer, topic_prefix: str) -> None:
    values = await encoded(Avro(schema_registry.url, CLICK), topic_prefix, CLICKS)
    form = Avro(schema_registry.url)
    assert form.decode(TopicBatch(values=values)) == CLICKS
    with pytest.raises(DecodeError, match="has no schema with the id 2130706432"):
        form.decode(TopicBatch(values=[b"\0\x7f\0\0\0x"]))


async def test_a_registry_that_is_away_for_a_while_delays_the_job(
    schema_registry: RegistryServer, topic_prefix: str
) -> None:
    """Values are not bad because the registry is restarted."""
    values = await encoded(Avro(schema_registry.url, CLICK), topic_prefix, CLICKS)
    registry = SchemaRegistry(schema_registry.url, request_timeout_s=0.2)
    form = Avro(registry)
    with schema_registry.frozen():
        waiting = asyncio.ensure_future(decoded(form, values))
        await asyncio.wait([waiting], timeout=0.5)
        assert not waiting.done()
    assert await waiting == CLICKS


async def test_a_registry_that_stays_away_ends_the_job(proxy: RegistryProxy, topic_prefix: str) -> None:
    broker = MemoryBroker()
    clicks = await created(broker.topic("clicks"))
    await write(clicks, [b"\0\0\0\0\1x"])
    busy = (503, b'{"error_code": 50003, "message": "no leader"}', {})
    proxy.answers = [busy]
    flow = Flow("read")
    form = Avro(SchemaRegistry(proxy.url, give_up_after_s=0))
    flow.source(clicks, stop="latest", decode=form, on_error="skip").collect()
    with pytest.raises(JobFailed, match=r"status 503 \(no leader\); gave up after 0 s") as failed:
        await (await flow.start()).wait()
    assert isinstance(failed.value.__cause__, TopicUnavailable)
    proxy.answers = [busy, (429, b"", {}), busy]
    clock = OnlyPausesTakeTime()
    registry = SchemaRegistry(proxy.url, give_up_after_s=0.2)
    with pytest.raises(TopicUnavailable) as given_up:
        await registry.patiently(clock, lambda: registry.schema(1))
    assert str(given_up.value) == (
        f"schema registry {proxy.url!r}: status 429 (no message); gave up after 0.2 s (option give_up_after_s)"
    )
    assert clock.monotonic_s() == pytest.approx(0.1)
    with pytest.raises(TopicUnavailable, match=r"no answer \(.*Connection refused.*\); gave up after 0 s"):
        await encoder(Avro(SchemaRegistry("http://127.0.0.1:9", give_up_after_s=0), CLICK), "t")


# -- credentials ------------------------------------------------------------------------------------------------


async def test_credentials(
    proxy: RegistryProxy, topic_prefix: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    """Credentials come from the environment or a file, and are in no message."""
    proxy.login = f"Basic {base64.b64encode(b'ann:right-horse').decode()}"
    monkeypatch.setenv("REGISTRY_USER", "ann")
    secret = tmp_path / "secret.txt"
    secret.write_text("right-horse\n")
    registry = SchemaRegistry(proxy.url, username_env="REGISTRY_USER", password_file=str(secret))
    assert "horse" not in repr(registry)
    assert (await encoder(Avro(registry, CLICK), topic_prefix)).schema_id > 0
    with pytest.raises(TopicDenied) as denied:
        await encoder(Avro(SchemaRegistry(proxy.url, username="ann", password="wrong-horse"), CLICK), topic_prefix)
    assert str(denied.value) == (
        f"schema registry {proxy.url!r}: the registry refuses the credentials (401, no such user); check username and "
        "password, or token, and the rights of the user"
    )
    proxy.login = "Bearer a-token"
    assert (await encoder(Avro(SchemaRegistry(proxy.url, token="a-token"), CLICK), topic_prefix)).schema_id > 0


async def test_credentials_do_not_follow_a_redirect(proxy: RegistryProxy) -> None:
    proxy.answers = [(302, b"", {"location": f"{proxy.url}/elsewhere"})]
    with pytest.raises(TopicError, match=r"given status 302 \(no message\); check the address"):
        await encoder(Avro(SchemaRegistry(proxy.url, token="a-token"), CLICK), "t")
    assert len(proxy.asked) == 1
