"""The HTTP client: asks for predictions at a steady rate, and writes a line for each answer or refusal.

``python -m service_soak.ask ADDRESS FOLDER REQUESTS_PER_SECOND``, until SIGTERM. It also looks at health and
metrics, and keeps a page open.
"""

import asyncio
import os
import signal
import sys
import time
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from random import Random
from typing import Any, Final

import httpx
import msgspec
from service_soak.events import question

__all__ = ["Asked"]

_AT_ONCE: Final = 8
_LIMIT_S: Final = 15.0
_LOOKED_AT: Final = ("/livez", "/readyz", "/metrics", "/flow")


@dataclass
class Asked:
    """A request, and its result."""

    path: str
    number: int
    """The number of the question."""
    sent_s: float
    """When it was sent, in seconds since 1970."""
    done_s: float
    status: int
    """The status code; 0 for a connection that was refused or lost."""
    generation: int = 0
    version: int = 0
    probabilities: list[float] = field(default_factory=list)
    detail: str = ""
    """What a refusal says."""


async def main(address: str, folder: Path, per_s: float) -> None:
    asking = asyncio.current_task()
    assert asking is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, asking.cancel)
    # A killed client asks other questions than its successor, so that no cache could answer both.
    numbers = count(Random(os.getpid()).randrange(1 << 30))
    with (folder / f"answers-{os.getpid()}.jsonl").open("ab", buffering=0) as lines:
        async with httpx.AsyncClient(base_url=address, timeout=_LIMIT_S) as client, asyncio.TaskGroup() as group:

            def note(asked: Asked) -> None:
                lines.write(msgspec.json.encode(asked) + b"\n")

            async def ask_for_ever() -> None:
                while True:
                    number = next(numbers)
                    asked, _ = await asyncio.gather(
                        ask(client, "/predict", number, {"rows": question(number)}), asyncio.sleep(_AT_ONCE / per_s)
                    )
                    note(asked)

            async def look_for_ever() -> None:
                for number in count():
                    note(await ask(client, _LOOKED_AT[number % len(_LOOKED_AT)], number))
                    await asyncio.sleep(1.0 / len(_LOOKED_AT))

            async def follow_page() -> None:
                for number in count():
                    note(await follow(client, number))
                    await asyncio.sleep(1.0)

            for _ in range(_AT_ONCE):
                group.create_task(ask_for_ever())
            group.create_task(look_for_ever())
            group.create_task(follow_page())


async def ask(client: httpx.AsyncClient, path: str, number: int, body: Any = None) -> Asked:
    sent_s = time.time()
    try:
        answer = await (client.get(path) if body is None else client.post(path, json=body))
    except httpx.TransportError as error:
        return Asked(path, number, sent_s, time.time(), 0, detail=repr(error))
    asked = Asked(path, number, sent_s, time.time(), answer.status_code)
    if answer.status_code != 200:
        asked.detail = f"{answer.headers.get('content-type')} {answer.headers.get('retry-after')} {answer.text}"
    elif path == "/predict":
        document = answer.json()
        asked.generation, asked.version = document["generation"], document["version"]
        asked.probabilities = [row["probability"] for row in document["predictions"]]
    return asked


async def follow(client: httpx.AsyncClient, number: int) -> Asked:
    """Read the events of the page, as an open browser does, until the connection ends."""
    asked = Asked("/api/events", number, time.time(), 0.0, 0)
    try:
        async with client.stream("GET", asked.path) as answer:
            asked.status = answer.status_code
            async for _ in answer.aiter_raw():
                pass
    except httpx.TransportError as error:
        asked.detail = repr(error)
    asked.done_s = time.time()
    return asked


if __name__ == "__main__":
    try:
        asyncio.run(main(sys.argv[1], Path(sys.argv[2]), float(sys.argv[3])))
    except asyncio.CancelledError:
        print("stopped", flush=True)
