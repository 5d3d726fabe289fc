"""URLs and options: what is accepted, what is refused, and what is never shown."""

from __future__ import annotations

import pytest

from streamiter.errors import ConfigurationError
from streamiter.topics import topic

URL = "kafka://127.0.0.1:9092/clicks"
SASL = {"security_protocol": "SASL_SSL", "sasl_username": "alice", "sasl_password": "hush-hush"}


def test_an_unknown_option_is_refused_with_the_known_ones() -> None:
    """A misspelt option that is ignored is a setting that silently does not hold."""
    with pytest.raises(ConfigurationError, match=r"compresion.*compression"):
        topic(URL, compresion="zstd")
    with pytest.raises(ConfigurationError, match=r"compresion.*compression"):
        topic(f"{URL}?compresion=zstd")


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("compression", "rar"),
        ("acks", "0"),
        ("security_protocol", "TLS"),
        ("sasl_mechanism", "GUESS"),
        ("give_up_after_s", "soon"),
        ("give_up_after_s", 0),
        ("linger_s", -1),
        ("max_batch_bytes", "many"),
        ("ssl_check_hostname", "perhaps"),
    ],
)
def test_a_value_that_makes_no_sense_is_refused_by_name(option: str, value: object) -> None:
    """The first use of a wrong value, hours later and deep in a client, is the wrong place to say so."""
    with pytest.raises(ConfigurationError, match=option):
        topic(URL, **{option: value})


def test_options_come_from_the_url_too_and_keywords_go_first() -> None:
    """The command line has only the URL."""
    made = topic(f"{URL}?compression=lz4&give_up_after_s=7", compression="zstd")
    assert (made.options.compression, made.options.give_up_after_s) == ("zstd", 7.0)


@pytest.mark.parametrize("how", ["keywords", "query"])
def test_credentials_are_never_shown(how: str) -> None:
    """URLs end in logs, in dashboards and in error reports."""
    if how == "keywords":
        made = topic(URL, **SASL)
    else:
        made = topic(f"{URL}?" + "&".join(f"{name}={value}" for name, value in SASL.items()))
    shown = " ".join([made.url, repr(made), repr(made.options), made.commit_domain])
    assert "hush-hush" not in shown
    assert "alice" not in shown
    assert made.options.sasl_password == "hush-hush"


def test_a_password_in_the_host_part_is_refused_without_repeating_it() -> None:
    """The usual way to leak one."""
    with pytest.raises(ConfigurationError, match="sasl_password") as caught:
        topic("kafka://alice:hush-hush@127.0.0.1:9092/clicks")
    assert "hush-hush" not in str(caught.value)


def test_a_misspelt_credential_is_not_repeated() -> None:
    """What is not known to be a secret may be one all the same."""
    with pytest.raises(ConfigurationError, match="sasl_pasword") as caught:
        topic(f"{URL}?sasl_pasword=hush-hush")
    assert "hush-hush" not in str(caught.value)


@pytest.mark.parametrize(
    "options",
    [
        {"sasl_username": "alice", "sasl_password": "x"},
        {"security_protocol": "SASL_SSL"},
        {"security_protocol": "SASL_PLAINTEXT", "sasl_username": "alice"},
        {"ssl_cafile": "ca.pem"},
    ],
)
def test_credentials_that_would_not_be_used_are_refused(options: dict[str, object]) -> None:
    """A password that is given and ignored means an open connection that looks like a safe one."""
    with pytest.raises(ConfigurationError, match=r"security_protocol|sasl_username"):
        topic(URL, **options)


@pytest.mark.parametrize(
    "url",
    [
        "kafka://127.0.0.1:9092/",
        "kafka:///clicks",
        "kafka://127.0.0.1:port/clicks",
        "kafka://127.0.0.1:99999/clicks",
        "kafka://127.0.0.1:9092/a/b",
        "kafka://127.0.0.1:9092/click%20s",
        "kafka://127.0.0.1:9092/..",
    ],
)
def test_a_malformed_url_is_refused(url: str) -> None:
    """Better here than as a connection that is refused somewhere."""
    with pytest.raises(ConfigurationError, match="expected"):
        topic(url)


def test_servers_in_another_order_are_the_same_commit_domain() -> None:
    """One transaction must be able to write to both."""
    one = topic("kafka://b:1,a/clicks")
    other = topic("kafka://a:9092,b:1/updates")
    assert one.commit_domain == other.commit_domain != topic("kafka://c/clicks").commit_domain


def test_a_missing_certificate_file_is_named(tmp_path) -> None:
    """The error of the library names neither the option nor the file."""
    made = topic(URL, security_protocol="SSL", ssl_cafile=str(tmp_path / "nowhere.pem"))
    with pytest.raises(ConfigurationError, match=r"ssl_cafile.*nowhere\.pem"):
        made._cluster()
