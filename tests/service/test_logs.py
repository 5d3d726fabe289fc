"""The log of a service: lines of JSON off a terminal, figures, and no secrets."""

from __future__ import annotations

import io
import json
import logging
import os
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

from streamiter.service.logs import log_figures, logging_to
from streamiter.service.observations import Observations, Sample
from streamiter.service.settings import (
    HttpSettings,
    InputSettings,
    LabelSettings,
    LearnSettings,
    LogSettings,
    PublishSettings,
    ServiceSettings,
)
from streamiter.testing import VirtualClock

SETTINGS = ServiceSettings(
    "late-flights",
    InputSettings("kafka://h:9092/flights?sasl_username=alice&sasl_password_env=KAFKA_PASSWORD"),
    LearnSettings("classification", LabelSettings("late")),
    PublishSettings("memory://updates"),
    http=HttpSettings(token_env="SERVICE_TOKEN"),
)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def lines_of(stream: io.StringIO) -> list[dict[str, Any]]:
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def test_off_a_terminal_each_line_is_json() -> None:
    """A collector of logs dropped the lines of a traceback."""
    stream = io.StringIO()
    with logging_to(stream, SETTINGS):
        [handler] = [each for each in logging.getLogger().handlers if getattr(each, "stream", None) is stream]
        # Not by a logger: pytest captures what these log, and cannot send half a pair from process to process.
        record = {"name": "streamiter.job", "levelno": logging.INFO, "levelname": "INFO"}
        handler.handle(logging.makeLogRecord(record | {"msg": "two\nlines, half a pair: \ud800"}))
        logging.getLogger("aiokafka").info("of another package")
        logging.getLogger("uvicorn.error").warning("a warning of another package")
        with warnings.catch_warnings():
            warnings.simplefilter("always")
            warnings.warn("deprecated", stacklevel=1)
        try:
            raise ValueError("no number")
        except ValueError:
            logging.getLogger("streamiter.service").exception("failed")
    logging.getLogger("streamiter.job").error("after the service")
    lines = lines_of(stream)
    assert [line["level"] for line in lines] == ["info", "warning", "warning", "error"]
    assert lines[0]["message"] == "two\nlines, half a pair: ?"
    assert lines[0]["logger"] == "streamiter.job"
    assert lines[0]["time"].endswith("+00:00")
    assert "ValueError: no number" in lines[3]["traceback"]


def test_no_secret_is_in_the_log(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client library wrote its password into an error, and the log was kept for years."""
    monkeypatch.setenv("KAFKA_PASSWORD", "hushhush")
    monkeypatch.setenv("SERVICE_TOKEN", "open sesame")
    for form in ("json", "text"):
        stream = io.StringIO()
        with logging_to(stream, replace(SETTINGS, log=LogSettings(format=form))):
            try:
                raise ConnectionError(f"login of alice with {'hushhush'!r} failed")
            except ConnectionError:
                logging.getLogger("aiokafka").exception("%s", SETTINGS.input.topic)
            logging.getLogger("streamiter.service").warning("Authorization: Bearer open sesame")
        shown = stream.getvalue()
        assert "login of … with '…' failed" in shown
        assert not any(secret in shown for secret in ("alice", "hushhush", "open sesame"))


def test_no_secret_of_a_file_is_in_the_log(tmp_path: Path) -> None:
    """Secrets of the environment were hidden, and those of files, which the documents prefer, were not."""
    files = [tmp_path / name for name in ("kafka", "token", "key")]
    for number, file in enumerate(files):
        file.write_text(f"hush hush {number}\n")
    os.mkfifo(pipe := tmp_path / "pipe")  # Its secret is for the program that reads it first.
    options = f"?sasl_username=alice&sasl_password_file={quote(str(files[0]))}&ssl_password_file={pipe}"
    http = HttpSettings(token_file=str(files[1]), tls_key_password_file=str(files[2]))
    given = replace(SETTINGS, http=http, publish=PublishSettings(f"kafka://h:9092/updates{options}"))
    stream = io.StringIO()
    with logging_to(stream, replace(given, input=InputSettings("kafka://h:9092/flights?sasl_password_file=missing"))):
        logging.getLogger("aiokafka").error("login of %r failed", [file.read_text().strip() for file in files])
    assert lines_of(stream)[0]["message"] == "login of ['…', '…', '…'] failed"


def test_on_a_terminal_lines_are_text() -> None:
    """A developer read JSON on the terminal."""
    stream = Terminal()
    with logging_to(stream, SETTINGS):
        logging.getLogger("streamiter.service").info("ready")
    assert stream.getvalue().endswith(" INFO    ready\n")


def test_a_line_of_figures_has_rate_lag_version_and_loss() -> None:
    """The log of a pod was empty for a month, and no one knew whether it had worked."""
    clock, stream = VirtualClock(), io.StringIO()
    observations = Observations("late-flights", clock=clock)
    with logging_to(stream, SETTINGS):
        log_figures(observations, 30)
        for rate in (9e9, 100.0, 300.0):
            clock.now_s += 20.0
            observations.samples.append(Sample(clock.now_ms(), rate, 1200, 1.5))
        observations.validated({"window_loss": 0.4321, "window_baseline_loss": 0.6931})
        observations.enter("running")
        log_figures(observations, 30)
        observations.validated({"window_loss": 2.0, "window_baseline_loss": 8.0, "window_mae": 1.0})
        log_figures(observations, 30)
        pinball = {"window_loss": 0.5, "window_baseline_loss": 0.8, "window_mae": 2.0, "window_squared_error": 9.0}
        observations.validated(pinball)
        log_figures(observations, 30)
    before, after, of_numbers, of_quantiles = lines_of(stream)
    assert before["message"] == ("starting: – events/s, lag – records (– s), version – (– s old), loss – (baseline –)")
    assert after["message"] == (
        "running: 200 events/s, lag 1200 records (1.5 s), version – (– s old), loss 0.4321 (baseline 0.6931)"
    )
    assert (after["phase"], after["events_per_s"], after["lag_records"]) == ("running", 200.0, 1200)
    assert (after["loss"], after["baseline_loss"], before["loss"]) == (0.4321, 0.6931, None)
    # As on the page: the RMSE, unless the learner has another loss of numbers.
    assert (of_numbers["loss"], of_numbers["baseline_loss"]) == (2.0, 4.0)
    assert (of_quantiles["loss"], of_quantiles["baseline_loss"]) == (0.5, 0.8)
