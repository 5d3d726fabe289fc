"""`streamiter models` shows, compares, keeps and imports published models, and rolls back."""

import json
import re
import signal

import numpy as np
import orjson
import pytest
from cli.program import on_terminal, started, streamiter
from models.embedding_cases import embedded
from models.shape_cases import shaped
from support.waiting import PATIENCE_S
from topics.topic_case import write

from streamiter.errors import ModelError
from streamiter.learn import AdaptiveLinearModel
from streamiter.models import LinearPredictor, ModelSnapshot, ModelUpdateEncoder, last_update, read_model
from streamiter.topics import topic
from streamiter.values.helpers.clock import SystemClock

UPDATES = "sqlite:///models.db?topic=updates"


async def published(folder, *, model="ctr", generation=1, versions, first=1):
    """Publish versions of a model to a topic in a folder."""
    models = [
        ModelSnapshot({"weights": np.array([0.5, number])}, records=1000 * number, metrics={"loss": 0.25})
        for number in range(first, first + versions)
    ]
    await published_as_given(folder, models, ModelUpdateEncoder(model, generation, first, clock=SystemClock()))


async def published_as_given(folder, models, encoder=None):
    """Publish the given models to a topic in a folder."""
    target = topic(f"sqlite:///{folder}/models.db?topic=updates")
    await target.create()
    await write(target, (encoder or ModelUpdateEncoder("ctr", 1, clock=SystemClock())).encode(models))


async def test_the_last_updates_are_a_line_each(tmp_path):
    """Users could not see whether the training works: the version, the records, the loss and the age of each update."""
    await published(tmp_path, versions=12)
    lines = streamiter("models", "tail", UPDATES, "--model", "ctr", cwd=tmp_path).stdout.splitlines()
    assert len(lines) == 10
    assert re.fullmatch(r"ctr 1\.3  records 3,000  loss 0\.2500  age \d+(\.\d)? (ms|s)", lines[0])
    last = streamiter("models", "tail", UPDATES, "-m", "ctr", "-n", "1", cwd=tmp_path).stdout
    assert last.startswith("ctr 1.12  records 12,000  ")


async def test_updates_are_found_behind_those_of_other_models(tmp_path):
    """Updates were not found, because the last records of the topic were those of another model."""
    await published(tmp_path, versions=3)
    await published(tmp_path, model="other", versions=50)
    lines = streamiter("models", "tail", UPDATES, "-m", "ctr", "-n", "2", cwd=tmp_path).stdout.splitlines()
    assert [line.split()[1] for line in lines] == ["1.2", "1.3"]


async def test_following_shows_each_update_once_also_across_runs(tmp_path):
    """Updates of a new run of the trainer were not shown, or were shown twice."""
    await published(tmp_path, versions=2)
    with started("models", "tail", UPDATES, "-m", "ctr", "-f", cwd=tmp_path) as program:
        assert [program.stdout.readline().split()[1] for _ in range(2)] == ["1.1", "1.2"]
        await published(tmp_path, versions=1, first=3)
        assert program.stdout.readline().split()[1] == "1.3"
        await published(tmp_path, versions=1, generation=2)
        assert program.stdout.readline().split()[1] == "2.1"
        program.send_signal(signal.SIGINT)
        assert program.communicate(timeout=PATIENCE_S) == ("", "")
        assert program.returncode == 0


async def test_following_waits_for_a_first_update(tmp_path):
    """A consumer that was started before the trainer ended at once."""
    await topic(f"sqlite:///{tmp_path}/models.db?topic=updates").create()
    with started("models", "tail", UPDATES, "-m", "ctr", "-f", cwd=tmp_path) as program:
        await published(tmp_path, versions=1)
        assert program.stdout.readline().startswith("ctr 1.1  ")


async def test_json_has_the_parameters_too(tmp_path):
    """Programs in other languages did not get the parameters."""
    await published(tmp_path, versions=2)
    ran = streamiter("models", "tail", UPDATES, "-m", "ctr", "--json", cwd=tmp_path)
    updates = [json.loads(line) for line in ran.stdout.splitlines()]
    assert [update["version"] for update in updates] == [1, 2]
    assert updates[1]["parameters"] == {"weights": [0.5, 2.0]}
    shown = streamiter("models", "show", UPDATES, "-m", "ctr", "--json", cwd=tmp_path).stdout
    assert json.loads(shown) == updates[1]


async def test_the_newest_state_is_shown(tmp_path):
    """A script could not separate names and values, and the table was unreadable on a terminal."""
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


async def test_the_effects_of_a_model_with_tables_are_shown(tmp_path):
    """A line of all tables filled ten screens, and did not say which field matters."""
    await published_as_given(tmp_path, [shaped("logit")])
    lines = streamiter("models", "show", UPDATES, "-m", "ctr", cwd=tmp_path).stdout.splitlines()
    fields = dict(line.split("\t") for line in lines)
    assert re.fullmatch(r"\d\.\d+  [▁-█]+  -?\d\.\d+ \(.+\) to -?\d\.\d+ \(.+\)", fields["effect of km"])
    assert float(fields["effect of km × load"]) > 0
    assert max(map(len, lines)) < 250


async def test_parameters_of_another_model_are_shown_whatever_their_names(tmp_path):
    """A network with a parameter named as a part of the default learner's models ended the command with a KeyError."""
    await published_as_given(tmp_path, [{"embeddings": {"user": np.zeros((2, 3))}, "shapes": np.array([2, 3])}])
    lines = streamiter("models", "show", UPDATES, "-m", "ctr", cwd=tmp_path).stdout.splitlines()
    fields = dict(line.split("\t") for line in lines)
    assert fields["embeddings"].startswith("{user: float64[2, 3] 0 0")
    assert fields["shapes"] == "int64[2] 2 3"


async def test_embeddings_are_shown_in_one_line(tmp_path):
    """The keys of a million features filled the terminal."""
    await published_as_given(tmp_path, [embedded("logit")])
    lines = streamiter("models", "show", UPDATES, "-m", "ctr", cwd=tmp_path).stdout.splitlines()
    fields = dict(line.split("\t") for line in lines)
    assert fields["embeddings"] == "deepfm, 3 factors, 7 features of 4 fields, 5 of them with a vector, share 0.7"


@pytest.mark.parametrize("command", ["tail", "show"])
async def test_a_missing_model_is_an_error_that_names_the_existing_models(tmp_path, command):
    """The program waited for ever, or showed nothing, because the model's name was misspelt."""
    await published(tmp_path, versions=1)
    ran = streamiter("models", command, UPDATES, "-m", "crt", cwd=tmp_path)
    assert (ran.returncode, ran.stdout) == (1, "")
    assert ran.stderr == f"error: {UPDATES}: expected updates of model 'crt', given only of ctr\n"


OF_EVERY_KIND = {
    "text": np.array([["late", "on time"]]),
    "bytes": b"\x00\xff",
    "no axes": np.array(3.0),
    "text without axes": np.array("late"),
    "single": np.float32(0.5),
    "half": np.array([0.5, 1.5], dtype=np.float16),
    "flags": np.array([True, False]),
    "columns first": np.asfortranarray([[1.0, 2.0], [3.0, 4.0]]),
    "none": np.zeros((0, 3)),
    "large": np.array([2**64 - 1], dtype=np.uint64),
    "tuple": (1, None, [np.array("late"), {"bytes": b""}]),
    "version": "two\nlines",
    "markup": "[/b] :smile:",
    "numbers": np.arange(8),
}


@pytest.mark.parametrize("form", ["json", "safetensors"])
@pytest.mark.parametrize("command", ["tail", "show"])
async def test_json_has_parameters_of_every_kind(tmp_path, command, form):
    """Labels kept as text, or a single number, ended in an unexpected error that asked to be reported."""
    encoder = ModelUpdateEncoder("ctr", 1, clock=SystemClock(), format=form)
    await published_as_given(tmp_path, [OF_EVERY_KIND], encoder)
    ran = streamiter("models", command, UPDATES, "-m", "ctr", "--json", cwd=tmp_path)
    assert (ran.returncode, ran.stderr) == (0, "")
    assert json.loads(ran.stdout)["parameters"] == {
        "text": [["late", "on time"]],
        "bytes": {"bytes": "AP8="},
        "no axes": 3.0,
        "text without axes": "late",
        "single": 0.5,
        "half": [0.5, 1.5],
        "flags": [True, False],
        "columns first": [[1.0, 2.0], [3.0, 4.0]],
        "none": [],
        "large": [2**64 - 1],
        "tuple": [1, None, ["late", {"bytes": {"bytes": ""}}]],
        "version": "two\nlines",
        "markup": "[/b] :smile:",
        "numbers": [0, 1, 2, 3, 4, 5, 6, 7],
    }


@pytest.mark.parametrize("command", ["tail", "show"])
async def test_json_has_a_model_that_is_one_number(tmp_path, command):
    """A published ``np.float64`` could not be shown, because it becomes an array without axes."""
    await published_as_given(tmp_path, [np.float64(3)])
    ran = streamiter("models", command, UPDATES, "-m", "ctr", "--json", cwd=tmp_path)
    assert (ran.returncode, ran.stderr) == (0, "")
    assert json.loads(ran.stdout)["parameters"] == 3.0


async def test_parameters_of_every_kind_are_a_line_each(tmp_path):
    """A parameter with the name of a model's own field hid it, and line breaks or markup broke the table."""
    await published_as_given(tmp_path, [OF_EVERY_KIND])
    lines = streamiter("models", "show", UPDATES, "-m", "ctr", cwd=tmp_path).stdout.splitlines()
    assert [tuple(line.split("\t")) for line in lines if not line.startswith("age\t")] == [
        ("model", "ctr"),
        ("generation", "1"),
        ("version", "1"),
        ("text", "text[1, 2] 'late' 'on time'"),
        ("bytes", "2 bytes"),
        ("no axes", "float64[] 3"),
        ("text without axes", "text[] 'late'"),
        ("single", "0.5"),
        ("half", "float16[2] 0.5 1.5"),
        ("flags", "bool[2] 1 0"),
        ("columns first", "float64[2, 2] 1 2 3 4"),
        ("none", "float64[0, 3]"),
        ("large", "uint64[1] 1.845e+19"),
        ("tuple", "[1, None, [text[] 'late', {bytes: 0 bytes}]]"),
        ("version", r"'two\nlines'"),
        ("markup", "[/b] :smile:"),
        ("numbers", "int64[8] 0 1 2 3 4 5 …"),
    ]
    code, printed = on_terminal("models", "show", UPDATES, "-m", "ctr", cwd=tmp_path, width=80)
    assert code == 0
    assert "[/b] :smile:" in printed


async def test_a_count_of_zero_prints_no_update(tmp_path):
    """With a count of 0, an error expected updates of the model and said that only updates of this model were given."""
    await published(tmp_path, versions=2)
    ran = streamiter("models", "tail", UPDATES, "-m", "ctr", "-n", "0", cwd=tmp_path)
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "", "")
    ran = streamiter("models", "tail", UPDATES, "-m", "crt", "-n", "0", cwd=tmp_path)
    assert (ran.returncode, ran.stdout) == (1, "")
    assert ran.stderr.endswith("expected updates of model 'crt', given only of ctr\n")


# -- diff, compare, export, rollback


async def test_two_versions_are_compared(tmp_path):
    """To see what changed, one compared two JSON documents of thousands of weights by hand."""
    await published(tmp_path, versions=3)
    printed = streamiter("models", "diff", UPDATES, "1.1", "-m", "ctr", cwd=tmp_path).stdout
    lines = [line.split("\t") for line in printed.splitlines()]
    assert lines == [
        ["records", "1,000", "3,000", ""],
        ["loss", "0.25", "0.25", ""],
        ["intercept", "0", "0", ""],
        ["weights[1]", "1", "3", "2"],
    ]
    given = json.loads(streamiter("models", "diff", UPDATES, "1.1", "1.2", "-m", "ctr", "--json", cwd=tmp_path).stdout)
    assert (given["new"]["version"], given["weights"][0]["new"]) == (2, 2.0)
    code, shown = on_terminal("models", "diff", UPDATES, "1", "-m", "ctr", cwd=tmp_path, width=60)
    assert code == 0
    assert "1.3" in shown


async def test_texts_that_moved_have_their_names(tmp_path):
    """After a wrong day the weight of "place 141" had moved, and no one knew which town that is."""
    model, versions = AdaptiveLinearModel(bits=12, kinds={"hour": "category"}), []
    rows = [{"town": ("Rome", "Oslo")[n % 2], "hour": n % 5, "km": float(n % 7)} for n in range(200)]
    for late in (lambda row: row["town"] == "Rome", lambda row: row["town"] != "Rome" and row["km"] > 2):
        model.learn(rows, [late(row) for row in rows])
        versions.append(ModelSnapshot(model.parameters(), 200))
    await published_as_given(tmp_path, versions)
    events = topic(f"sqlite:///{tmp_path}/models.db?topic=events")
    await events.create()
    await write(events, [b"{", b"3", *map(orjson.dumps, rows)])
    command = ("models", "diff", UPDATES, "1.1", "-m", "ctr")
    without = streamiter(*command, cwd=tmp_path)
    assert "--records URL names" in without.stderr
    assert "place " in without.stdout
    told = streamiter(*command, "--records", "sqlite:///models.db?topic=events", cwd=tmp_path)
    names = {line.split("\t")[0] for line in told.stdout.splitlines()}
    assert told.stderr == ""
    assert {"town = Rome", "town = Oslo", "hour = 4", "km"} <= names
    assert "place " not in told.stdout


async def test_champion_and_challenger_are_compared(tmp_path):
    """Two models in one topic were compared by looking at two terminals."""
    await published(tmp_path, versions=2)
    await published(tmp_path, model="challenger", versions=1)
    command = ["models", "compare", UPDATES, "-m", "ctr", "-m", "challenger"]
    lines = [line.split("\t") for line in streamiter(*command, cwd=tmp_path).stdout.splitlines()]
    assert lines[0] == ["", "ctr 1.2", "challenger 1.1"]
    assert lines[2:] == [["records", "2,000", "1,000"], ["loss", "0.25", "0.25"]]
    given = json.loads(streamiter(*command, "--json", cwd=tmp_path).stdout)
    assert [version["model"] for version in given["versions"]] == ["ctr", "challenger"]
    assert given["metrics"]["records"] == [2000, 1000]
    one = streamiter("models", "compare", UPDATES, "-m", "ctr", "--version", "1.1", "--version", "1", cwd=tmp_path)
    assert one.stdout.splitlines()[0] == "\tctr 1.1\tctr 1.2"


@pytest.mark.parametrize("suffix", ["json", "safetensors"])
async def test_a_version_is_kept_as_a_file_to_predict_with(tmp_path, suffix):
    """The model of last year was gone with the topic's retention."""
    await published(tmp_path, versions=3)
    file = tmp_path / f"kept.{suffix}"
    ran = streamiter("models", "export", UPDATES, str(file), "-m", "ctr", "--version", "1.2", cwd=tmp_path)
    assert ran.stdout.startswith(f"Wrote ctr 1.2 to {file}.")
    kept = read_model(file)
    assert (kept.rank, kept.records, kept.metrics) == ((1, 2), 2000, {"loss": 0.25})
    assert kept.created_at_ms > 1_700_000_000_000
    assert LinearPredictor(kept.parameters)([1.0, 2.0]) == 4.5
    file.write_bytes(b"no model")
    with pytest.raises(ModelError) as refused:
        read_model(file)
    assert str(refused.value).startswith(f"{file}: expected a model of `streamiter models export`: ")


async def test_a_file_becomes_the_newest_version(tmp_path):
    """A model was brought to another cluster with a script, and the trainer there replaced it a second later."""
    model = AdaptiveLinearModel()
    model.learn([{"km": float(n % 7)} for n in range(50)], [n % 7 > 3 for n in range(50)])
    snapshots = [ModelSnapshot(model.parameters(state=state), records=50) for state in (True, False)]
    await published_as_given(tmp_path, snapshots)
    await published(tmp_path, model="there", versions=2)
    for version, told in (
        ("1.1", "with the state of its learner"),
        ("1.2", "without a state, so learning rates start"),
    ):
        generation = int(version[-1]) + 1
        streamiter("models", "export", UPDATES, "kept.safetensors", "-m", "ctr", "--version", version, cwd=tmp_path)
        ran = streamiter("models", "import", UPDATES, "kept.safetensors", "-m", "there", cwd=tmp_path)
        assert f"ctr {version} of kept.safetensors is now there {generation}.1, {told}" in ran.stdout
        found = await last_update(topic(f"sqlite:///{tmp_path}/models.db?topic=updates"), "there")
        assert (found.rank, found.since_rollback, found.rollback_to) == ((generation, 1), (generation, 1), None)
        assert (found.records, found.has_state) == (50, version == "1.1")
    for name, reason in (
        ("none.json", "No such file"),
        ("models.db", "expected a model of `streamiter models export`"),
    ):
        ran = streamiter("models", "import", UPDATES, name, "-m", "there", cwd=tmp_path)
        assert ran.returncode == 1
        assert reason in ran.stderr


async def test_a_file_of_another_kind_is_refused(tmp_path):
    """A model was written as JSON into a file called .npz, which numpy could not read."""
    await published(tmp_path, versions=1)
    ran = streamiter("models", "export", UPDATES, "ctr.npz", "-m", "ctr", cwd=tmp_path)
    assert ran.returncode != 0
    assert "FILE: expected a name that ends in .json or .safetensors, given ctr.npz" in ran.stderr
    assert not (tmp_path / "ctr.npz").exists()


async def test_a_rollback_is_the_newest_version(tmp_path):
    """After an incident one wrote the old parameters into the topic with a script, with a version of yesterday."""
    await published(tmp_path, versions=3)
    ran = streamiter("models", "rollback", UPDATES, "1.1", "--model", "ctr", cwd=tmp_path)
    assert ran.stdout == "ctr 1.1 is now also 2.1, the newest version.\n"
    told = streamiter("models", "tail", UPDATES, "-m", "ctr", "-n", "1", cwd=tmp_path).stdout
    assert told.startswith("ctr 2.1  records 1,000  loss 0.2500  rollback to 1.1  age ")
    assert "rollback to\t1.1\n" in streamiter("models", "show", UPDATES, "-m", "ctr", cwd=tmp_path).stdout
    shown = json.loads(streamiter("models", "show", UPDATES, "-m", "ctr", "--json", cwd=tmp_path).stdout)
    assert (shown["generation"], shown["rollback_to"], shown["parameters"]["weights"]) == (2, [1, 1], [0.5, 1.0])
    ran = streamiter("models", "rollback", UPDATES, "7.1", "--model", "ctr", cwd=tmp_path)
    assert ran.returncode == 1
    assert "expected version 7.1 of model 'ctr', given those from 1.1 to 2.1" in ran.stderr
