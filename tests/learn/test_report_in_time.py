"""Validation reports on slow streams."""

from flow.small_flows import Fed

from streamiter import Flow
from streamiter.learn import train_online
from streamiter.testing import VirtualClock


async def test_a_slow_stream_is_reported_in_time() -> None:
    """A service of two rows a minute had shown no metrics for a week: they came every 10,000 rows."""
    clock, fed = VirtualClock(), Fed()
    flow = Flow("slow")
    rows = flow.from_source(lambda: fed, name="in")
    reports = train_online(rows, label="late", report_every_s=2).validation.collect()
    job = await flow.start(clock=clock)
    for count in (1, 2):
        fed.give({"km": 7.0, "late": True})
        await clock.advance(1.9)
        assert len(reports.items) == count - 1
        await clock.advance(1)
        assert [report["count"] for report in reports.items] == list(range(1, count + 1))
        await clock.advance(60)
    await job.stop("abort")
