"""The consumer: follows the model, and writes a line for each version: generation, version, records.

``python -m service_soak.consume TOPIC FOLDER``, until SIGTERM. Each life of the consumer has a file in the folder.
"""

import asyncio
import os
import signal
import sys
from pathlib import Path

import msgspec
from service_soak.events import MODEL

from streamiter import topic
from streamiter.models import model_updates


async def main(url: str, folder: Path) -> None:
    following = asyncio.current_task()
    assert following is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, following.cancel)
    with (folder / f"versions-{os.getpid()}.jsonl").open("ab", buffering=0) as lines:
        async for update in model_updates(topic(url), MODEL, start="latest_model"):
            lines.write(msgspec.json.encode([update.generation, update.version, update.records]) + b"\n")


if __name__ == "__main__":
    try:
        asyncio.run(main(sys.argv[1], Path(sys.argv[2])))
    except asyncio.CancelledError:
        print("stopped", flush=True)
