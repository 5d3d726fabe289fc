"""Flows of the tests on Ray, and a program that runs one: ``python ray_flows.py ADDRESS FOLDER [STORE]``."""

import asyncio
import os
import sys
from pathlib import Path

from streamiter import Checkpoints, Flow, Ray
from streamiter.operators import Source, SourceBatch


class Numbers(Source):
    """Numbers without an end, until the file ``end`` is in the folder."""

    bounded = False

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def open(self, context: object, positions: dict[str, int] | None) -> None:
        self.number = (positions or {}).get("number", 0)

    async def read(self) -> SourceBatch | None:
        await asyncio.sleep(0.01)  # Leaves the processors to the starts of Ray's processes, for which tests wait.
        if (self.folder / "end").exists():
            return None
        first, self.number = self.number + 1, self.number + 100
        return SourceBatch(list(range(first, self.number + 1)), {"number": self.number})


class Notes:
    """Writes the number of its process and the first record that it gets into a file of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.has_noted = False

    def __call__(self, record: int) -> int:
        if not self.has_noted:
            self.has_noted = True
            note = self.folder / f"new {os.getpid()}"
            note.write_text(f"{record}")
            note.rename(self.folder / f"process {os.getpid()}")
        return record


def endless(folder: Path, name: str = "endless") -> Flow:
    """Return a flow in two processes; the largest number is its result."""
    flow = Flow("endless on Ray", parallelism=2)
    numbers = flow.from_source(lambda: Numbers(folder), name="numbers", parallelism=1).rebalance()
    notes = numbers.map(Notes(folder), name=name)
    notes.key_by(lambda number: 0).reduce(max, name="largest").filter(lambda n: False).collect(name="none")
    return flow


def noted(folder: Path) -> dict[int, int]:
    """Return the first record of each process."""
    return {int(note.name.split()[1]): int(note.read_text()) for note in folder.glob("process *")}


if __name__ == "__main__":
    address, at, *store = sys.argv[1:]
    options = {"checkpoints": Checkpoints(store[0], interval_s=0.2)} if store else {}
    statistics = endless(Path(at)).run(on=Ray(2, address=None if address == "own" else address), **options)
    sys.stdout.write(f"{statistics.state}\n")
