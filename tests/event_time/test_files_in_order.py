"""Files that follow each other in time: event time goes on with each file."""

from pathlib import Path
from typing import Any

import orjson
import pytest

from streamiter import Flow, topic, tumbling

ROWS_OF_A_FILE = 12_000


@pytest.mark.parametrize("in_order", [True, False])
async def test_windows_of_files_in_order_leave_before_the_last_file_is_begun(tmp_path: Path, in_order: bool) -> None:
    """Windows kept a year of files in memory: each file that was not begun held back event time, and none had left."""
    for day in range(3):
        rows = (orjson.dumps({"at": day * ROWS_OF_A_FILE + number}) for number in range(ROWS_OF_A_FILE))
        (tmp_path / f"day-{day}.jsonl").write_bytes(b"\n".join(rows) + b"\n")
    flow, read = Flow("days"), [0]
    seen_at: list[int] = []

    def seen(batch: Any) -> Any:
        read[0] += len(batch)
        return batch

    files = topic(f"file:{tmp_path}/day-*.jsonl", in_order=in_order, files_at_once=1)
    timed = flow.source(files).map_batch(seen).event_time("at", unit="s", check_unit=False)
    windows = timed.key_by(lambda _: 0).window(tumbling(4_000)).aggregate("count")
    counts = windows.map(lambda window: (seen_at.append(read[0]), window.value)[1]).collect()
    job = await flow.start()
    await job.wait()
    assert counts.items == [4_000] * (3 * ROWS_OF_A_FILE // 4_000)
    assert (seen_at[0] <= ROWS_OF_A_FILE) is in_order
    assert sum(task.late_records for task in job.statistics().tasks) == 0
    [source] = [task.source for task in job.statistics().tasks if task.source is not None]
    assert source.read_records == 3 * ROWS_OF_A_FILE
