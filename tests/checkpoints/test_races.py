"""Runs of one flow whose requests to the store alternate at random: no commit is lost, and older runs change nothing.

The blobs here have no lock, as an object store. Each request is one turn, and a seed decides about the order of turns.
"""

import contextlib
import queue
import threading
from collections.abc import Callable
from random import Random
from typing import BinaryIO

import pytest
from checkpoints.snapshots import header
from support.examples import random_examples
from support.waiting import PATIENCE_S

from streamiter.engine.storage.blobs import Blob, BlobChanged, BlobReader, Blobs, MemoryBlobs
from streamiter.engine.storage.flow_checkpoints import FlowCheckpoints
from streamiter.engine.storage.flow_record import FlowRecord, snapshot_name
from streamiter.engine.storage.snapshot import CheckpointId
from streamiter.engine.storage.snapshot_file import SnapshotWriter
from streamiter.engine.storage.store import blobs_at
from streamiter.errors import CheckpointError, ProducerFenced


class Turns:
    """Lets one of several threads work at a time, and chooses the next one at random before each request."""

    def __init__(self, chance: Random) -> None:
        self.chance = chance
        self._may_work: dict[str, threading.Event] = {}
        self._waits: queue.Queue[str | None] = queue.Queue()
        self._errors: list[BaseException] = []

    def wait(self, run: str) -> None:
        """End the turn of a run, and wait for its next one."""
        self._waits.put(run)
        assert self._may_work[run].wait(PATIENCE_S)
        self._may_work[run].clear()

    def play(self, runs: dict[str, Callable[[], None]], after_each: Callable[[], None]) -> None:
        """Run all until they end; raise the first error."""
        self._may_work = {run: threading.Event() for run in runs}
        threads = [threading.Thread(target=self._play, args=(run, work)) for run, work in runs.items()]
        for thread in threads:
            thread.start()
        waiting, chosen = list[str](), ""
        # Some examples alternate at each request; in others a run gets far between two requests of another.
        stays = self.chance.choice((0.0, 0.5, 0.9))
        alive = len(runs)
        while alive:
            # All others wait, so the order in which threads start does not matter.
            while len(waiting) < alive:
                run = self._waits.get(timeout=PATIENCE_S)
                alive -= run is None
                waiting += [run] if run is not None else []
            if waiting:
                if chosen not in waiting or self.chance.random() >= stays:
                    chosen = self.chance.choice(sorted(waiting))
                waiting.remove(chosen)
                self._may_work[chosen].set()
            if not self._errors:
                after_each()
        for thread in threads:
            thread.join()
        if self._errors:
            raise self._errors[0]

    def _play(self, run: str, work: Callable[[], None]) -> None:
        try:
            self.wait(run)
            work()
        except BaseException as error:
            self._errors.append(error)
        finally:
            self._waits.put(None)


class SharedBlobs(Blobs):
    """Blobs as one run sees them: each request takes a turn, and the answer to a replacement may be lost."""

    def __init__(self, blobs: Blobs, turns: Turns, run: str) -> None:
        self._blobs, self._turns, self._run = blobs, turns, run
        self.place = blobs.place
        self.owner_at_publication: str | None = None

    def _turn(self) -> Blobs:
        self._turns.wait(self._run)
        return self._blobs

    def folders(self) -> list[str]:
        return self._turn().folders()

    def names(self, folder: str) -> list[str]:
        return self._turn().names(folder)

    def size(self, name: str) -> int | None:
        return self._turn().size(name)

    def read(self, name: str) -> Blob | None:
        return self._turn().read(name)

    def replace(self, name: str, content: bytes, version: str | None) -> None:
        self._turn().replace(name, content, version)
        if self._turns.chance.random() < 0.2:
            # The client of the store repeats a request without an answer, and another run may come first.
            self._turn()
            raise BlobChanged

    def create(self, name: str) -> BinaryIO:
        return self._blobs.create(name)

    def publish(self, file: BinaryIO, name: str) -> None:
        self._turn().publish(file, name)
        record = FlowCheckpoints(self._blobs, "clicks").record()
        self.owner_at_publication = record and record.run

    def abandon(self, file: BinaryIO, name: str, *, is_published: bool) -> None:
        self._turn().abandon(file, name, is_published=is_published)

    def open(self, name: str) -> BlobReader:
        return self._turn().open(name)

    def delete(self, name: str) -> None:
        self._turn().delete(name)


class Race:
    """Some runs of the flow ``clicks``, each of which claims it and takes checkpoints until it is fenced or done."""

    def __init__(self, blobs: Blobs, chance: Random, runs: int, checkpoints: int) -> None:
        self.turns = Turns(chance)
        self.blobs = blobs
        self.flow = FlowCheckpoints(blobs, "clicks")
        self.checkpoints = checkpoints
        self.fenced: list[str] = []
        self.names = [f"run{number}" for number in range(runs)]
        self.seen: list[FlowRecord] = []

    def play(self) -> None:
        self.turns.play({run: self._work_of(run) for run in self.names}, self.check)
        [record] = self.seen[-1:]
        assert sorted(each.run for each in record.runs) == sorted(self.names)
        # The owner has heard of no other run, and all runs before it have, unless they were done before.
        assert record.run not in self.fenced
        assert self.flow.prune(keep=1, newer=True, run=record.run) is not None
        if record.committed is not None:
            assert self.flow.snapshots() == [record.committed]

    def _work_of(self, run: str) -> Callable[[], None]:
        def work() -> None:
            blobs = SharedBlobs(self.blobs, self.turns, run)
            flow = FlowCheckpoints(blobs, "clicks")
            with contextlib.suppress(ProducerFenced):
                before, _ = flow.claim(run, forget_committed=False)
                assert before is None or before.run != run
                number = 0
                if before is not None and before.committed is not None:
                    self._restore(flow, before.committed, run)
                    number = before.committed.number
                for _ in range(self.checkpoints):
                    number += 1
                    self._save(flow, CheckpointId(number, run))
                    assert blobs.owner_at_publication == run  # Otherwise the snapshot would stay as an orphan.
                    flow.commit(run, CheckpointId(number, run))
                    flow.prune(keep=2, newer=True, run=run)
                return
            self.fenced.append(run)
            record = self.flow.record()
            assert record is not None
            assert record.run != run  # Only a run that was replaced is told so.

        return work

    def _restore(self, flow: FlowCheckpoints, checkpoint: CheckpointId, run: str) -> None:
        """Read the committed snapshot, which older runs do not remove; a newer run may."""
        try:
            flow.open(checkpoint).close()
        except CheckpointError:
            record = self.flow.record()
            assert record is not None
            record.check_owner(run, "restore")
            raise

    def _save(self, flow: FlowCheckpoints, checkpoint: CheckpointId) -> None:
        writer = SnapshotWriter(snapshot_name(checkpoint))
        flow.begin(checkpoint, writer)
        try:
            flow.publish(header(checkpoint.number, checkpoint.run), writer)
        except BaseException:
            flow.abandon(writer)
            raise

    def check(self) -> None:
        """Check the rules that hold at every moment."""
        record = self.flow.record()
        if record is None or record in self.seen[-1:]:
            return
        before = self.seen[-1] if self.seen else FlowRecord("clicks")
        self.seen.append(record)
        assert record.runs[: len(before.runs)] == before.runs or len(record.runs) == len(before.runs), "a claim is lost"
        if record.committed is not None:
            assert record.committed in self.flow.snapshots(), "the committed snapshot was removed"
        if record.committed != before.committed:
            assert record.committed is not None
            assert record.committed.run == before.run == record.run, "a run has committed that was not the owner"
            assert before.committed is None or record.committed.number > before.committed.number, "a commit is lost"


def example(chance: Random) -> tuple[int, int, int]:
    return chance.getrandbits(32), chance.randint(2, 4), chance.randint(1, 3)


@random_examples(example, examples=300)
def test_runs_that_claim_save_and_commit_at_the_same_time(given: tuple[int, int, int]) -> None:
    """Two pods started at once; both took themselves for the owner, and the state of one replaced that of the other."""
    seed, runs, checkpoints = given
    Race(MemoryBlobs(), Random(seed), runs, checkpoints).play()


@pytest.mark.parametrize("seed", range(3))
def test_runs_on_a_real_server_at_the_same_time(s3_url: str, seed: int) -> None:
    """The dict of the other test had conditions that no server has."""
    Race(blobs_at(s3_url), Random(seed), runs=3, checkpoints=2).play()
