"""`streamiter topics` creates, lists, fills and tails topics."""

import asyncio
import json
import os
import re
import signal
import subprocess

import numpy as np
import pytest
from cli.program import PROGRAM, environment, on_terminal, started, streamiter
from support.processes import process
from support.waiting import PATIENCE_S
from topics.topic_case import write

from streamiter import Columns, Flow, IterationBodyResult, feedback_through, iterate_unbounded_streams
from streamiter.cli.topics import descriptions
from streamiter.topics import MemoryConnector, OutgoingBatch, topic
from streamiter.values.plain_data import PlainData

EVENTS = "sqlite:///events.db?topic=events"

LINES = '{"user":"ann","n":1}\n\n{"user":"bob","n":2}\r\n{"user":7,"n":3}'


async def written(folder, values, *, name="events", partitions=1, **columns):
    """Create a topic in a file of the folder, write these values, and return the topic."""
    target = topic(f"sqlite:///{folder}/events.db?topic={name}")
    await target.create(partitions=partitions)
    await write(target, OutgoingBatch(values, timestamps_ms=[1_000 + n for n in range(len(values))], **columns))
    return target


# ---- create


@pytest.mark.parametrize(
    ("existing", "arguments", "said"),
    [
        (None, (), f"created {EVENTS} with 1 partition\n"),
        (None, ("--partitions", "3"), f"created {EVENTS} with 3 partitions\n"),
        (1, ("--partitions", "2"), f"{EVENTS} has 2 partitions now, 1 before\n"),
        (2, ("--partitions", "1"), f"{EVENTS} is there already, with 2 partitions\n"),
        (
            1,
            ("--setting", "retention_records=5"),
            f"{EVENTS} is there already, with 1 partition\nThe topic keeps its settings; --setting changes nothing.\n",
        ),
    ],
)
async def test_a_topic_is_created_or_reported_as_existing(tmp_path, existing, arguments, said):
    """A setup script that ran twice did harm, or did not say that the topic differs from the given options."""
    if existing is not None:
        await written(tmp_path, [b"1"], partitions=existing)
    ran = streamiter("topics", "create", EVENTS, *arguments, cwd=tmp_path)
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "", said)
    description = await topic(f"sqlite:///{tmp_path}/events.db?topic=events").describe()
    assert description.partitions == int(re.search(r"(\d) partition", said)[1])
    assert description.offsets[0] == (0, 0 if existing is None else 1)


async def test_a_topic_is_created_with_its_settings(tmp_path):
    """A topic without a limit filled a small disk."""
    settings = ("--setting", "retention_records=5", "--setting", "retention_ms=60000")
    ran = streamiter("topics", "create", EVENTS, *settings, cwd=tmp_path)
    assert (ran.returncode, ran.stderr) == (0, f"created {EVENTS} with 1 partition\n")
    description = await topic(f"sqlite:///{tmp_path}/events.db?topic=events").describe()
    assert description.settings == {"retention_records": "5", "retention_ms": "60000"}


# ---- produce


def test_lines_become_records_in_order(tmp_path):
    """An empty line was a record, the last line was lost without a line end, or a record kept its carriage return."""
    (tmp_path / "events.jsonl").write_text(LINES)
    ran = streamiter("topics", "produce", EVENTS, "events.jsonl", "--create", "--key", "user", cwd=tmp_path)
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "", f"3 records written to {EVENTS}\n")
    shown = streamiter("topics", "tail", EVENTS, "--json", cwd=tmp_path).stdout.splitlines()
    records = [json.loads(line) for line in shown]
    assert [record["key"] for record in records] == ["ann", "bob", "7"]
    assert [json.loads(record["value"])["n"] for record in records] == [1, 2, 3]


def test_standard_input_is_read_unless_a_file_is_named(tmp_path):
    """The program could not be used at the end of a pipe."""
    ran = streamiter("topics", "produce", EVENTS, "--create", "--partitions", "2", cwd=tmp_path, given=LINES)
    assert (ran.returncode, ran.stderr) == (0, f"3 records written to {EVENTS}\n")
    listed = streamiter("topics", "list", "sqlite:///events.db", cwd=tmp_path).stdout
    assert listed == "events\t2\t3\n"


def test_each_line_of_a_slow_pipe_is_written_at_once(tmp_path):
    """`tail -f log | streamiter topics produce` waited for thousands of lines before it wrote the first one."""
    assert streamiter("topics", "produce", EVENTS, "--create", cwd=tmp_path).returncode == 0
    with (
        started("topics", "tail", EVENTS, "-f", cwd=tmp_path) as following,
        process(
            [*PROGRAM, "topics", "produce", EVENTS],
            cwd=tmp_path,
            stdin=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=environment(),
            is_forked=True,
        ) as producing,
    ):
        producing.stdin.write("first\nsec")
        producing.stdin.flush()
        assert following.stdout.readline().endswith(" first\n")
        _, said = producing.communicate("ond\n")
        assert following.stdout.readline().endswith(" second\n")
    assert said == f"2 records written to {EVENTS}\n"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_stores_the_lines_that_were_read_and_prints_their_number(tmp_path, number):
    """A user typed records and pressed Ctrl-C, or a service manager ended a pipe, and the last records were lost."""
    assert streamiter("topics", "produce", EVENTS, "--create", cwd=tmp_path).returncode == 0
    reading, writing = os.pipe()
    command, pipes = [*PROGRAM, "topics", "produce", EVENTS], {"stdin": reading, "stderr": subprocess.PIPE}
    with process(command, cwd=tmp_path, env=environment(), is_forked=True, **pipes) as program:
        os.close(reading)
        with started("topics", "tail", EVENTS, "-f", cwd=tmp_path) as following:
            os.write(writing, b"first\n")
            assert following.stdout.readline().endswith(" first\n")
        program.send_signal(number)
        said = program.stderr.read()
        assert (program.wait(PATIENCE_S), said) == (130, f"1 record written to {EVENTS}\n")
    os.close(writing)


def test_a_line_without_the_key_is_named_and_those_before_it_are_stored(tmp_path):
    """Lines without the key got a null key silently, so the records of a user were in several partitions."""
    (tmp_path / "events.jsonl").write_text('{"user":"ann"}\n{"other":1}')
    ran = streamiter("topics", "produce", EVENTS, "events.jsonl", "--create", "--key", "user", cwd=tmp_path)
    assert ran.returncode == 1
    assert ran.stderr.splitlines() == [
        f"1 record written to {EVENTS}",
        'error: --key user: expected JSON objects with that field, given line 2: {"other":1}',
    ]


# ---- list


async def test_topics_are_listed_with_partitions_and_records(tmp_path):
    """A script could not read the list, because it had no tabs and no JSON."""
    await written(tmp_path, [b"1", b"2"], partitions=2)
    await written(tmp_path, [b"1"], name="another")
    assert streamiter("topics", "list", "sqlite:///events.db", cwd=tmp_path).stdout == "another\t1\t1\nevents\t2\t2\n"
    ran = streamiter("topics", "list", "sqlite:///events.db", "--json", cwd=tmp_path)
    described = [json.loads(line) for line in ran.stdout.splitlines()]
    assert [entry["topic"] for entry in described] == ["another", "events"]
    assert described[0] == {"topic": "another", "partitions": 1, "records": 1, "offsets": {"0": [0, 1]}}
    code, printed = on_terminal("topics", "list", "sqlite:///events.db", cwd=tmp_path)
    assert code == 0
    assert re.search(r"events +2 +2", printed)


async def test_a_name_in_a_table_is_shown_as_it_is(tmp_path):
    """Brackets were taken for markup, so a topic's name was only a colour in the table."""
    await written(tmp_path, [b"1"], name="[red]clicks")
    code, printed = on_terminal("topics", "list", "sqlite:///events.db", cwd=tmp_path)
    assert code == 0
    assert re.search(r"\[red\]clicks +1 +1", printed)


def test_files_of_a_folder_are_topics_too(tmp_path):
    """The files of a folder were not listed, because their URLs could not be made from the folder's URL."""
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "clicks.jsonl").write_text('{"a":1}\n{"a":2}\n')
    assert streamiter("topics", "list", "file:data/", cwd=tmp_path).stdout == "clicks.jsonl\t1\t2\n"


async def test_a_topic_that_is_deleted_while_topics_are_listed_is_left_out(monkeypatch):
    """One short-lived topic of a cluster ended the command, and no topic was listed."""

    class Deleting(MemoryConnector):
        async def list_topics(self, url, options):
            return ["listed", "deleted"]

    monkeypatch.setattr("streamiter.cli.topics.connector_for", lambda _url: Deleting())
    await topic("memory://listed").create()
    assert [name for name, _ in await descriptions("memory://")] == ["listed"]


def test_an_empty_list_of_topics_is_reported_on_stderr(tmp_path):
    """A script took the message about an empty list for the name of a topic."""
    ran = streamiter("topics", "list", "sqlite:///nosuch.db", cwd=tmp_path)
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "", "no topics in sqlite:///nosuch.db\n")


# ---- tail


async def test_the_last_records_are_printed_with_place_time_and_key(tmp_path):
    """The command printed millions of records, because it had no default count."""
    await written(tmp_path, [b"value %d" % n for n in range(12)], keys=[b"k%d" % n for n in range(12)])
    lines = streamiter("topics", "tail", EVENTS, cwd=tmp_path).stdout.splitlines()
    assert len(lines) == 10
    assert lines[0] == "0:2 1970-01-01T00:00:01.002Z k2 value 2"
    assert streamiter("topics", "tail", EVENTS, "-n", "1", cwd=tmp_path).stdout.splitlines() == lines[-1:]
    assert streamiter("topics", "tail", EVENTS, "-n", "0", cwd=tmp_path).stdout == ""


async def test_binary_values_show_their_size_and_are_complete_in_json(tmp_path):
    """The bytes of a model changed the settings of the terminal."""
    await written(tmp_path, [b"\xff\x00", None])
    lines = streamiter("topics", "tail", EVENTS, cwd=tmp_path).stdout.splitlines()
    assert [line.split(" ", 2)[2] for line in lines] == ["(2 bytes that are not text)", "(no value)"]
    shown = streamiter("topics", "tail", EVENTS, "--json", cwd=tmp_path).stdout.splitlines()
    first, second = map(json.loads, shown)
    assert (first["value_base64"], second["value"]) == ("/wA=", None)


async def test_following_lasts_until_a_signal_which_is_its_regular_end(tmp_path):
    """A service manager's signal ended the following of a topic with a traceback or an exit code of failure."""
    await written(tmp_path, [b"before"])
    with started("topics", "tail", EVENTS, "--follow", cwd=tmp_path) as program:
        assert program.stdout.readline().endswith(" before\n")
        await written(tmp_path, [b"behind"])
        assert program.stdout.readline().endswith(" behind\n")
        program.send_signal(signal.SIGTERM)
        assert program.communicate(timeout=PATIENCE_S) == ("", "")
        assert program.returncode == 0


async def test_a_closed_pipe_ends_the_command_quietly(tmp_path):
    """`streamiter topics tail … | head -1` printed a traceback about a broken pipe."""
    await written(tmp_path, [b"x" * 100] * 20_000)
    with started("topics", "tail", EVENTS, "--json", "-n", "20000", cwd=tmp_path) as program:
        assert json.loads(program.stdout.readline())["offset"] == 0
        program.stdout.close()
        assert (program.wait(PATIENCE_S), program.stderr.read()) == (0, "")


async def test_a_terminal_shows_long_values_shortened(tmp_path):
    """One record of a megabyte pushed all other records off the screen."""
    await written(tmp_path, [b"x" * 10_000])
    code, printed = on_terminal("topics", "tail", EVENTS, cwd=tmp_path)
    assert code == 0
    assert "… (10,000 bytes)" in printed
    assert len(printed) < 1000


def test_tail_shows_the_feedback_of_a_loop(tmp_path):
    """Records of a loop could not be read as text, because they are batches of plain data and control records."""
    loop = topic(f"sqlite:///{tmp_path}/events.db?topic=events")
    asyncio.run(loop.create())
    flow = Flow("loop")

    def body(variables, data):
        back = variables[0].map(lambda n: n + 1, name="counted").filter(lambda n: n < 3)
        return IterationBodyResult([feedback_through(back, loop)], [])

    iterate_unbounded_streams([flow.from_items([0])], [], body)
    flow.run()
    asyncio.run(written(tmp_path, [b"hello"]))
    lines = streamiter("topics", "tail", EVENTS, "--feedback", "-n", "100", cwd=tmp_path).stdout.splitlines()
    assert re.fullmatch(r"0:0 \S+Z run [0-9a-f]{8} producer 0 start filter\[0\]", lines[0])
    assert [line.split(" producer 0 ")[1] for line in lines[1:] if " data " in line] == [
        "data epoch 1 [1]",
        "data epoch 2 [2]",
    ]
    assert re.fullmatch(r"0:\d+ \S+Z not a feedback record of a loop: no header 'kind'", lines[-1])


async def fed_back(folder, records, run=b"monday"):
    """Write batches as the only producer of a loop writes them."""
    loop = topic(f"sqlite:///{folder}/events.db?topic=events")
    await loop.create()
    writer = await loop.open_writer()
    for sequence, batch in enumerate(records):
        headers = {"feedback-run": run, "producer": b"0", "kind": b"data", "epoch": b"1", "home": b"0"}
        headers["sequence"] = b"%d" % sequence
        await writer.write(OutgoingBatch([PlainData().encode_batch(batch)], headers=[tuple(headers.items())]))
    await writer.close()


@pytest.mark.parametrize(
    ("batch", "shown"),
    [
        ([1, "two", None, {"three": [4.5]}], [1, "two", None, {"three": [4.5]}]),
        (np.array([[1.0, 2.0], [3.0, 4.0]]), [[1.0, 2.0], [3.0, 4.0]]),
        (np.array(["a", "b"]), ["a", "b"]),
        (Columns({"x": np.array([1, 2]), "y": np.array([0.5, 1.5])}), [{"x": 1, "y": 0.5}, {"x": 2, "y": 1.5}]),
        ([(1, np.float32(0.5)), b"\xff", {2: True}], [[1, 0.5], "/w==", {"2": True}]),
        ([1 << 70, {(1, 2): 3}], [str(1 << 70), "{(1, 2): 3}"]),
    ],
    ids=["plain", "array", "texts", "columns", "nearly", "beyond"],
)
def test_the_feedback_of_a_loop_is_json_if_json_has_the_type(tmp_path, batch, shown):
    """A program that watches a loop had to parse lines that are meant for people."""
    asyncio.run(fed_back(tmp_path, [batch]))
    asyncio.run(written(tmp_path, [b"hello"]))
    ran = streamiter("topics", "tail", EVENTS, "--feedback", "--json", cwd=tmp_path)
    feedback, other = map(json.loads, ran.stdout.splitlines())
    assert feedback.pop("timestamp_ms") > 0
    assert feedback == {
        **{"partition": 0, "offset": 0, "run": "monday", "producer": 0, "kind": "data", "epoch": 1},
        **{"is_copy": False, "records": shown},
    }
    assert (other["offset"], other["error"]) == (1, "not a feedback record of a loop: no header 'kind'")
    assert (ran.returncode, ran.stderr) == (0, "")


@pytest.mark.parametrize(
    ("run", "shown"), [(b"monday-the-23rd", "monday-the-23rd"), (b"0123456789abcdef" * 2, "01234567")]
)
def test_only_a_generated_name_of_a_run_is_shortened(tmp_path, run, shown):
    """The 32 digits of a run left no room for the records on a line, or a name that a user had given was cut."""
    asyncio.run(fed_back(tmp_path, [[1]], run))
    ran = streamiter("topics", "tail", EVENTS, "--feedback", cwd=tmp_path)
    assert re.fullmatch(rf"0:0 \S+Z run {shown} producer 0 data epoch 1 \[1\]\n", ran.stdout)


@pytest.mark.parametrize("options", [(), ("--json",)])
def test_tail_on_feedback_names_the_option_that_shows_it_once(tmp_path, options):
    """The records of a loop were shown as empty lines, and no message named the option that shows them."""
    asyncio.run(fed_back(tmp_path, [[1], [2]]))
    ran = streamiter("topics", "tail", EVENTS, *options, cwd=tmp_path)
    assert (ran.returncode, len(ran.stdout.splitlines())) == (0, 2)
    assert ran.stderr == "A loop feeds back through this topic: --feedback shows what.\n"
