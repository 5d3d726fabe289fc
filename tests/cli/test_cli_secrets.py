"""No command shows a secret: all that it prints, draws, counts and stores is searched for the given secrets."""

import asyncio
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import typer
from cli.program import streamiter

from streamiter.cli.app import app
from streamiter.models import ModelUpdateEncoder
from streamiter.topics import topic
from streamiter.values.helpers.clock import SystemClock

# Each secret contains this mark, so a mark in the output is a secret that was shown.
MARK = "S3cret"
SECRET = f"{MARK}-Horse"

FLOW = """
from streamiter import Checkpoints, Flow
from streamiter.topics import topic

clicks = topic("{url}")
dead = topic("{dead}", ssl_password="{secret}")
flow = Flow("{name}")
numbers = flow.source(clicks, stop="latest", name="read", dead_letter=dead)
numbers.map(lambda n: 6 // n, name="divide", parallelism=2, dead_letter=dead).sink(clicks.beside("{out}"))
"""

# URLs of a topic that exists, and URLs with an error at each place where an error is found.
PLACES = {
    "option": "kafka://{broker}/{topic}?ssl_password={secret}",
    "option with another secret": "kafka://{broker}/{topic}?ssl_password={secret}&client_id={secret}",
    "environment": "kafka://{broker}/{topic}?ssl_password_env=MARKED_PASSWORD",
    "file": "kafka://{broker}/{topic}?ssl_password_file=password.txt",
    "login that is not used": "kafka://{broker}/{topic}?sasl_username={secret}&sasl_password={secret}",
    "user": "kafka://alice:{secret}@{broker}/{topic}",
    "user with a slash": "kafka://alice:{secret}/{secret}@{broker}/{topic}",
    "user without a host": "kafka://alice:{secret}/{topic}",
    "user in another scheme": "amqp://alice:{secret}@{broker}/{topic}",
    "user of a file": "file://alice:{secret}@host/clicks.jsonl",
    "option of a database": "sqlite:///clicks.db?topic=clicks&password={secret}",
    "option of a file": "file:clicks.jsonl?password={secret}",
    "topic in memory": "memory://alice:{secret}@clicks",
    "misspelt": "kafka://{broker}/{topic}?sasl_pasword={secret}",
    "choice": "kafka://{broker}/{topic}?compression={secret}",
    "number": "kafka://{broker}/{topic}?give_up_after_s={secret}",
    "truth": "kafka://{broker}/{topic}?ssl_check_hostname={secret}",
    "file of authorities": "kafka://{broker}/{topic}?security_protocol=SSL&ssl_cafile={secret}",
    "file of a certificate": "kafka://{broker}/{topic}?security_protocol=SSL&ssl_certfile={secret}&ssl_keyfile={secret}",
    "name of a variable": "kafka://{broker}/{topic}?ssl_password_env={secret}",
    "name of a file": "kafka://{broker}/{topic}?ssl_password_file={secret}",
    "in two ways": "kafka://{broker}/{topic}?ssl_password={secret}&ssl_password_env=MARKED_PASSWORD",
    "without a name": "kafka://{broker}/{topic}?{secret}",
    "with an ampersand": "kafka://{broker}/{topic}?ssl_password=x&{secret}",
    "without a question mark": "kafka://{broker}/{topic}&sasl_password={secret}",
    "behind a hash": "kafka://{broker}/{topic}#sasl_password={secret}",
}

RIGHT = list(PLACES)[:5]
"""The places in a URL of a topic that can be read and written."""

# The arguments of each command on a URL.
URL_COMMANDS = {
    "topics create": ["{url}"],
    "topics list": ["{url}"],
    "topics produce": ["{url}", "lines.jsonl", "--create"],
    "topics tail": ["{url}"],
    "models tail": ["{url}", "--model", "ctr"],
    "models show": ["{url}", "--model", "ctr"],
    "models diff": ["{url}", "1.1", "--model", "ctr"],
    "models compare": ["{url}", "--model", "ctr"],
    "models export": ["{url}", "ctr.json", "--model", "ctr"],
    "models import": ["{url}", "ctr.json", "--model", "late"],
    "models promote": ["{url}", "ctr", "--model", "late", "--anyway"],
    "models rollback": ["{url}", "1.1", "--model", "ctr"],
    "serve": ["--init", "{url}"],
}

SERVICE = """
service.name = "s"
input = {{ topic = "{url}", dead_letter = "{url}" }}
publish.topic = "{url}"
learn = {{ kind = "regression", label = {{ field = "n" }} }}
http = {{ token_env = "{secret}", token_file = "{secret}", tls_key_password_env = "{secret}" }}
"""

# The calls of each other command, in this order: calls that use the flow above, and a wrong call with a URL.
OTHER_COMMANDS = {
    "draw": [["program.py:flow"], ["program.py:flow", "-o", "drawn.svg"], ["{url}"]],
    "run": [["program.py:flow", "--json"], ["program.py:flow", "--checkpoints", "checkpoints"], ["{url}:flow"]],
    "checkpoints list": [["checkpoints", "--json"], ["checkpoints", "{url}"]],
    "checkpoints show": [["checkpoints", "--json"], ["checkpoints"], ["checkpoints", "--flow", "{url}"]],
    "checkpoints verify": [["checkpoints"], ["checkpoints", "--checkpoint", "{url}"]],
    "checkpoints prune": [["checkpoints", "--json"], ["checkpoints", "--keep", "{url}"]],
    "demo": [["--flights", "{url}"], ["--labels", "{url}"]],
    "train": [["--config", "{url}"], ["--config", "network.json", "--data", "{url}"]],
    "replay": [["{url}"], ["network.json", "--version", "{url}"]],
    "predict": [["--model", "{url}", "--data", "{url}"]],
    "network show": [["{url}"]],
    "network draw": [["{url}"], ["network.json", "--format", "{url}"]],
    "network check": [["{url}"]],
}


def commands(command: Any, path: str = "") -> Iterator[str]:
    """Return the names of all commands below a command, as users type them."""
    below = getattr(command, "commands", None)
    if below is None:
        yield path
        return
    for name, each in below.items():
        yield from commands(each, f"{path} {name}".strip())


def test_every_command_is_searched_for_secrets() -> None:
    """A command was added, and its output was not searched for secrets."""
    assert sorted(commands(typer.main.get_command(app))) == sorted({**URL_COMMANDS, **OTHER_COMMANDS})


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the working directory, with a file of lines and a file with the secret; a variable has the secret, too."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MARKED_PASSWORD", SECRET)
    (tmp_path / "lines.jsonl").write_text("1\n0\nx\n")
    (tmp_path / "password.txt").write_text(f"{SECRET}\n")
    return tmp_path


def without_secret(shown: str) -> str:
    assert MARK not in shown, shown
    return shown


@pytest.fixture(scope="module")
def program() -> Any:
    """Return the program; for each call of ``app``, Typer would make all commands again: two thirds of the time."""
    return typer.main.get_command(app)


@pytest.fixture
def call(
    program: Any, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str]]:
    """Return a function that runs the program in this process, and returns its exit code and its output.

    With ``--debug`` an error is a traceback and then the message that users see without the option.
    """

    def calling(*arguments: str) -> tuple[int, str]:
        arguments = ("--debug", *arguments)
        monkeypatch.setattr(sys, "argv", ["streamiter", *arguments])
        with pytest.raises(SystemExit) as ended:
            program(args=list(arguments), prog_name="streamiter")
        printed = without_secret("".join(capfd.readouterr()))
        assert isinstance(ended.value.code, int)
        return ended.value.code, printed

    return calling


@pytest.mark.parametrize("place", PLACES)
def test_no_command_on_topics_shows_a_secret(
    place: str, folder: Path, kafka_broker, topic_prefix: str, call: Callable[..., tuple[int, str]]
) -> None:
    """`created kafka://…?ssl_password=…` was printed to the log of a setup script."""
    url = PLACES[place].format(broker=kafka_broker.bootstrap, topic=f"{topic_prefix}clicks", secret=SECRET)
    # All commands refuse a wrong URL in one way: each is tried with a third of them.
    first = 0 if place in RIGHT else list(PLACES).index(place)
    for command, arguments in list(URL_COMMANDS.items())[first % 3 :: 1 if place in RIGHT else 3]:
        given = [*command.split(), *(argument.format(url=url) for argument in arguments)]
        _, printed = call(*given)
        assert printed
    (folder / "given.toml").write_text(SERVICE.format(url=url, secret=SECRET))
    code, printed = call("serve", "--check", "given.toml")
    assert (code, "http.token_env: expected the name of an environment variable" in printed) == (1, True)


def test_no_command_on_models_shows_or_stores_a_secret(
    folder: Path, kafka_broker, topic_prefix: str, call: Callable[..., tuple[int, str]]
) -> None:
    """An exported model, or the record of a rollback, had the password of the topic that it came from."""
    url = f"kafka://{kafka_broker.bootstrap}/{topic_prefix}models?ssl_password={SECRET}"

    async def publish() -> None:
        updates = topic(url)
        await updates.create()
        writer = await updates.open_writer()
        encoder = ModelUpdateEncoder("ctr", 1, clock=SystemClock())
        await writer.write(encoder.encode([{"weights": np.array([0.5, number])} for number in range(2)]))
        await writer.close()

    asyncio.run(publish())
    on_models = {command: arguments for command, arguments in URL_COMMANDS.items() if command.startswith("models ")}
    assert list(on_models)[-1] == "models rollback"
    for command, arguments in [*on_models.items(), ("models tail", [*on_models["models tail"], "--json"])]:
        code, printed = call(*command.split(), *(argument.format(url=url) for argument in arguments))
        assert (code, "ctr" in printed or "weights" in printed) == (0, True), printed
    without_secret((folder / "ctr.json").read_text())


def test_no_command_on_flows_shows_or_stores_a_secret(
    folder: Path, kafka_broker, topic_prefix: str, call: Callable[..., tuple[int, str]]
) -> None:
    """A secret was stored in statistics, drawings, checkpoints or the headers of dead letters."""
    kafka, name = f"kafka://{kafka_broker.bootstrap}", topic_prefix
    url, dead = f"{kafka}/{name}clicks?ssl_password={SECRET}", f"{kafka}/{name}dead"
    for created in (url, dead, f"{kafka}/{name}out"):
        assert call("topics", "create", created)[0] == 0
    assert call("topics", "produce", url, "lines.jsonl")[0] == 0
    program = FLOW.format(url=url, dead=dead, secret=SECRET, name=f"{name}flow", out=f"{name}out")
    (folder / "program.py").write_text(program)
    (folder / "network.json").write_text("{}")
    for command, calls in OTHER_COMMANDS.items():
        for arguments in calls:
            given = [*command.split(), *(argument.format(url=url) for argument in arguments)]
            if "program.py:flow" in given:  # needs its own process, because it changes modules and signals
                ran = streamiter(*given, cwd=folder)
                code = ran.returncode
                without_secret(ran.stdout + ran.stderr)
            else:
                code, _ = call(*given)
            if code != 0:
                assert given[-len(arguments) :] != arguments
    letters = call("topics", "tail", dead, "--json")[1]
    assert letters.count(f'"{kafka}/{name}clicks') >= 2
    stored = [file for file in folder.rglob("*") if file.is_file() and "__pycache__" not in file.parts]
    assert {"drawn.svg"} < {file.name for file in stored}
    assert any("checkpoints" in file.parts for file in stored)
    for file in stored:
        if file.name not in ("program.py", "password.txt"):
            assert MARK.encode() not in file.read_bytes(), file


@pytest.mark.parametrize(
    "line", [f'clicks = topic("kafka://h/clicks?sasl_pasword={SECRET}")', f'flow.source("kafka://h/t?x={SECRET}")']
)
def test_an_error_in_the_user_s_program_does_not_show_its_url(folder: Path, line: str) -> None:
    """With `--debug`, Python showed the user's line with the URL in it."""
    program = f"from streamiter import Flow\nfrom streamiter.topics import topic\nflow = Flow('f')\n{line}\n"
    (folder / "program.py").write_text(program)
    ran = streamiter("--debug", "run", "program.py:flow", cwd=folder)
    assert ran.returncode == 1
    shown = without_secret(ran.stdout + ran.stderr)
    assert "Traceback" in shown
    assert "error: " in shown
