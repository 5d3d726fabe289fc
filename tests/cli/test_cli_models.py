"""`streamiter models`: tail and show."""

import json
import re
import signal

import numpy as np
import pytest
from cli.program import on_terminal, started, streamiter

from streamiter.clock import SystemClock
from streamiter.models import ModelSnapshot, ModelUpdateEncoder
from streamiter.topics import topic

UPDATES = "sqlite:///models.db?topic=updates"


async def published(folder, *, model="ctr", generation=1, versions, first=1):
    """Publish versions of a model to a topic in that folder."""
    target = topic(f"sqlite:///{folder}/models.db?topic=updates")
    await target.create()
    encoder = ModelUpdateEncoder(model, generation, first, clock=SystemClock())
    models = [
        ModelSnapshot({"weights": np.array([0.5, number])}, records=1000 * number, metrics={"loss": 0.25})
        for number in range(first, first + versions)
    ]
    writer = await target.open_writer()
    await writer.write(encoder.encode(models))
    await writer.close()


async def test_the_last_updates_are_a_line_each(tmp_path):
    """Version, how much was learned, how good it is and how old: what tells whether training goes well."""
    await published(tmp_path, versions=12)
    lines = streamiter("models", "tail", UPDATES, "--model", "ctr", cwd=tmp_path).stdout.splitlines()
    assert len(lines) == 10
    assert re.fullmatch(r"ctr 1\.3  records 3,000  loss 0\.2500  age \d+(\.\d)? (ms|s)", lines[0])
    last = streamiter("models", "tail", UPDATES, "-m", "ctr", "-n", "1", cwd=tmp_path).stdout
    assert last.startswith("ctr 1.12  records 12,000  ")


async def test_updates_are_found_behind_those_of_other_models(tmp_path):
    """Models may share a topic; the last records need not be of the one that is asked for."""
    await published(tmp_path, versions=3)
    await published(tmp_path, model="other", versions=50)
    lines = streamiter("models", "tail", UPDATES, "-m", "ctr", "-n", "2", cwd=tmp_path).stdout.splitlines()
    assert [line.split()[1] for line in lines] == ["1.2", "1.3"]


async def test_following_shows_each_update_once_also_across_runs(tmp_path):
    """A new run of the trainer is a new generation; Ctrl-C is the regular end."""
    await published(tmp_path, versions=2)
    with started("models", "tail", UPDATES, "-m", "ctr", "-f", cwd=tmp_path) as program:
        assert [program.stdout.readline().split()[1] for _ in range(2)] == ["1.1", "1.2"]
        await published(tmp_path, versions=1, first=3)
        assert program.stdout.readline().split()[1] == "1.3"
        await published(tmp_path, versions=1, generation=2)
        assert program.stdout.readline().split()[1] == "2.1"
        program.send_signal(signal.SIGINT)
        assert program.communicate(timeout=60) == ("", "")
        assert program.returncode == 0


async def test_following_waits_for_a_first_update(tmp_path):
    """The consumer may be started before the trainer."""
    await topic(f"sqlite:///{tmp_path}/models.db?topic=updates").create()
    with started("models", "tail", UPDATES, "-m", "ctr", "-f", cwd=tmp_path) as program:
        await published(tmp_path, versions=1)
        assert program.stdout.readline().startswith("ctr 1.1  ")


async def test_json_has_the_parameters_too(tmp_path):
    """For programs in other languages."""
    await published(tmp_path, versions=2)
    ran = streamiter("models", "tail", UPDATES, "-m", "ctr", "--json", cwd=tmp_path)
    updates = [json.loads(line) for line in ran.stdout.splitlines()]
    assert [update["version"] for update in updates] == [1, 2]
    assert updates[1]["parameters"] == {"weights": [0.5, 2.0]}
    shown = streamiter("models", "show", UPDATES, "-m", "ctr", "--json", cwd=tmp_path).stdout
    assert json.loads(shown) == updates[1]


async def test_the_newest_state_is_shown(tmp_path):
    """In a pipe name and value with a tab between, on a terminal as a table."""
    await published(tmp_path, versions=2)
    lines = streamiter("models", "show", UPDATES, "-m", "ctr", cwd=tmp_path).stdout.splitlines()
    fields = dict(line.split("\t") for line in lines)
    assert fields.pop("age").split()[1] in ("ms", "s")
    assert fields == {
        "model": "ctr",
        "generation": "1",
        "version": "2",
        "records": "2,000",
        "loss": "0.25",
        "weights": "float64[2] 0.5 2",
    }
    code, printed = on_terminal("models", "show", UPDATES, "-m", "ctr", cwd=tmp_path, width=40)
    assert code == 0
    assert "float64[2] 0.5 2" in printed


@pytest.mark.parametrize("command", ["tail", "show"])
async def test_a_model_that_is_not_there_is_an_error_that_names_those_that_are(tmp_path, command):
    """A misspelt name would wait for ever, or show nothing."""
    await published(tmp_path, versions=1)
    ran = streamiter("models", command, UPDATES, "-m", "crt", cwd=tmp_path)
    assert (ran.returncode, ran.stdout) == (1, "")
    assert ran.stderr == f"error: {UPDATES}: expected updates of model 'crt', given only of ctr\n"


@pytest.mark.parametrize("command", ["tail", "show"])
def test_a_topic_that_is_not_there_is_an_error(tmp_path, command):
    """Nothing is made by looking."""
    ran = streamiter("models", command, UPDATES, "-m", "ctr", cwd=tmp_path)
    assert (ran.returncode, ran.stdout) == (1, "")
    assert ran.stderr.startswith("error: no topic 'updates': ")
    assert list(tmp_path.iterdir()) == []
