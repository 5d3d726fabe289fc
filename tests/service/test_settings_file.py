"""The file of a service is read as a whole, and each of its errors is told with its line and its remedy."""

import dataclasses
import json
import re
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import pytest
from support.examples import random_examples

from streamiter.errors import ConfigurationError
from streamiter.service.settings.features import embeddings_of
from streamiter.service.settings.field_comparison import FieldComparison
from streamiter.service.settings.file import TABLES, changed, read_settings
from streamiter.service.settings.tables import LabelSettings, ServiceSettings
from streamiter.values.settings import SettingsError, WrongValue

GOOD = """\
[service]
name = "late-flights"

[input]
topic = "kafka://127.0.0.1:9092/flights"
start = "earliest"
decoder = "json"
dead_letter = "kafka://127.0.0.1:9092/flights-dead-letters"

[learn]
kind = "classification" # comments, and "quotes" in them
label = { event = "arrival", key = "flight", value = "delay > 15", within = "36h" }
features = "all"
learner = "default"

[publish]
topic = 'kafka://127.0.0.1:9092/model-updates'
every = "1s"

[checkpoints]
store = "checkpoints"
interval = "1s"
keep = 3

[http]
address = "127.0.0.1:8080"
body_max = "1 MiB"
requests_max = 256
behind_proxy = false

[health]
stall_limit = "1min"

[log]
level = "info"
every = "30s"
"""


def refused(text: str) -> SettingsError:
    with pytest.raises(SettingsError) as caught:
        read_settings(text)
    return caught.value


def test_the_file_of_the_reference_is_read() -> None:
    """A service could not be described without code."""
    settings = read_settings(GOOD)
    assert settings.name == "late-flights"
    assert settings.learn.label == LabelSettings(
        FieldComparison("delay", ">", 15.0), event="arrival", key="flight", within_s=36 * 3600.0
    )
    assert settings.learn.features is None
    assert (settings.publish.every_s, settings.publish.records) == (1.0, None)
    assert (settings.http.body_bytes_max, settings.health.stall_limit_s) == (1 << 20, 60.0)


def test_a_short_file_has_defaults_and_records_replace_the_time() -> None:
    """Every key had to be given, or a version was published every second although records were asked for."""
    settings = read_settings(
        """
        service.name = "s"
        input.topic = "memory://in"
        learn = { kind = "regression", label = { field = "delay" }, features = { km = "number", id = "ignore" } }
        publish = { topic = "memory://out", records = 1000 }
        """
    )
    assert settings.http.is_loopback
    assert (settings.publish.every_s, settings.publish.records) == (None, 1000)
    assert settings.learn.features == {"km": "number", "id": "ignore"}
    assert settings.checkpoints.store == "checkpoints"
    # The label of the file is no feature, so to leave it out once more is no mistake.
    learn = {"kind": "regression", "label": {"field": "delay"}, "kinds": {"delay": "ignore"}}
    topics = {"input": {"topic": "memory://in"}, "publish": {"topic": "memory://out"}}
    assert read_settings({"service": {"name": "s"}, "learn": learn, **topics}).learn.features is None


# ---- every error, with its line


class Planted(NamedTuple):
    """A line of the good file, the line in its place, and the key and a part of the message that must be told."""

    line: str
    wrong: str
    key: str
    said: str


PLANTED = [
    Planted('name = "late-flights"', 'name = ""', "service.name", 'given ""'),
    Planted('name = "late-flights"', 'name = "a/b"', "service.name", "letters, digits, '.', '_' and '-', given"),
    Planted('name = "late-flights"', "name = 7", "service.name", "given 7; write it in quotes"),
    Planted('start = "earliest"', 'start = "earlyest"', "input.start", "did you mean 'earliest'?"),
    Planted('start = "earliest"', 'strat = "earliest"', "input.strat", "did you mean 'start'?"),
    Planted('start = "earliest"', "start = [1]", "input.start", "given the array [1]"),
    Planted('decoder = "json"', 'decoder = "avro"', "input.decoder", 'as "module:name", given "avro"'),
    Planted(
        'decoder = "json"', "xyzzy = 1979-05-27T07:32:00Z", "input.xyzzy", "the keys are topic, answers, start, decoder"
    ),
    Planted(
        'topic = "kafka://127.0.0.1:9092/flights"',
        'topic = "kafka://ann:hush@127.0.0.1:9092/flights"',
        "input.topic",
        "sasl_password_env=VARIABLE",
    ),
    Planted(
        'topic = "kafka://127.0.0.1:9092/flights"',
        'topic = "kafak://127.0.0.1:9092/flights"',
        "input.topic",
        "expected one of the schemes file://, kafka://",
    ),
    Planted(
        'topic = "kafka://127.0.0.1:9092/flights"',
        'topic = "kafka://127.0.0.1:9092"',
        "input.topic",
        "expected a topic, as in kafka://127.0.0.1:9092/clicks",
    ),
    Planted(
        "topic = 'kafka://127.0.0.1:9092/model-updates'",
        "topic = 'sqlite:///models.db'",
        "publish.topic",
        "topic 'sqlite:///models.db': expected ?topic=<name> after the path",
    ),
    Planted(
        'dead_letter = "kafka://127.0.0.1:9092/flights-dead-letters"',
        'dead_letter = "kafka://127.0.0.1:9092/x?sasl_usrname=hush"',
        "input.dead_letter",
        "unknown option 'sasl_usrname'; the options are",
    ),
    Planted(
        'dead_letter = "kafka://127.0.0.1:9092/flights-dead-letters"',
        'dead_letter = "kafka://127.0.0.1:9092/x?ssl_password=hush"',
        "input.dead_letter",
        "write ssl_password_env=VARIABLE or ssl_password_file=FILE",
    ),
    Planted(
        'dead_letter = "kafka://127.0.0.1:9092/flights-dead-letters"',
        "dead_letter = false",
        "input.dead_letter",
        "expected a text that is not empty, given false",
    ),
    Planted('kind = "classification"', 'kind = "clasification"', "learn.kind", "did you mean 'classification'?"),
    Planted(
        'label = { event = "arrival", key = "flight", value = "delay > 15", within = "36h" }',
        'label = { event = "arrival", key = "flight", value = "delay >> 15", within = "36h" }',
        "learn.label.value",
        'write "delay > 15"',
    ),
    Planted(
        'label = { event = "arrival", key = "flight", value = "delay > 15", within = "36h" }',
        'label = { event = "arrival", value = "delay > 15" }',
        "learn.label.key",
        "expected event and key together, given no key",
    ),
    Planted(
        'label = { event = "arrival", key = "flight", value = "delay > 15", within = "36h" }',
        'label = "late"',
        "learn.label",
        'expected a table, given "late"; write { field = "late" }',
    ),
    Planted(
        'label = { event = "arrival", key = "flight", value = "delay > 15", within = "36h" }',
        'label = { field = "late", within = 36 }',
        "learn.label.within",
        'write "36s"',
    ),
    Planted('features = "all"', 'features = { km = "numbr" }', "learn.features.km", "did you mean 'number'?"),
    Planted('features = "all"', "features = []", "learn.features", 'expected "all", or a table'),
    Planted('features = "all"', 'kinds = { km = "word" }', "learn.kinds.km", "did you mean 'words'?"),
    Planted('features = "all"', 'kinds = ["km"]', "learn.kinds", "a table with a kind for each field"),
    Planted('features = "all"', 'time_zone = "Mars"', "learn.time_zone", 'write "Europe/Berlin", or "UTC"'),
    Planted('learner = "default"', 'learner = "addam"', "learn.learner", "did you mean 'adam'?"),
    Planted('learner = "default"', "settings = { bits = 99 }", "learn.settings.bits", "from 1 to 28, given 99"),
    Planted(
        'learner = "default"', 'settings = { crosses = ["a"] }', "learn.settings.crosses", 'write [["carrier", "dest"]]'
    ),
    Planted('learner = "default"', 'settings = { loss = "huberr" }', "learn.settings.loss", "did you mean 'huber'?"),
    Planted('every = "1s"', "every = 1", "publish.every", 'given 1; write "1s"'),
    Planted('every = "1s"', 'every = "1 fortnight"', "publish.every", 'as "500ms", "1s", "5min", "36h" or "7d"'),
    Planted('every = "1s"', 'every = "1s"\nrecords = 5', "publish.records", "expected every or records, given both"),
    Planted('every = "1s"', "every = 1s", "", 'texts, times and sizes need quotes: "1s"'),
    Planted('interval = "1s"', 'interval = "0s"', "checkpoints.interval", "above 0"),
    Planted('interval = "1s"', "interval 1s", "", "expected TOML"),
    Planted("keep = 3", "keep = 0", "checkpoints.keep", "at least 1, given 0"),
    Planted("keep = 3", "keep = 3\nkeep = 4", "", "once, given this one again"),
    Planted('address = "127.0.0.1:8080"', 'address = "127.0.0.1"', "http.address", "expected an address with its port"),
    Planted('address = "127.0.0.1:8080"', 'address = "0.0.0.0:8080"', "http.address", "that others reach"),
    Planted('body_max = "1 MiB"', "body_max = 1048576", "http.body_max", "a size above 0 with its unit"),
    Planted(
        "requests_max = 256", 'tls_key = "key.pem"', "http.tls_key", "given no tls_certificate; leave it out, or add"
    ),
    Planted("requests_max = 256", 'token = "hush-hush"', "http.token", "write token_env or token_file"),
    Planted("requests_max = 256", 'token_env = "hush hush"', "http.token_env", "not shown"),
    Planted("behind_proxy = false", 'behind_proxy = "no"', "http.behind_proxy", "write it without quotes"),
    Planted("[health]", "[heatlh]", "heatlh", "did you mean 'health'?"),
    Planted('level = "info"', 'level = "loud"', "log.level", 'expected "debug", "info", "warning" or "error"'),
]


def planted_in(random: Random) -> tuple[str, list[tuple[int, Planted]]]:
    """Return a file with some errors, and the line of each, counted from 1."""
    chosen: dict[str, Planted] = {}
    for planted in random.choices(PLANTED, k=random.randint(1, 9)):
        chosen.setdefault(planted.line, planted)
    lines, expected = [], []
    for line in GOOD.splitlines():
        lines += [random.choice(["# a comment", "", "\t"])] * (random.random() < 0.1)
        bare, hash_mark, comment = line.partition(" #")
        planted_here = chosen.get(bare)
        lines += ((planted_here.wrong if planted_here else bare) + hash_mark + comment).split("\n")
        if planted_here:
            expected.append((len(lines), planted_here))
    return random.choice(["\n", "\r\n"]).join(lines), expected


@random_examples(planted_in)
def test_every_planted_error_is_told_with_its_line(
    example: tuple[str, list[tuple[int, Planted]]], tmp_path: Path
) -> None:
    """One error was told at a time, so that a file needed ten starts; or the line was that of another key."""
    text, expected = example
    error = refused(text.replace("\r\n", "\n"))
    for line, planted in expected:
        found = [(p.line, p.message) for p in error.problems if p.key == planted.key]
        assert any(at == line and planted.said in message for at, message in found), (line, planted, str(error))
    assert "hush" not in str(error)
    lines = [problem.line for problem in error.problems]
    assert lines == sorted(line for line in lines if line is not None)


CHARACTERS = "\"'[]{}=#.,\n\\ \t_-+:/0123456789aeinstz\0\u00e9\ud800"


def mutated(random: Random) -> str:
    """Return the good file with pieces that were deleted, doubled, moved or replaced."""
    text = GOOD
    for _ in range(random.randint(1, 6)):
        start = random.randrange(len(text) + 1)
        piece = text[start : start + random.choice([1, 1, 2, 8, 40])]
        given = random.choice(["", piece * 2, piece[::-1], "".join(random.choices(CHARACTERS, k=3)), "[" * 5, '"""'])
        text = text[:start] + given + text[start + len(piece) :]
    return text + "\n"


@random_examples(mutated)
def test_a_broken_file_never_ends_with_a_traceback(text: str) -> None:
    """A file that was cut in the middle of a line ended the service with a traceback of the parser."""
    try:
        settings = read_settings(text)
    except SettingsError as refusal:
        lines = [problem.line for problem in refusal.problems]
    else:
        assert isinstance(settings, ServiceSettings)
        return
    last = text.count("\n") + 1
    assert [line for line in lines if line is None or not 1 <= line <= last] == []
    assert lines


@pytest.mark.parametrize(
    "text", ["x = " + "[" * 100_000 + "\n", "x = " + "{a=" * 5_000 + "\n", "x = " + "9" * 5_000 + "\n", "\ufeff\n"]
)
def test_a_file_of_an_attacker_is_refused(text: str) -> None:
    """Deep brackets and long numbers raised errors that are no errors of TOML."""
    assert len(str(refused(text))) < 5_000


# ---- the texts


def test_the_text_of_several_errors() -> None:
    """The errors were one unreadable line; an editor could not jump to them."""
    text = GOOD.replace('every = "1s"', "every = 1s").replace('start = "earliest"', "start = 1")
    assert str(refused(text)) == (
        "settings: 2 errors\n"
        'settings:6: input.start: expected "earliest" or "latest", given 1; choose one of them\n'
        "settings:18: expected TOML, given a line that is none (expected newline or end of document after a "
        'statement); texts, times and sizes need quotes: "1s"'
    )


def test_each_wrong_value_is_refused_with_a_remedy() -> None:
    """An error said what was wrong, and not what to write; "0s" was told to add a unit."""
    remedies = {}
    for table, (_, keys) in TABLES.items():
        for name, key in keys.items():
            for value in (-1, 0, 2.5, True, "", "x y", "5", "0s", "5 sec", [], {}):
                try:
                    key.parse(value)
                except WrongValue as wrong:
                    remedies[table, name, str(value)] = wrong.remedy
    assert len(remedies) > 100
    assert [place for place, remedy in remedies.items() if not remedy] == []
    learner = 'learner = "sgd"\nfeatures = { km = "number" }\nsettings = { learning_rate = 0 }'
    [problem] = refused(GOOD.replace('features = "all"\nlearner = "default"', learner)).problems
    assert problem.message.endswith("given 0; leave it out for the default 0.5, or write another one")


def test_brackets_without_an_end_have_a_line() -> None:
    """A file that a program had written had an error somewhere, and all its keys were told as missing."""
    [problem] = refused('a = "]"\nservice.name = "x"\nb = [1, ' + "[" * 5_000 + "\n").problems
    assert problem.line == 3
    assert "given too many; remove brackets" in problem.message


def test_missing_keys_are_told_at_their_table(tmp_path: Path) -> None:
    """An empty table said KeyError."""
    file = tmp_path / "service.toml"
    file.write_text("[service]\n[input]\ntopic = 'memory://a'\n")
    with pytest.raises(SettingsError) as caught:
        read_settings(file)
    assert str(caught.value).replace(str(file), "service.toml").splitlines() == [
        "service.toml: 4 errors",
        "service.toml:1: service.name: expected this key, given none; add it",
        "service.toml:1: learn.kind: expected this key, given none; add it",
        "service.toml:1: learn.label: expected this key, given none; add it",
        "service.toml:1: publish.topic: expected this key, given none; add it",
    ]


def test_a_file_that_cannot_be_read_says_how_to_get_one(tmp_path: Path) -> None:
    """A wrong path ended with a traceback."""
    with pytest.raises(
        ConfigurationError, match=r"No such file or directory; streamiter serve .*service.toml --init URL"
    ):
        read_settings(tmp_path / "service.toml")
    (tmp_path / "latin.toml").write_bytes(b"[service]\nname = '\xe9'\n")
    with pytest.raises(ConfigurationError, match="in UTF-8, given other bytes in line 2"):
        read_settings(tmp_path / "latin.toml")
    with pytest.raises(ConfigurationError, match="Is a directory"):
        read_settings(tmp_path)


REMOTE = 'address = "0.0.0.0:8080"'


def test_the_topic_that_is_read_is_not_written() -> None:
    """A service learned from its own updates."""
    [problem] = refused(GOOD.replace("model-updates", "flights")).problems
    assert (problem.key, problem.line) == ("publish.topic", 17)


@pytest.mark.parametrize(
    "text", ["delay >> 15", "delay > '5'", "> 15", "delay > 15 and x < 3", "delay > 1_5", "a > １"]
)
def test_a_comparison_is_parsed_strictly(text: str) -> None:
    """A part of the expression was left out, so that the labels were wrong for months."""
    assert FieldComparison.of(text) is None


def test_a_comparison_refuses_a_value_of_another_type() -> None:
    """The text "20" was compared with the number 15 as a text, and no flight was late."""
    late = FieldComparison.of("delay > 15")
    assert late is not None
    assert late({"delay": "20"})
    with pytest.raises(ValueError, match="expected delay as in delay > 15, given 'many'"):
        late({"delay": "many"})


# ---- changes, documents


def test_changes_say_what_applies_at_once_and_what_needs_a_restart() -> None:
    """After a signal the service said that all is applied, and learned with the old features for weeks."""
    before = read_settings(GOOD)
    text = GOOD.replace('every = "1s"', "records = 50").replace('level = "info"', 'level = "debug"')
    text = text.replace('features = "all"', 'features = { km = "number" }').replace("late-flights", "later-flights")
    changes = {change.key: change.needs for change in changed(before, read_settings(text))}
    assert {key for key, needs in changes.items() if needs is None} == {"publish.every", "publish.records", "log.level"}
    assert re.search("another service", changes["service.name"] or "")
    assert re.search("after a restart", changes["learn.features"] or "")
    assert changed(before, dataclasses.replace(before, source="elsewhere")) == []
    others: list[Any] = [None, {"item": ["item"]}, {"item": ["item"], "each": 3}]
    negatives = [
        dataclasses.replace(before, learn=dataclasses.replace(before.learn, negatives=each)) for each in others
    ]
    assert re.search("new service.name", changed(*negatives[:2])[0].needs or "")
    assert re.search("resumes from the last checkpoint", changed(*negatives[1:])[0].needs or "")


PAGE = (Path(__file__).parents[2] / "docs" / "service.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("text", re.findall(r"```toml\n(.*?)```", PAGE, re.DOTALL))
def test_the_files_of_the_page_are_read(text: str) -> None:
    """A reader pasted a file of the page, and it had an error."""
    assert read_settings(text).name in ("late-flights", "clicks", "shop")


def test_the_file_of_a_network_says_the_kind_and_the_sizes_of_embeddings(tmp_path: Path) -> None:
    """Sizes of a file of Angel's form could not be used, or other keys beside it were left out without a word."""
    vectors = {"type": "Embedding", "name": "e", "numfactors": 4, "outputdim": 8}
    pairs = {"type": "BiInnerSumCross", "name": "pairs", "inputlayer": "e", "outputdim": 1}
    loss = {"type": "SimpleLossLayer", "name": "loss", "lossfunc": "logloss", "inputlayer": "pairs"}
    (file := tmp_path / "fm.json").write_text(json.dumps({"layers": [vectors, pairs, loss]}))
    text = f"""
service.name = "clicks"
input.topic = "memory://in"
publish.topic = "memory://out"
learn.kind = "classification"
learn.label = {{ field = "clicked" }}
learn.learner = "network"
learn.settings = {{ network = "{file}" }}
"""
    embeddings = embeddings_of(read_settings(text).learn)
    assert embeddings is not None
    assert (embeddings.kind, embeddings.factors) == ("fm", 4)
    with pytest.raises(SettingsError) as both:
        read_settings(text.replace("network =", 'kind = "deepfm", network ='))
    assert "network without kind, which the file says" in str(both.value)
    with pytest.raises(SettingsError) as missing:
        read_settings(text.replace("fm.json", "fn.json"))
    assert "learn.settings.network: expected the file of a network, given" in str(missing.value)


def test_the_page_has_every_key_with_its_default() -> None:
    """A key could be found in the code only, or the page had a default of long ago."""
    told: dict[str, str] = {}
    for keys, default in re.findall(r"^\| (`\w+\.\w+`(?:, `\w+\.\w+`)*) \| (.*?) \|", PAGE, re.MULTILINE):
        told = dict.fromkeys(re.findall(r"`(.*?)`", keys), default.strip("`")) | told
    assert sorted(told) == sorted(f"{table}.{key}" for table, (_, keys) in TABLES.items() for key in keys)
    needed = {"service.name", "input.topic", "learn.kind", "learn.label", "publish.topic"}
    assert {key for key, default in told.items() if default == "needed"} == needed
    given = {key: default for key, default in told.items() if default not in ("needed", "none")}
    lines = [f"{key} = {default}" for key, default in given.items()]
    # The other keys of [predictions] and [challenger] need a log, and a file.
    other = 'service = {name = "b"}, input = {topic = "memory://in"}, publish = {topic = "memory://out"}'
    needed_lines = f"""
service.name = "s"
input.topic = "memory://in"
publish.topic = "memory://out"
predictions.log = "memory://log"
learn.kind = "regression"
learn.label = {{ field = "delay" }}
challenger.file = {{ {other}, learn = {{ kind = "regression", label = {{ field = "delay" }} }} }}
"""
    defaults = read_settings(needed_lines)
    assert changed(defaults, read_settings(needed_lines + "\n".join(lines))) == []
