"""The store of checkpoints in an object store, with a real S3 server."""

import asyncio
import contextlib
import json
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import pytest
from checkpoints.snapshots import CONTENT, Frames, header, ids, save, save_and_commit
from checkpoints.store_contract import MakeStore, StoreContract, check_independence
from support.s3_server import S3Server
from support.waiting import PATIENCE_S
from typer.testing import CliRunner

from streamiter.cli.app import app
from streamiter.engine.storage.flow_checkpoints import FlowCheckpoints
from streamiter.engine.storage.snapshot import CheckpointId, SnapshotPart
from streamiter.engine.storage.snapshot_file import SnapshotWriter
from streamiter.engine.storage.store import blobs_at, store_at
from streamiter.errors import ConfigurationError, StorageFull, StoreUnavailable

SmallDisk = tuple[Path, Callable[[], bool]]


class TestObjectStore(StoreContract):
    """The checks for every store."""

    @pytest.fixture
    def make_store(self, s3_url: str) -> MakeStore:
        return lambda: store_at(s3_url)

    async def test_flows_of_any_name_are_independent(self, make_store: MakeStore) -> None:
        """A server took the name of a flow for a path, or decoded it. (Fewer names, since each costs requests.)"""
        await check_independence(make_store(), "../clicks", ["..", "größe", "a b", "a/b", "漢字" * 61])


# ---- the URL


def test_clients_of_all_providers_are_made_without_a_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    """The client of a provider was given an option under another name, which no test noticed."""
    monkeypatch.setenv("GOOGLE_SKIP_SIGNATURE", "true")
    given = {
        "s3://state/of/clicks?region=eu-central-1&endpoint=https://s3.example.org": "s3://state/of/clicks",
        "gs://state/clicks/": "gs://state/clicks",
        "az://state?account_name=acme": "az://state",
    }
    assert {url: blobs_at(url).place for url in given} == given


def test_a_missing_package_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first run in production ended with an ImportError."""
    monkeypatch.setitem(sys.modules, "obstore", None)
    monkeypatch.delitem(sys.modules, "streamiter.engine.storage.object_blobs", raising=False)
    with pytest.raises(ConfigurationError, match=r"pip install 'streamiter\[object-store\]'"):
        blobs_at("s3://state/clicks")


# ---- the server


def impatient(s3_url: str) -> Any:
    """Return access to a server that is away: one that is there but slow could take longer than that to answer."""
    return blobs_at(s3_url.replace("after_s=20", "after_s=0.2"))


async def test_a_store_that_does_not_answer_is_not_taken_for_an_empty_one(s3_server: S3Server, s3_url: str) -> None:
    """A job listed no checkpoints while the network was away, and started without its state."""
    store = store_at(s3_url)
    await store.claim("clicks", "a")
    [committed] = await save_and_commit(store, 1)
    s3_server.stop()
    store._blobs = impatient(s3_url)
    try:
        for call in (
            store.list(),
            store.list("clicks"),
            store.pointer("clicks"),
            store.open("clicks", committed),
            store.claim("clicks", "a"),
            store.commit("clicks", committed),
            store.prune("clicks", keep=1),
            save(store, 2),
        ):
            with pytest.raises(StoreUnavailable, match="expected the object store s3://") as failed:
                await call
            assert "hush" not in "".join(traceback.format_exception(failed.value))
    finally:
        s3_server.start()
    assert await ids(store_at(s3_url)) == [committed]


async def test_the_reason_of_a_failed_save_is_not_replaced(s3_server: S3Server, s3_url: str) -> None:
    """The store was away behind the last part, and the job ended with an error of the client in place of its own."""
    flow = FlowCheckpoints(blobs_at(s3_url), "clicks")
    flow.claim("a", forget_committed=False)
    writer = SnapshotWriter("0000000001-a.checkpoint")
    flow.begin(CheckpointId(1, "a"), writer)
    flow.publish(header(1), writer)
    s3_server.stop()
    flow._blobs = impatient(s3_url)
    try:
        flow.abandon(writer)
    finally:
        s3_server.start()


@contextlib.contextmanager
def served(handler: type[BaseHTTPRequestHandler]) -> Iterator[str]:
    """Yield the address of a server."""
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()


class Answers(BaseHTTPRequestHandler):
    """A server with one object of 1,000 bytes; requests for its content get another answer, with a key in it."""

    status = 403
    protocol_version = "HTTP/1.1"

    def do_HEAD(self) -> None:
        self.send_response(200)
        self.send_header("Content-Length", "1000")
        self.send_header("Last-Modified", "Mon, 01 Jan 2024 00:00:00 GMT")
        self.end_headers()

    def do_GET(self) -> None:
        said = b"<Error><Code>InvalidAccessKeyId</Code><AWSAccessKeyId>AKIAOFTESTS</AWSAccessKeyId></Error>"
        self.send_response(self.status)
        self.send_header("Content-Length", str(len(said)))
        self.end_headers()
        self.wfile.write(said)

    def log_message(self, *arguments: object) -> None:
        pass


@pytest.mark.parametrize(
    ("status", "kind", "said"),
    [
        (
            403,
            ConfigurationError,
            r"given s3://state/clicks \(answer 403 InvalidAccessKeyId\); check the bucket, and the",
        ),
        (503, StoreUnavailable, r"given answer 503 InvalidAccessKeyId; what was committed before is as it was"),
        (301, ConfigurationError, r"expected the region of the bucket of s3://state/clicks, given another one; add"),
    ],
)
@pytest.mark.parametrize("call", ["record", "header", "open"])
def test_a_refusal_is_told_without_the_key(
    s3_url: str, status: int, kind: type[Exception], said: str, call: str
) -> None:
    """The answer of the server, with the id of the key in it, was in the log of each pod; or an outage in the middle of
    a snapshot was taken for a damaged checkpoint, and the job advised to start from an older one.
    """
    patience_s = 1 if status == 503 else PATIENCE_S  # Only 503 is asked for again, as long as this.
    with served(type("AnswersSo", (Answers,), {"status": status})) as address:
        flow = FlowCheckpoints(blobs_at(f"s3://state/clicks?endpoint={address}&give_up_after_s={patience_s}"), "clicks")
        with pytest.raises(kind, match=said) as refused:
            flow.record() if call == "record" else getattr(flow, call)(CheckpointId(1, "a"))
    assert "AKIA" not in "".join(traceback.format_exception(refused.value))


class Unconditional(BaseHTTPRequestHandler):
    """A server that ignores the conditions of requests, as older servers with the API of S3 do."""

    objects: ClassVar[dict[str, bytes]] = {}

    def do_PUT(self) -> None:
        self.objects[self.path] = self.rfile.read(int(self.headers["Content-Length"]))
        self._answer(200, b"")

    def do_GET(self) -> None:
        is_list = "list-type" in self.path
        listed = b"<ListBucketResult><IsTruncated>false</IsTruncated></ListBucketResult>"
        self._answer(200 if is_list or self.path in self.objects else 404, self.objects.get(self.path, listed))

    def _answer(self, status: int, content: bytes) -> None:
        self.send_response(status)
        for name, value in (
            ("Content-Length", str(len(content))),
            ("Last-Modified", "Mon, 01 Jan 2024 00:00:00 GMT"),
            ("ETag", f'"{len(content)}"'),
        ):
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *arguments: object) -> None:
        pass


def test_a_server_that_ignores_conditions_is_refused(s3_url: str) -> None:
    """Two runs both took themselves for the owner, because the server replaced the record in any case."""
    with served(Unconditional) as address:
        flow = FlowCheckpoints(blobs_at(f"s3://state/clicks?endpoint={address}&give_up_after_s=5"), "clicks")
        with pytest.raises(ConfigurationError, match="expected a server with conditional writes, given one that has"):
            flow.claim("a", forget_committed=False)


async def test_a_large_snapshot_is_sent_in_parts_and_read_unchanged(s3_url: str) -> None:
    """The parts of an upload were put together in another order, or the last one was missing."""
    store = store_at(s3_url)
    await store.claim("clicks", "a")
    frames = [number.to_bytes(4, "little") * (1 << 18) for number in range(20)]
    await store.save(header(1), [SnapshotPart("p", b"", [Frames(frames)])])
    snapshot = await store.open("clicks", CheckpointId(1, "a"))
    assert list(snapshot.frames("p", 0)) == frames
    snapshot.close()


async def test_a_full_disk_of_temporary_files_is_named(
    s3_url: str, small_disk: SmallDisk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error advised to keep fewer checkpoints, which are not on this disk."""
    disk, _ = small_disk
    monkeypatch.setattr(tempfile, "tempdir", str(disk))
    store = store_at(s3_url)
    await store.claim("clicks", "a")
    large = [SnapshotPart("p", b"", [Frames([bytes(1 << 20)] * 10)])]
    said = rf"room for checkpoints in {disk}, given No space left .* on that disk, or set TMPDIR to a folder with more"
    with pytest.raises(StorageFull, match=said):
        await store.save(header(1), large)
    assert await ids(store) == []


async def test_a_tool_does_not_remove_newer_snapshots(s3_url: str) -> None:
    """An object store does not show which runs are alive, and a tool removed a snapshot before its commit."""
    store = store_at(s3_url)
    await store.claim("clicks", "a")
    await save_and_commit(store, 1)
    await save(store, 2)
    tool = FlowCheckpoints(blobs_at(s3_url), "clicks")
    with pytest.raises(ConfigurationError, match="given a store that does not show whether one is alive; start the"):
        tool.prune(keep=1, newer=True)
    assert tool.prune(keep=1, newer=False) == []


async def test_the_command_line_takes_the_url(s3_url: str) -> None:
    """The tools could not see the checkpoints of a job in an object store."""
    store = store_at(s3_url)
    await store.claim("clicks", "a")
    await save_and_commit(store, 1, 2)
    said = {}
    for command in ("list", "show", "verify", "prune"):
        ran = await asyncio.to_thread(CliRunner().invoke, app, ["checkpoints", command, s3_url, "--json"])
        assert ran.exit_code == 0, ran.output
        said[command] = [json.loads(line) for line in ran.stdout.splitlines()]
    assert [(each["checkpoint"], each["committed"]) for each in said["list"]] == [(1, False), (2, True)]
    assert said["show"][0]["parts"].keys() == CONTENT.keys()
    assert [each["problem"] for each in said["verify"]] == [None, None]
    assert said["prune"] == []
    assert "hush" not in json.dumps(said)
