"""Requests with the head of an answered one are neither parsed nor do they get a task; all else stays as it is."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import orjson
import pytest
from service.http_case import Case, case, request, status_of
from support.waiting import PATIENCE_S, until

from streamiter.service.http.connections import KnownHeads

GOOD = request("/predict", b'{"km": 600.0}')


class Client:
    """A connection that stays open."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    def send(self, sent: bytes) -> None:
        self._writer.write(sent)

    async def ask(self, sent: bytes) -> tuple[list[bytes], bytes]:
        """Send a request; return the lines of the answer's head without its date, and its body."""
        self.send(sent)
        async with asyncio.timeout(PATIENCE_S):
            return await self.answer()

    async def answer(self) -> tuple[list[bytes], bytes]:
        head = (await self._reader.readuntil(b"\r\n\r\n")).split(b"\r\n")[:-2]
        [length] = [int(line.partition(b":")[2]) for line in head if line.lower().startswith(b"content-length")]
        return [line for line in head if not line.startswith(b"date")], await self._reader.readexactly(length)

    async def is_ended(self) -> bool:
        async with asyncio.timeout(PATIENCE_S):
            with contextlib.suppress(ConnectionError):
                return await self._reader.read(1) == b""
        return True


@contextlib.asynccontextmanager
async def connected(service: Case) -> AsyncIterator[Client]:
    reader, writer = await asyncio.open_connection("127.0.0.1", service.port)
    try:
        yield Client(reader, writer)
    finally:
        writer.close()


@pytest.fixture
def hits(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether each request was answered by its head."""
    found: list[bool] = []
    answer = KnownHeads.answer

    def noting(heads: KnownHeads, data: bytes) -> bytes | None:
        document = answer(heads, data)
        found.append(document is not None)
        return document

    monkeypatch.setattr(KnownHeads, "answer", noting)
    return found


async def test_further_requests_are_answered_and_counted_as_the_first(hits: list[bool]) -> None:
    """Head, task and messages of each request took two thirds of the time of its prediction."""
    async with case() as service, connected(service) as client, connected(service) as other:
        answers = [await client.ask(GOOD), await client.ask(GOOD), await other.ask(GOOD)]
        heads, documents = [head for head, _ in answers], [orjson.loads(body) for _, body in answers]
        for document in documents:
            document.pop("age_s")
        assert hits == [False, True, True]
        lengths = [line for head in heads for line in head if line.startswith(b"content-length")]
        assert len(lengths) == 3
        assert [[line for line in head if line not in lengths] for head in heads[1:]] == [
            [line for line in heads[0] if line not in lengths]
        ] * 2
        assert documents[1:] == documents[:1] * 2
        assert service.observations.predictions == {"predicted": 3, "refused": 0}
        assert service.observations.requests == {("/predict", 200): 3}


async def test_wrong_rows_get_their_problem_documents_also_behind_a_known_head(hits: list[bool]) -> None:
    """What is wrong with a row must be said, however its head was read."""
    async with case() as service, connected(service) as client:
        await client.ask(GOOD)
        for body, status in ((b'{"km": "far"}', 422), (b'{"km": 600.0', 400), (b'{"km": 6e999}', 400)):
            head, answer = await client.ask(request("/predict", body.ljust(13)))
            assert status_of(head[0]) == status, answer
            assert orjson.loads(answer)["status"] == status
        await client.ask(GOOD)
        assert hits == [False, False, False, False, True]
        assert service.observations.predictions == {"predicted": 2, "refused": 3}


async def test_requests_in_several_pieces_and_in_one_are_parsed(hits: list[bool]) -> None:
    """A known head says nothing about how the bytes behind it arrive."""
    async with case() as service, connected(service) as client:
        await client.ask(GOOD)
        client.send(GOOD[:-5])
        await until(lambda: len(hits) == 2)
        assert status_of((await client.ask(GOOD[-5:]))[0][0]) == 200
        assert status_of((await client.ask(GOOD + GOOD))[0][0]) == 200
        async with asyncio.timeout(PATIENCE_S):
            assert status_of((await client.answer())[0][0]) == 200
        assert not any(hits)
        await client.ask(GOOD)
        assert hits[-1]
        assert service.observations.predictions == {"predicted": 5, "refused": 0}


@pytest.mark.parametrize(
    "sent",
    [
        request("/predict?explain=true", b'{"km": 600.0}'),
        request("/predict", b'{"km": 600.0}', "Expect: 100-continued"),
        GOOD.replace(b"localhost\r\n", b"localhost\n"),
        request("/livez", method="GET"),
    ],
    ids=["explain", "expect", "line ends", "no prediction"],
)
async def test_heads_of_other_requests_are_not_kept(sent: bytes, hits: list[bool]) -> None:
    """Only what the head and the body say is the same for all requests with a head."""
    async with case() as service:
        for _ in range(2):
            async with connected(service) as client:
                assert status_of((await client.ask(sent))[0][0]) in (200, 400)
        assert not any(hits)


async def test_a_known_head_has_its_token(tmp_path: Path, hits: list[bool]) -> None:
    """A request with another token is not the one that was admitted."""
    file = tmp_path / "token"
    file.write_text("s3cret")
    async with case(token_file=str(file)) as service, connected(service) as client:
        good = request("/predict", b"{}", "Authorization: Bearer s3cret")
        await client.ask(good)
        assert status_of((await client.ask(good.replace(b"s3cret", b"s3cre7")))[0][0]) == 401
        assert status_of((await client.ask(good))[0][0]) == 200
        assert hits == [False, False, True]


async def test_a_connection_in_use_stays_open_and_an_idle_one_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The timer of the first answer would cut off a client that has asked again and again since then."""
    monkeypatch.setattr("streamiter.service.http.connections.KEEP_ALIVE_S", 0.3)
    monkeypatch.setattr("streamiter.service.http.server.KEEP_ALIVE_S", 0.3)
    async with case() as service, connected(service) as client, connected(service) as other:
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        await client.ask(GOOD)
        while loop.time() - began_s < 0.5:
            await client.ask(GOOD)
        await other.ask(GOOD)  # Its first request has a known head.
        assert await client.is_ended()
        assert await other.is_ended()
