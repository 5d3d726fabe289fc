"""Whatever bytes come, the server answers with a clear 4xx or ends the connection, and then it predicts again.

``make soak`` sends 10,000 malformed requests, ``make test`` some hundred.
"""

import asyncio
import contextlib
import socket
import threading
from collections.abc import Iterator
from random import Random

import orjson
import pytest
from service.http_case import case, request
from support.examples import random_examples
from support.waiting import PATIENCE_S

# A hang shows as a time-out; a request takes milliseconds.
_HANG_S = 20.0

_METHODS = [b"POST", b"GET", b"HEAD", b"OPTIONS", b"PUT", b"CONNECT", b"PRI", b"TRACE", b"get", b"", b"\x00", b"P OST"]
_PATHS = [
    *(b"/predict", b"/models/late/predict", b"/predict?partial=true&explain=true", b"/predict?partial=yes", b"/flow"),
    *(b"/models/late/versions?count=2", b"/models/late/versions?count=-1", b"/models/late/compare?old=2.1&new=2.1"),
    *(b"/models/late/compare?old=" + b"9" * 30, b"/models/%00/predict", b"/models/a%2Fb/predict", b"/models//predict"),
    *(
        b"/metrics",
        b"/openapi.json",
        b"/livez",
        b"*",
        b"",
        b"//",
        b"/%",
        b"/%zz",
        b"/\xff\xfe",
        b"/..%2f..%2fetc/passwd",
    ),
    *(
        b"http://[::1",
        b"http://evil.example/predict",
        b"localhost:80",
        b"/predict#\x7f",
        b"/" + b"a" * 9_000,
        b"/\xf0\x9f",
    ),
]
_VERSIONS = [
    b"HTTP/1.1",
    b"HTTP/1.1",
    b"HTTP/1.1",
    b"HTTP/1.0",
    b"HTTP/2.0",
    b"HTTP/9.9",
    b"HTP/1.1",
    b"",
    b"HTTP/1.1 x",
]
_HEADERS = [
    *(b"Host: localhost", b"Host: evil.example", b"Host:", b"Host: [::1", b"host: \xff", b"Content-Length: 5"),
    *(b"Content-Length: -1", b"Content-Length: 99999999999999999999", b"Content-Length: 1e3", b"Content-Length: 3, 4"),
    *(b"Transfer-Encoding: chunked", b"Transfer-Encoding: gzip, chunked", b"Transfer-Encoding: \x0bchunked"),
    *(b"Expect: 100-continue", b"Expect: 200-ok", b"Connection: close", b"Connection: keep-alive, upgrade"),
    *(b"Upgrade: websocket", b"Upgrade: h2c", b"Content-Encoding: gzip", b"Content-Type: text/html; charset=\xff"),
    *(b"Accept: image/svg+xml;q=nan", b"Accept: */*;q=,;;", b"Accept: image/svg+xml", b"Accept: text/csv", b"Accept:"),
    *(b"Authorization: Basic !", b"Authorization: Bearer \xff", b": no name", b"no colon", b" folded", b"N\x00: v"),
    *(b"X: " + b"y" * 70_000, b"Cookie: " + b"a=b; " * 900, b"Range: bytes=0-", b"Sec-WebSocket-Key: x"),
]
_BODIES = [
    *(
        b'{"km": 600.0}',
        b'{"rows": [{"km": 1}, {"km": "x"}]}',
        b'{"rows": [[1, 2]]}',
        b"{}",
        b"[]",
        b"null",
        b"1",
        b'""',
    ),
    *(
        b'{"km": NaN}',
        b'{"km": 1e999}',
        b'{"km": ' + b"9" * 400 + b"}",
        b'{"km": "\\ud800"}',
        b"\xff\xfe{",
        b"\xef\xbb\xbf{}",
    ),
    *(b"[" * 3_000, b'{"rows": ' * 900, b'{"rows": [' + b"{}," * 1_500 + b"{}]}", b'{"a":{"b":[{}]},"sky":[]}'),
    *(
        b'5\r\n{"k":\r\n2\r\n1}\r\n0\r\n\r\n',
        b"zz\r\n{}\r\n0\r\n\r\n",
        b"ffffffffffffffff\r\n{}",
        b"2;x=" + b"y" * 70_000,
    ),
    *(b'{"' + b'":1,"'.join(b"%d" % number for number in range(500)) + b'":1}', b" " * 1_100_000, b"\x00" * 100),
]


def malformed(draw: Random) -> bytes:
    """Return the bytes of a connection: one request or some, most of them wrong."""
    sent = b""
    for _ in range(draw.choice((1, 1, 1, 2, 4))):
        body = draw.choice(_BODIES) if draw.randrange(4) else b""
        if draw.randrange(2):  # A good request in everything but its path and body.
            sent += request("?", body, "Connection: close" if draw.randrange(2) else "X: y").replace(
                b"?", draw.choice(_PATHS), 1
            )
            continue
        lines = [b" ".join([draw.choice(_METHODS), draw.choice(_PATHS), draw.choice(_VERSIONS)])]
        lines += [draw.choice(_HEADERS) for _ in range(draw.randrange(5))]
        lines += [b"Content-Length: %d" % len(body)] if draw.randrange(2) else []
        sent += draw.choice((b"\r\n", b"\r\n", b"\r\n", b"\n", b"\r")).join([*lines, b"", b""]) + body
    for _ in range(draw.choice((0, 0, 1, 3))):
        at = draw.randrange(len(sent) + 1)
        noise = bytes(draw.randrange(256) for _ in range(draw.randrange(1, 5)))
        sent = sent[:at] + noise + sent[at + draw.randrange(3) :]
    return sent[: draw.randrange(len(sent) + 1)] if draw.randrange(6) == 0 else sent


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    """Serve in a thread with an event loop of its own, so that examples run one after the other on plain sockets."""
    ports: list[int] = []
    is_started, loop = threading.Event(), asyncio.new_event_loop()
    ended = asyncio.Event()

    async def serve() -> None:
        async with case(versions=2, flow=True) as service:
            observations = service.observations
            observations.enter("running")
            turning = asyncio.create_task(observations.loop_lag.run(lambda _: None))
            ports.append(service.port)
            is_started.set()
            await ended.wait()
            turning.cancel()

    thread = threading.Thread(target=lambda: loop.run_until_complete(serve()))
    thread.start()
    try:
        assert is_started.wait(PATIENCE_S)
        yield ports[0]
    finally:
        loop.call_soon_threadsafe(ended.set)
        thread.join(PATIENCE_S)
        loop.close()


def exchanged(port: int, sent: bytes) -> bytes:
    """Send bytes and the end of them; return all that the server answers until it ends the connection."""
    received = bytearray()
    with socket.create_connection(("127.0.0.1", port), timeout=_HANG_S) as connection:
        # The server may end the connection while the client still writes: then the answer may be lost.
        with contextlib.suppress(OSError):
            connection.sendall(sent)
            connection.shutdown(socket.SHUT_WR)
        with contextlib.suppress(ConnectionError):
            while part := connection.recv(65_536):
                received += part
    return bytes(received)


def check_answers(received: bytes) -> None:
    """Check each answer: its status, and the document of an error."""
    while received:
        head, _, rest = received.partition(b"\r\n\r\n")
        lines = head.split(b"\r\n")
        status = int(lines[0].split(b" ")[1])
        assert lines[0].startswith(b"HTTP/1.1 "), lines[0]
        assert status < 500, head + rest[:300]
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(b":") for line in lines[1:])}
        length = int(headers.get(b"content-length", b"0"))
        if rest[:5] == b"HTTP/" or not rest:  # The answer to HEAD has no body.
            length = 0
        elif status >= 400 and len(rest) >= length:
            assert headers[b"content-type"] == b"application/problem+json", head
            assert {"type", "title", "status", "detail"} <= orjson.loads(rest[:length]).keys()
        received = rest[length:]


@random_examples(malformed)
def test_malformed_requests_get_a_clear_refusal(sent: bytes, port: int) -> None:
    """A scanner of the company's network sent odd requests: one of them got a 500, and one stopped the server."""
    check_answers(exchanged(port, sent))
    answer = exchanged(port, request("/predict", b'{"km": 600.0}', "Connection: close"))
    assert answer.startswith(b"HTTP/1.1 200 OK\r\n"), answer[:300]
    assert b'"probability"' in answer
