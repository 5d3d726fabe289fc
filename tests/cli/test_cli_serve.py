"""``streamiter serve`` writes a file for a topic on a real broker, checks it, and runs its service."""

import asyncio
import json
import re
import signal
import time
import urllib.error
import urllib.request
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from cli.program import started, streamiter, without
from support.kafka_server import KafkaServer, free_ports
from support.waiting import PATIENCE_S

from streamiter.topics import OutgoingBatch, topic

TRIPS = [
    {"event": "end", "trip": n - 5, "rain": n % 2 == 1, "at": 1_700_000_000 + 60 * n}
    if n % 2 and n > 5
    else {"event": "begin", "trip": n, "km": n % 7, "sky": ["wet", "dry"][n % 3 == 0], "at": 1_700_000_000 + 60 * n}
    for n in range(600)
]
TRIPS = [trip | {"rain": trip["trip"] % 3 > 0} if "rain" in trip else trip for trip in TRIPS]


@pytest.fixture
def trips(kafka_broker: KafkaServer, topic_prefix: str) -> str:
    """Return the URL of a topic with trips, of which the weather is known at the end."""

    async def write() -> str:
        target = topic(f"kafka://{kafka_broker.bootstrap}/{topic_prefix}trips")
        await target.create()
        writer = await target.open_writer()
        await writer.write(OutgoingBatch([json.dumps(trip).encode() for trip in TRIPS]))
        await writer.close()
        return target.url

    return asyncio.run(write())


def created(url: str, *ends: str) -> None:
    async def create() -> None:
        for end in ends:
            await topic(url + end).create()

    asyncio.run(create())


def answered(port: int, path: str, row: object = None) -> dict[str, Any]:
    """Return the answer of the service, once it is ready; the service may start in the meantime."""
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", headers={"content-type": "application/json"})
    until_s = time.monotonic() + PATIENCE_S
    while True:
        try:
            with urllib.request.urlopen(request, json.dumps(row).encode() if row else None) as answer:
                return json.loads(answer.read())
        except (OSError, urllib.error.HTTPError) as error:
            if time.monotonic() > until_s:
                raise AssertionError(getattr(error, "read", str)()) from error
            if isinstance(error, urllib.error.HTTPError):
                error.close()


def test_a_topic_becomes_a_service_in_three_commands(trips: str, tmp_path: Path) -> None:
    """A new user needed an afternoon, and the code of an example, to learn from a topic."""
    made = streamiter("serve", "--init", trips, cwd=tmp_path)
    assert (made.returncode, made.stderr) == (0, "")
    assert made.stdout.splitlines()[0] == f"Wrote service.toml from 600 records of {trips}. Read it, and correct it:"
    kept = "--setting cleanup.policy=compact --setting min.compaction.lag.ms=86400000"
    assert f"\n  streamiter topics create {trips}-model-updates {kept}" in made.stdout
    file = tmp_path / "service.toml"
    [port] = free_ports(1)
    file.write_text(file.read_text().replace("127.0.0.1:8080", f"127.0.0.1:{port}"))

    missing = streamiter("serve", "--check", cwd=tmp_path)
    assert (missing.returncode, missing.stdout) == (1, "")
    said = f"expected a topic that exists, given {trips}-dead-letters, which does not; streamiter topics create"
    assert re.search(rf"service\.toml:\d+: input\.dead_letter: {re.escape(said)}", missing.stderr)
    assert re.search(r"service\.toml:\d+: publish\.topic: expected a topic that exists", missing.stderr)

    created(trips, "-model-updates", "-dead-letters")
    checked = streamiter("serve", "--check", "service.toml", cwd=tmp_path)
    assert (checked.returncode, checked.stderr) == (
        0,
        "service.toml is right; start it with: streamiter serve service.toml\n",
    )
    found = dict(line.split("\t") for line in checked.stdout.splitlines())
    assert found["input.topic"] == f"{trips}: 1 partition, 600 records"
    assert re.fullmatch(r"297 labels in the newest 297 answers, \d\d\.\d% are true", found["learn.label"])
    assert found["learn.features"] == "2 fields: km, sky"

    with started("serve", "service.toml", cwd=tmp_path) as program:
        prediction = answered(port, "/predict", {"km": 3, "sky": "wet"})
        assert 0 < prediction["predictions"][0]["probability"] < 1
        file.write_text(file.read_text().replace('every = "1s"', "records = 7").replace('"number"', '"category"'))
        program.send_signal(signal.SIGHUP)
        assert program.stderr is not None
        changes = (json.loads(line)["message"] for line in program.stderr if "has changed" in line)
        assert list(islice(changes, 3)) == [
            "learn.features has changed in the file only: it applies after a restart, which resumes from the last "
            "checkpoint",
            "publish.every has changed",
            "publish.records has changed",
        ]
        program.send_signal(signal.SIGINT)
        assert program.wait(PATIENCE_S) == 0


def test_questions_and_answers_in_two_topics_become_a_service(trips: str, tmp_path: Path) -> None:
    """--init looked at one topic, and proposed that each question has its label."""
    questions, answers = trips + "-begins", trips + "-ends"

    async def divide() -> None:
        for url, kind in ((questions, "begin"), (answers, "end")):
            await topic(url).create()
            writer = await topic(url).open_writer()
            rows = [{name: trip[name] for name in trip if name != "event"} for trip in TRIPS if trip["event"] == kind]
            await writer.write(OutgoingBatch([json.dumps(row).encode() for row in rows]))
            await writer.close()

    asyncio.run(divide())
    made = streamiter("serve", "--init", questions, "--answers", answers, cwd=tmp_path)
    assert (made.returncode, made.stderr) == (0, "")
    assert made.stdout.startswith(f"Wrote service.toml from 600 records of {questions} and {answers}.")
    created(questions, "-model-updates", "-dead-letters")
    [port] = free_ports(1)
    file = tmp_path / "service.toml"
    file.write_text(file.read_text().replace("127.0.0.1:8080", f"127.0.0.1:{port}"))
    checked = streamiter("serve", "--check", cwd=tmp_path)
    assert f"input.answers\t{answers}: 1 partition, 297 records\n" in checked.stdout
    with started("serve", "service.toml", cwd=tmp_path) as program:
        prediction = answered(port, "/predict", {"km": 3, "sky": "wet"})
        assert 0 < prediction["predictions"][0]["probability"] < 1
        program.send_signal(signal.SIGINT)
        assert program.wait(PATIENCE_S) == 0


def test_a_file_that_does_not_fit_its_topic_is_told_with_lines(trips: str, tmp_path: Path) -> None:
    """A misspelt feature was missing in each row, and the model learned without it for months."""
    created(trips, "-updates")
    (tmp_path / "service.toml").write_text(f"""\
service.name = "trips"
input.topic = "{trips}"
publish.topic = "{trips}-updates"
[learn]
kind = "classification"
label = {{ event = "arrival", key = "trip", value = "rain" }}
[learn.features]
kms = "number"
sky = "number"
[http]
token_env = "NO_SUCH_VARIABLE"
tls_certificate = "service.toml"
tls_key = "service.toml"
""")
    checked = streamiter("serve", "--check", cwd=tmp_path)
    assert (checked.returncode, checked.stdout) == (1, "")
    *told, of_tls = checked.stderr.splitlines()
    assert told == [
        "error: service.toml: 5 errors",
        "service.toml:6: learn.label.event: expected such events among the newest, and the field 'event' has begin, "
        "end",
        "service.toml:7: learn.features: expected numbers in the field 'sky', as kinds= says, in a service features "
        "or kinds of [learn], given 'dry', a text that is no number; name another kind there, or convert it before "
        "(303 of 600 records)",
        "service.toml:8: learn.features.kms: expected a field of the newest records, given none; did you mean 'km'?",
        "service.toml:11: http.token_env: expected the environment variable NO_SUCH_VARIABLE to hold token "
        "(token_env), given none; set it",
    ]
    assert of_tls.startswith(
        "service.toml:12: http.tls_certificate: expected a certificate and its key in PEM "
        "(tls_certificate, tls_key), given service.toml and service.toml: "
    )


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (("nowhere.toml",), 1, "'nowhere.toml': expected a file of settings (TOML), given No such file or directory; "),
        (("--check", "--init", "kafka://h/t"), 2, "expected one of --check and --init, given both"),
        (("--init", "kafka://ann:hush@h/t"), 1, "--init: expected a URL without a user and a password"),
        (
            ("--init", "kafka://h/t?sasl_password=hush"),
            1,
            "write sasl_password_env=VARIABLE or sasl_password_file=FILE",
        ),
        (("--init", "memory://t"), 1, "memory"),
        (("--init", "file:trips.csv"), 1, "--init: expected a topic of events that come, given 'file:trips.csv'"),
        (("there.toml", "--init", "kafka://h/t"), 1, "--init: expected a new file, given 'there.toml', which exists"),
        (("there.toml",), 1, "there.toml:1: service.name: expected this key, given none; add it"),
    ],
)
def test_wrong_arguments_are_told(arguments: tuple[str, ...], code: int, said: str, tmp_path: Path) -> None:
    """A wrong path was a traceback, and a file with corrections was overwritten."""
    (tmp_path / "there.toml").write_text("[service]\n")
    ran = streamiter("serve", *arguments, cwd=tmp_path)
    assert (ran.returncode, ran.stdout) == (code, "")
    assert said in ran.stderr.replace("\n│", "").replace("│ ", "")
    assert "hush" not in ran.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["there.toml"]


def test_a_service_without_its_extra_says_how_to_install_it(tmp_path: Path) -> None:
    """A missing package was a traceback."""
    (tmp_path / "service.toml").write_text("""
service.name = "s"
input.topic = "sqlite:///x.db?topic=in"
publish.topic = "sqlite:///x.db?topic=out"
learn = { kind = "regression", label = { field = "delay" } }
""")
    ran = streamiter("serve", cwd=tmp_path, command=without("starlette"))
    assert (ran.returncode, ran.stdout) == (1, "")
    assert re.search("the service needs the package 'starlette.*'; install it with: pip install", ran.stderr)
