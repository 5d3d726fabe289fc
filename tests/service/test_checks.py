"""``streamiter serve --check`` compares a file with the topics and files that it names."""

from pathlib import Path
from typing import Any

import orjson
import pytest
from support.certificates import Authority
from support.kafka_server import free_ports

from streamiter.service import OnlineLearningService
from streamiter.service.checks import Findings, SettingsCheck
from streamiter.service.settings.file import read_document
from streamiter.topics import OutgoingBatch, topic
from streamiter.values.settings import SettingsError

FILE = """\
service.name = "s"
input.topic = "{url}"{answers}
publish.topic = "{url}-updates"
checkpoints.store = "{folder}"
[learn]
kind = "classification"
label = {label}
features = {features}
"""


class Case:
    """A topic in a file of the folder, and settings for it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.url = f"sqlite:///{folder}/data.db?topic=events"

    async def write(self, *values: object) -> None:
        for end in ("", "-updates"):
            await topic(self.url + end).create()
        writer = await topic(self.url).open_writer()
        await writer.write(OutgoingBatch([each if isinstance(each, bytes) else orjson.dumps(each) for each in values]))
        await writer.close()

    async def found(
        self, label: str = '{ field = "late" }', features: str = '"all"', more: str = "", **changes: Any
    ) -> Findings:
        given = {"url": self.url, "folder": self.folder / "checkpoints", "label": label, "features": features}
        given |= {"answers": "", **changes}
        return await SettingsCheck(*read_document(FILE.format(**given) + more)).run()

    async def refused(self, **given: Any) -> list[str]:
        with pytest.raises(SettingsError) as caught:
            await self.found(**given)
        return [problem.shown("f") for problem in caught.value.problems]


@pytest.fixture
def case(tmp_path: Path) -> Case:
    return Case(tmp_path)


async def test_what_fits_is_told_with_figures(case: Case) -> None:
    """A check said "ok", and half of the records had no label."""
    rows = [{"late": n % 4 == 0, "km": n, "sky": "dry"} for n in range(40)]
    await case.write(*rows, {"km": 3, "sky": "dry"}, b"{", {"late": "x", "km": 1, "sky": "dry"})
    assert await case.found() == {
        "checkpoints.store": f"{case.folder}/checkpoints will be made",
        "http.address": "http://127.0.0.1:8080",
        "input.decoder": "1 of the newest 43 records cannot be read",
        "input.topic": f"{case.url}: 1 partition, 43 records",
        "learn.features": "2 fields: km, sky",
        "learn.label": "40 labels in the newest 42 records; 2 have none (no field 'late'), 25.0% are true",
        "publish.topic": f"{case.url}-updates: 1 partition, 0 records",
    }


async def test_a_topic_that_keeps_versions_for_too_short_a_time_is_told(
    case: Case, caplog: pytest.LogCaptureFixture
) -> None:
    """The page of operations told to roll back to yesterday's version, which the topic had deleted at noon."""
    await case.write({"late": True, "km": 1})
    short = f"{case.url}-short"
    await topic(short).create(settings={"retention_ms": "3600000", "compact": "1"})
    more = f'publish = {{ topic = "{short}", roll_back = "2h" }}\n'
    text = FILE.replace('publish.topic = "{url}-updates"\n', more.replace("{", "{{").replace("}", "}}"))
    made = text.format(url=case.url, folder=case.folder, label='{ field = "late" }', features='"all"', answers="")
    found = await SettingsCheck(*read_document(made)).run()
    told = "versions may be deleted before 2 h are over, and one cannot roll back to them: it has compact=1"
    assert told in found["publish.topic"]
    await OnlineLearningService(read_document(made)[0])._warn_of_deletion()
    assert told in caplog.text


async def test_a_history_is_found_and_its_end_compared_with_the_partitions_of_the_topic(case: Case) -> None:
    """One offset was given for a topic of two partitions: the records of the other one were learned twice."""
    await case.write({"late": True, "km": 1})
    (case.folder / "checkpoints.jsonl").write_bytes(orjson.dumps({"late": False, "km": 2}))
    history = 'input.history = "{folder}.jsonl"\ninput.at = [{at}]\ninput.then = "{url}"'
    file = FILE.replace('input.topic = "{url}"{answers}', history)
    given = {"url": case.url, "folder": case.folder / "checkpoints", "label": '{ field = "late" }', "features": '"all"'}
    found = await SettingsCheck(*read_document(file.format(**given, at="1"))).run()
    assert found["input.history"].endswith("checkpoints.jsonl: 1 partition, the label in 1 of the first 1 records")
    assert found["input.then"] == f"{case.url}: 1 partition, 1 records"
    for at, said in (
        ("1, 2", "f:3: input.at: expected offsets of 1 partition, given the array"),
        ("1", "checkpoints.jsonl"),
    ):
        with pytest.raises(SettingsError) as caught:
            await SettingsCheck(*read_document(file.format(**given, at=at))).run()
        [problem] = caught.value.problems
        assert said in problem.shown("f")
        (case.folder / "checkpoints.jsonl").unlink(missing_ok=True)
    # The file was right, and the service made a dead letter of each record of the history.
    (case.folder / "checkpoints.jsonl").write_bytes(orjson.dumps({"delayed": False, "km": 2}))
    with pytest.raises(
        SettingsError, match=r"input\.history: expected the label in the first 1 records, given no field"
    ):
        await SettingsCheck(*read_document(file.format(**given, at="1"))).run()


async def test_answers_in_a_topic_of_their_own_are_checked_with_the_questions(case: Case) -> None:
    """Only one of two topics was looked at, so that a wrong key was found after a day."""
    await case.write(*({"id": n, "km": n, "at": 1_700_000_000 + n} for n in range(40)))
    url, label = case.url + "-answers", '{ key = "id", within = "1h", otherwise = false }'
    given: Any = {"answers": f'\ninput.answers = "{url}"', "label": label}
    [said] = await case.refused(**given)
    assert "input.answers: expected a topic that exists" in said
    await topic(url).create()
    found = await case.found(**given)
    assert found["learn"] == "no answers to look at: whether label and features fit is not known"
    writer = await topic(url).open_writer()
    await writer.write(OutgoingBatch([orjson.dumps({"id": n, "at": 1_700_000_030 + n}) for n in range(7)]))
    await writer.close()
    found = await case.found(**given)
    assert found["input.answers"] == f"{url}: 1 partition, 7 records"
    labels = "7 labels in the newest 7 answers, all are true, and questions without an answer False"
    assert found["learn.label"] == labels
    assert found["learn.features"] == "2 fields: at, km"
    assert found["learn.label.key"] == "7 of the newest 7 answers have their question among the newest records"
    for part, field, wrong in (("key", "kee", "questions"), ("time", "km", "answers"), ("time", "aat", "questions")):
        [said] = await case.refused(**given | {"label": label_with(label, part, field)})
        assert (
            f"f:8: learn.label.{part}: expected a field of the newest {wrong}, given none of the name {field!r}" in said
        )
    found = await case.found(**given | {"label": label_with(label, "time", "at")})
    assert found["learn.label.time"] == "from 2023-11-14T22:13:20 to 2023-11-14T22:13:59 (UTC)"
    assert found["learn.label.within"] == "7 of 7 answers came in time, half of all after 30 s"
    # The file was right, and all questions were learned as if no answer had come.
    [said] = await case.refused(**given | {"label": label_with(label.replace("1h", "20s"), "time", "at")})
    assert "given 20 s; the newest 7 answers came 30 to 30 s after their questions" in said


def label_with(label: str, part: str, field: str) -> str:
    """Return the label with the name of a field."""
    return label.replace('"id"', f'"{field}"') if part == "key" else label.replace(" }", f', {part} = "{field}" }}')


@pytest.mark.parametrize(
    ("labels", "label", "expected"),
    [
        ([True] * 30, '{ field = "late" }', "all are true: nothing can be learned from such labels, so check the key"),
        (["no"] * 30, '{ field = "late" }', "all are 'no': nothing can be learned"),
        ([1, 0, 0, 0] * 5, '{ field = "late" }', ", 25.0% are true"),
        (
            ["on time", "late", "late", "?", 3] * 8,
            '{ field = "late", positive = "late" }',
            '; 16 have none (expected a label that is "on time" or "late", given \'?\'',
        ),
        (
            ["on time", "late", "late", "late"] * 5,
            '{ field = "late" }',
            "75.0% are 'late', 25.0% are 'on time'; predictions are the probability of 'on time'",
        ),
    ],
)
async def test_the_shares_of_the_labels_are_told(case: Case, labels: Any, label: str, expected: str) -> None:
    """A label that was true in all records passed the check, and the service learned nothing for a month."""
    await case.write(*({"late": each, "km": n} for n, each in enumerate(labels)))
    assert expected in (await case.found(label=label))["learn.label"]


async def test_choices_are_checked_with_their_negatives(case: Case) -> None:
    """A check missed the field of the label, which the service adds, and not the item, which no record had."""
    await case.write(*({"user": "u", "item": n % 5} for n in range(10)), {"user": "u"})
    found = await case.found(label='{ field = "chosen" }', more='negatives = { item = "item", each = 3 }')
    assert found["learn.negatives"] == "10 of the newest 11 records choose an item"
    assert found["learn.label"] == "37 labels in the newest 37 records, 27.0% are true"
    [problem] = await case.refused(label='{ field = "chosen" }', more='negatives = { item = "itm" }')
    assert problem.startswith("f:9: learn.negatives.item: expected a record with 'itm', and without the field 'chosen'")


async def test_an_empty_topic_is_no_error(case: Case) -> None:
    """A service could not be checked before its first event."""
    await case.write()
    found = await case.found()
    assert found["learn"] == "no record to look at: whether label and features fit is not known"


async def test_records_without_fields_are_an_error(case: Case) -> None:
    """A topic of texts was accepted, and each record became a dead letter."""
    await case.write(b"a,b", b"1,2", 7)
    assert await case.refused() == ["f:2: input.decoder: expected records with fields, given 3 that have none"]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (
            {"label": '{ field = "lat" }'},
            "learn.label: expected a label in the newest records, given no field 'lat'; did",
        ),
        (
            {"features": '{ km = "text" }'},
            "learn.features: expected a text in the field 'km', given 0 (9 of 9 records)",
        ),
        (
            {"features": '{ kms = "number" }'},
            "learn.features.kms: expected a field of the newest records, given none; did",
        ),
        (
            {"more": '[http]\ntoken_file = "nowhere"\n'},
            "http.token_file: expected token_file to name a file with token in it",
        ),
        (
            {"folder": "/dev/null/x"},
            "checkpoints.store: expected a folder to write to, given '/dev/null', which is none",
        ),
    ],
)
async def test_what_does_not_fit_is_told_with_its_line(case: Case, given: dict[str, str], said: str) -> None:
    """The first sign of a misspelt field was a topic full of dead letters."""
    await case.write(*({"late": 1, "km": n} for n in range(9)))
    [problem] = await case.refused(**given)
    assert said in problem
    assert problem.startswith("f:")


async def test_the_features_of_a_challenger_are_checked_too(case: Case) -> None:
    """A misspelt field of the challenger was missing in all rows, and the idea was given up."""
    await case.write(*({"late": n % 2, "km": n, "town": "Rome"} for n in range(9)))
    second = case.folder / "second.toml"
    given = {"url": case.url, "folder": case.folder, "label": '{ field = "late" }', "answers": ""}
    more = f'[challenger]\nfile = "{second}"\n'
    second.write_text(FILE.format(**given, features='{ km = "number" }').replace('"s"', '"s-b"'))
    assert (await case.found(more=more))["challenger.file.learn.features"] == "1 fields: km"
    second.write_text(second.read_text().replace("km", "kms"))
    [problem] = await case.refused(more=more)
    assert problem.startswith("f:10: challenger.file.learn.features.kms: expected a field of the newest records, given")


async def test_an_object_store_is_asked(case: Case, s3_url: str) -> None:
    """A misspelt bucket was a folder for the check, and the service did not start."""
    await case.write({"late": 1, "km": 1})
    found = await case.found(folder=s3_url)
    assert found["checkpoints.store"] == f"{s3_url.partition('?')[0]} answers"
    [problem] = await case.refused(folder=s3_url.replace("s3://state", "s3://other"))
    assert "expected an object store for checkpoints" in problem
    assert "(answer 404 NoSuchBucket)" in problem
    [problem] = await case.refused(folder="s3://AKIA:hush@state")
    assert "checkpoints in 's3://…@state': expected credentials in the environment" in problem
    assert "hush" not in problem


async def test_a_certificate_of_another_key_is_told(case: Case) -> None:
    """A certificate was renewed and its key was not: the check was green, and the service did not start."""
    authority = Authority(case.folder, "authority")
    (certificate, _), (_, key) = (authority.sign(name, "IP:127.0.0.1") for name in ("old", "new"))
    await case.write({"late": 1, "km": 1})
    [problem] = await case.refused(more=f'[http]\ntls_certificate = "{certificate}"\ntls_key = "{key}"\n')
    assert problem.startswith("f:10:")
    assert "http.tls_certificate: expected a certificate and its key in PEM (tls_certificate, tls_key)" in problem


async def test_a_server_that_does_not_answer_is_told_for_each_topic(case: Case) -> None:
    """A check waited a minute for each topic of the same broker."""
    [port] = free_ports(1)
    options = "?give_up_after_s=0.5&request_timeout_s=0.5"
    text = FILE.format(
        url=f"kafka://127.0.0.1:{port}/x{options}",
        folder=case.folder,
        label='{ field = "late" }',
        features='"all"',
        answers="",
    ).replace(f"{options}-updates", f"-updates{options}")
    with pytest.raises(SettingsError) as caught:
        await SettingsCheck(*read_document(text)).run()
    assert [problem.key for problem in caught.value.problems] == ["input.topic", "publish.topic"]


async def test_embeddings_that_expire_are_checked_by_the_times_of_questions(case: Case) -> None:
    """A file that was good was refused, since no record of a check has the time of a question."""
    views = [{"event": "view", "id": n, "user": f"u{n}", "at": 1_700_000_000 + n} for n in range(40)]
    await case.write(*views, {"event": "click", "id": 3, "at": 1_700_000_040})
    label = '{ event = "click", key = "id", within = "1min", otherwise = false, time = "at" }'
    network = '\nlearner = "network"\nsettings = { expire = "30d", at_most = "2 MB" }\n'
    assert (await case.found(label=label, more=network))["learn.features"] == "1 fields: user"


async def test_embeddings_that_expire_are_checked_by_the_field_of_the_time(case: Case) -> None:
    """All records were refused because the field of the time had texts."""
    await case.write(*({"late": n % 3 == 0, "user": f"u{n}", "at": "2024-05-01T10:00"} for n in range(40)))
    network = '\nlearner = "network"\nsettings = { expire = "30d", time = "at" }\n'
    assert "user" in (await case.found(more=network))["learn.features"]
