"""Tests of the HTTP server share a service without a job: a published model, and a server on a port of its own."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import httpx
import orjson
from models.model_case import write
from service.service_models import learned
from support.waiting import PATIENCE_S

from streamiter import Flow
from streamiter.models import ModelSnapshot, ModelUpdateEncoder, ServedModel
from streamiter.service.http.server import serving
from streamiter.service.observing.observations import Observations
from streamiter.service.settings.tables import HttpSettings
from streamiter.topics.memory import MemoryBroker
from streamiter.values.helpers.clock import SystemClock


@dataclass
class Case:
    """A server, and a client of it."""

    address: str
    observations: Observations
    client: httpx.AsyncClient

    @property
    def port(self) -> int:
        return int(self.address.rpartition(":")[2])

    async def raw(self, sent: bytes, *, closes: bool = True) -> bytes:
        """Send bytes on a new connection; return all that comes until the server closes it."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        try:
            async with asyncio.timeout(PATIENCE_S):
                with contextlib.suppress(ConnectionError):
                    writer.write(sent)
                    if closes:
                        writer.write_eof()
                    await writer.drain()
                return await received(reader)
        finally:
            writer.close()

    async def is_well(self) -> bool:
        """Whether the server predicts."""
        answer = await self.client.post("/predict", json={"km": 600.0})
        return answer.status_code == 200


async def received(reader: asyncio.StreamReader) -> bytes:
    """Return all bytes until the end of the connection, also if the server has reset it."""
    parts = bytearray()
    with contextlib.suppress(ConnectionError):
        while part := await reader.read(65_536):
            parts += part
    return bytes(parts)


def request(path: str, body: bytes = b"", *headers: str, method: str = "POST") -> bytes:
    """Return the bytes of a request."""
    lines = [f"{method} {path} HTTP/1.1", "Host: localhost", f"Content-Length: {len(body)}", *headers, "", ""]
    return "\r\n".join(lines).encode() + body


def status_of(answer: bytes) -> int:
    """Return the status of a raw answer."""
    return int(answer.split(b" ", 2)[1])


def problem_of(answer: httpx.Response) -> dict[str, Any]:
    """Return the problem document of an answer."""
    assert answer.headers["content-type"] == "application/problem+json"
    document: dict[str, Any] = orjson.loads(answer.content)
    assert document["status"] == answer.status_code
    assert document["type"].startswith("urn:streamiter:problem:")
    assert document["title"]
    assert document["detail"]
    return document


@contextlib.asynccontextmanager
async def case(
    *, versions: int = 1, flow: bool = False, client: dict[str, Any] | None = None, model: Any = None, **settings: Any
) -> AsyncIterator[Case]:
    """Serve a model of the name ``late`` with some published versions, all of the parameters ``model`` if given."""
    observations = Observations("late")
    updates = MemoryBroker().topic("models")
    await updates.create()
    encoder = ModelUpdateEncoder("late", 2, clock=SystemClock())
    async with contextlib.AsyncExitStack() as stack:
        observations.served = await stack.enter_async_context(ServedModel(updates, "late"))
        for number in range(1, versions + 1):
            parameters = learned(count=100 * number).parameters() if model is None else model
            await write(updates, encoder.encode([ModelSnapshot(parameters, 100 * number, {"log_loss": 1 / number})]))
        if versions:
            await observations.served.ready()
        if flow:
            numbers = Flow("numbers")
            numbers.from_items(range(10)).map(lambda n: n + 1, name="add").collect()
            observations.job = await numbers.start()
            await observations.job.wait()
        given = HttpSettings(**{"address": "127.0.0.1:0", **settings})
        address = await stack.enter_async_context(serving(observations, given))
        # The authorities of HTTPS would take 40 ms of processor time to load; the test of TLS has its own.
        options = {"base_url": address, "timeout": PATIENCE_S, "trust_env": False, "verify": False, **(client or {})}
        yield Case(address, observations, await stack.enter_async_context(httpx.AsyncClient(**options)))
