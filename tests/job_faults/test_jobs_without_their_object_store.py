"""Jobs whose checkpoints are in an object store that fails for a while: no record is lost or doubled."""

from __future__ import annotations

import traceback
from pathlib import Path

import pytest
from job_faults.service import Serve, checkpoints_in, nothing_unheard
from job_faults.sums import Topics, check_committed, feeding, sums_flow, until_committed
from support.s3_server import S3Server

from streamiter.errors import ConfigurationError, StoreUnavailable
from streamiter.topics import topic


@pytest.mark.parametrize("fault", ["stop", "freeze"])
async def test_a_job_continues_while_its_store_does_not_answer(
    serve: Serve, s3_server: S3Server, s3_url: str, tmp_path: Path, caplog: pytest.LogCaptureFixture, fault: str
) -> None:
    """The object store was away for a minute, and the job ended, or its outputs were missing or doubled."""
    file = tmp_path / "topics.db"
    topics = Topics.same(*(topic(f"sqlite:///{file}?topic={name}") for name in ("numbers", "sums")))
    await topics.create()
    with nothing_unheard(caplog):
        service = serve(sums_flow("sums", topics), checkpoints_in(s3_url.replace("after_s=20", "after_s=0.5")))
        async with feeding(topics.numbers) as feed:
            await service.works()
            (s3_server.stop if fault == "stop" else s3_server.freeze)()
            try:
                await service.until(lambda: service.given_up >= 2)
            finally:
                (s3_server.start if fault == "stop" else s3_server.thaw)()
            await service.works()
        await until_committed(topics.sums, feed.count)
        statistics = await service.suspended()
    await check_committed(topics.sums, feed.count)
    assert (len(service.jobs), statistics.state) == (1, "suspended")
    place = s3_url.partition("?")[0]
    assert f"expected the object store {place} to keep checkpoints, given no answer for 0.5 s" in caplog.text
    assert "The next one is tried in 0.1 s" in caplog.text
    assert "hush" not in caplog.text


async def test_a_job_does_not_start_without_its_store(serve: Serve, s3_server: S3Server, s3_url: str) -> None:
    """A store that did not answer was taken for an empty one, and the job started without its state."""
    topics = Topics.same(*(topic(f"memory://{name}") for name in ("numbers", "sums")))
    await topics.create()
    s3_server.stop()
    try:
        service = serve(sums_flow("sums", topics), checkpoints_in(s3_url.replace("after_s=20", "after_s=0.2")))
        with pytest.raises(StoreUnavailable, match=r"given no answer for 0\.2 s; .* check the store, the network"):
            await service.suspended()
    finally:
        s3_server.start()


async def test_a_missing_bucket_is_an_error_at_the_start(serve: Serve, s3_url: str) -> None:
    """A wrong bucket looked like an outage, and each checkpoint was given up."""
    topics = Topics.same(*(topic(f"memory://{name}") for name in ("numbers", "sums")))
    await topics.create()
    service = serve(sums_flow("sums", topics), checkpoints_in(s3_url.replace("s3://state", "s3://other")))
    with pytest.raises(ConfigurationError, match=r"given s3://other\S+ \(answer 404 NoSuchBucket\)") as failed:
        await service.suspended()
    assert "hush" not in "".join(traceback.format_exception(failed.value))
