"""Options of a URL and of keywords, without their secrets; a closing that is cancelled leaves nothing open."""

import asyncio
import gc
import warnings
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from topics.topic_case import begun, created, numbered, patiently, write

from streamiter.errors import ConfigurationError
from streamiter.topics import OutgoingBatch, ReadRequest, Topic, topic

URL = "kafka://127.0.0.1:9092/clicks"
SASL = {"security_protocol": "SASL_SSL", "sasl_username": "alice", "sasl_password": "hush-hush"}


def test_options_may_be_in_the_url_and_keywords_override_them() -> None:
    """Users of the command line could not set options, because they only have the URL."""
    made = topic(f"{URL}?compression=lz4&give_up_after_s=7", compression="zstd")
    assert (made.options.compression, made.options.give_up_after_s) == ("zstd", 7.0)


def test_a_choice_may_be_given_as_a_number() -> None:
    """``acks=1`` was refused with "expected one of all, 1, given 1"."""
    assert topic(URL, acks=1).options.acks == "1"


@pytest.mark.parametrize("how", ["keywords", "query"])
def test_credentials_are_never_shown(how: str) -> None:
    """A password was in a URL that logs, dashboards and error reports showed."""
    if how == "keywords":
        made = topic(URL, **SASL)
    else:
        made = topic(f"{URL}?" + "&".join(f"{name}={value}" for name, value in SASL.items()))
    shown = " ".join([made.url, repr(made), repr(made.options), made.commit_domain])
    assert "hush-hush" not in shown
    assert "alice" not in shown
    assert made.options.sasl_password == "hush-hush"


_ONE_OPTION_TOO_MANY = "ssl_keyfile"  # is refused without TLS, so there is an error with each of these options


@pytest.mark.parametrize("how", ["keywords", "query"])
@pytest.mark.parametrize(
    "option",
    [
        "compression",
        "acks",
        "security_protocol",
        "give_up_after_s",
        "max_batch_bytes",
        "ssl_check_hostname",
        "sasl_password_env",
        "sasl_password_file",
        "ssl_cafile",
        "client_id",
    ],
)
def test_a_secret_that_is_given_for_another_option_is_not_repeated(option: str, how: str) -> None:
    """The values changed places in a script, and the error contained the password."""
    options = {_ONE_OPTION_TOO_MANY: "key.pem", option: "hush-hush"}
    query = "&".join(f"{name}={value}" for name, value in options.items())
    url, keywords = (URL, options) if how == "keywords" else (f"{URL}?{query}", {})
    with pytest.raises(ConfigurationError) as caught:
        topic(url, **keywords)
    assert "hush-hush" not in str(caught.value)


@pytest.mark.parametrize("given", ["hush-hush", "hush-hush\n", "hush-hush\r\n", " hush ", "hush\n\n"])
def test_a_secret_may_be_in_a_file_whose_last_line_end_is_not_part_of_it(tmp_path: Path, given: str) -> None:
    """A password from a file was refused, because `echo` had written a line end behind it."""
    file = tmp_path / "password"
    file.write_bytes(given.encode())
    options = {**SASL, "sasl_password": None, "sasl_password_file": str(file)}
    made = topic(URL, **options)
    assert made.options.sasl_password == given.removesuffix("\n").removesuffix("\r")
    by_url = topic(f"{URL}?security_protocol=SASL_SSL&sasl_username=alice&sasl_password_file={file}")
    assert by_url.options.sasl_password == made.options.sasl_password
    assert "password" not in by_url.url


@pytest.mark.parametrize("option", ["sasl_username", "sasl_password", "ssl_password"])
def test_every_secret_may_be_in_the_environment(monkeypatch: pytest.MonkeyPatch, option: str) -> None:
    """Every user of the machine saw the password in the command line, and the shell's history kept it."""
    monkeypatch.setenv("KAFKA_SECRET", "hush-hush")
    options = {**SASL, option: None, f"{option}_env": "KAFKA_SECRET"}
    made = topic(URL, **options)
    assert getattr(made.options, option) == "hush-hush"
    assert "hush" not in f"{made.url} {made!r} {made.options!r}"


def test_a_missing_secret_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The broker refused an empty password, and no message named the variable or file where it was missing."""
    monkeypatch.setenv("EMPTY", "")
    monkeypatch.delenv("KAFKA_PASSWORD", raising=False)
    (tmp_path / "empty").write_text("\n\n")
    (tmp_path / "large").write_text("x" * 100_000)
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    wrong = {
        "sasl_password_env": {
            "KAFKA_PASSWORD": r"environment variable KAFKA_PASSWORD to hold sasl_password \(.*\), given none; set it",
            "EMPTY": r"environment variable EMPTY to hold sasl_password \(.*\), given an empty one",
        },
        "sasl_password_file": {
            str(tmp_path / "missing"): r"missing', which cannot be read \(No such file or directory\)",
            str(tmp_path): r"which cannot be read \(Is a directory\)",
            str(tmp_path / "empty"): r"empty', which is empty",
            str(tmp_path / "large"): r"large', which is too large for a secret",
            str(tmp_path / "binary"): r"binary', which cannot be read \(UnicodeDecodeError\)",
        },
    }
    for option, values in wrong.items():
        for value, message in values.items():
            with pytest.raises(ConfigurationError, match=message):
                topic(URL, **{**SASL, "sasl_password": None, option: value})


def test_servers_in_another_order_are_the_same_commit_domain() -> None:
    """Two topics of one cluster had different commit domains, so one transaction could not write to both."""
    one = topic("kafka://b:1,a/clicks")
    other = topic("kafka://a:9092,b:1/updates")
    assert one.commit_domain == other.commit_domain != topic("kafka://c/clicks").commit_domain


Closing = Callable[[], Awaitable[None]]


async def closing_of_a_reader(topic: Topic) -> Closing:
    reader = await topic.open_reader(ReadRequest())
    await reader.read()
    return reader.close


async def closing_of_a_writer(topic: Topic) -> Closing:
    """Return the closing of a writer that is sending records."""
    writer = await topic.open_writer()
    await writer.write(OutgoingBatch(numbered(range(10))))
    return writer.close


async def closing_of_transactions(topic: Topic) -> Closing:
    """Return the closing of transactions, one of which is open and is sending records."""
    transactions = await begun(topic, f"{topic.name}-t")
    await transactions.write(topic, OutgoingBatch(numbered(range(10))))
    return transactions.close


async def cancelled_after(turns: int, close: Closing, *, times: int) -> None:
    """Close, and after some turns of the event loop cancel the closing in each of ``times`` turns."""

    async def closed() -> None:
        await close()

    closing = asyncio.create_task(closed())
    for _ in range(turns):
        await asyncio.sleep(0)
    for _ in range(times):
        closing.cancel()
        await asyncio.sleep(0)
    await patiently(asyncio.wait({closing}))


async def unclosed_after(
    turns: int, opened: Callable[[Topic], Awaitable[Closing]], topic: Topic, *, times: int
) -> list[str]:
    """Return Python's warnings about unclosed resources after a cancelled closing, when all references are gone."""
    gc.collect()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", ResourceWarning)
        await cancelled_after(turns, await opened(topic), times=times)
        gc.collect()
    return [str(each.message) for each in caught]


@pytest.mark.parametrize("times", [1, 2])
@pytest.mark.parametrize("opened", [closing_of_a_reader, closing_of_a_writer, closing_of_transactions])
async def test_closing_that_is_cancelled_leaves_no_connection_open(
    kafka_topic: Callable[..., Topic], opened: Callable[[Topic], Awaitable[Closing]], times: int
) -> None:
    """A step failed while the source next to it was closing at its end: its two connections stayed open."""
    topic = await created(kafka_topic())
    await write(topic, [b"to read"])
    gc.collect()
    gc.freeze()  # Collections that follow look at new objects only.
    for turns in range(1, 6) if times == 1 else (1, 4):
        assert await unclosed_after(turns, opened, topic, times=times) == [], f"cancelled after {turns} turns"


async def test_a_reader_that_is_closed_as_soon_as_it_is_open_leaves_nothing_behind(
    kafka_topic: Callable[..., Topic],
) -> None:
    """A caller that refused the reader it had opened got warnings about coroutines that were never awaited."""
    topic = await created(kafka_topic())
    gc.collect()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        reader = await topic.open_reader(ReadRequest())
        await reader.close()
        del reader
        gc.collect()
    assert [str(each.message) for each in caught] == []
