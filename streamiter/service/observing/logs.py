"""The log of a service: JSON lines off a terminal, and a line of figures every half minute.

A line has ``time`` (UTC), ``level``, ``logger`` and ``message``, for errors ``traceback``, and a line of figures has
the figures. The secrets of the settings are replaced by an ellipsis.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Collection, Iterator
from datetime import UTC, datetime
from typing import Any, TextIO

import orjson

from streamiter.models.update import shown_rank
from streamiter.service.observing.observations import Observations, mean_rate
from streamiter.service.settings.tables import LogSettings, ServiceSettings
from streamiter.topics.urls import hide, named_secrets, secrets_in

_log = logging.getLogger("streamiter.service")


@contextlib.contextmanager
def logging_to(stream: TextIO, settings: ServiceSettings) -> Iterator[None]:
    """Write the log of the process to ``stream`` in this block, as ``settings.log`` says.

    Of other packages only warnings and errors are written.
    """
    form = settings.log.format
    as_json = form == "json" or (form == "auto" and not stream.isatty())
    handler = logging.StreamHandler(stream)
    handler.setFormatter(LogLines(secrets_of(settings), as_json=as_json))
    root, own = logging.getLogger(), logging.getLogger("streamiter")
    level = own.level
    root.addHandler(handler)
    logging.captureWarnings(True)
    apply_level(settings.log)
    try:
        yield
    finally:
        own.setLevel(level)
        logging.captureWarnings(False)
        root.removeHandler(handler)


def apply_level(settings: LogSettings) -> None:
    """Write records of this level and above; may be called while the service runs."""
    logging.getLogger("streamiter").setLevel(settings.level.upper())


def secrets_of(settings: ServiceSettings) -> set[str]:
    """Return the texts that must not be in the log: secrets in URLs, and those of the environment and of files."""
    given, http = settings.input, settings.http
    urls = (
        given.topic,
        given.history,
        given.answers_history,
        given.answers,
        given.dead_letter,
        settings.publish.topic,
        settings.predictions.log,
    )
    named = named_secrets((http.token_env, http.tls_key_password_env), (http.token_file, http.tls_key_password_file))
    # A file of tokens has one in each line, behind its role.
    tokens = {line.split()[-1] for secret in named for line in secret.splitlines() if line.split()}
    return {secret for url in urls if url is not None for secret in secrets_in(url)} | named | tokens


class LogLines(logging.Formatter):
    """Formats a record as one line of JSON, or as text."""

    def __init__(self, secrets: Collection[str], *, as_json: bool) -> None:
        super().__init__("%(asctime)s %(levelname)-7s %(message)s", "%H:%M:%S")
        self._secrets = secrets
        self._as_json = as_json

    def format(self, record: logging.LogRecord) -> str:
        if not self._as_json:
            return self._shown(super().format(record))
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": self._shown(record.getMessage()),
            **getattr(record, "figures", {}),
        }
        if record.exc_info:
            line["traceback"] = self._shown(self.formatException(record.exc_info))
        return orjson.dumps(line, default=str).decode()

    def _shown(self, text: str) -> str:
        # Half of a surrogate pair, as in a key of JSON, has no form in UTF-8.
        return hide(text, self._secrets).encode(errors="replace").decode()


def figures_of(observations: Observations, seconds: float) -> dict[str, float | str | None]:
    """Return the figures of the log, with the mean rate of the last ``seconds``; None where a figure is not known."""
    since_ms = observations.clock.now_ms() - 1000 * seconds
    rate = mean_rate([sample for sample in observations.samples if sample.at_ms >= since_ms])
    last = observations.samples[-1] if observations.samples else None
    quality, model = observations.quality.now, observations.model
    return {
        "phase": observations.phase.phase,
        "events_per_s": None if rate is None else round(rate, 1),
        "lag_records": None if last is None else last.lag_records,
        "lag_s": None if last is None else last.lag_s,
        "version": None if model is None else shown_rank(model.rank),
        "age_s": None if model is None else model.age_s(observations.clock),
        "loss": None if quality is None else quality.loss,
        "baseline_loss": None if quality is None else quality.baseline,
    }


def log_figures(observations: Observations, seconds: float) -> None:
    """Write a line with the figures."""
    figures = figures_of(observations, seconds)
    if (history := observations.catching_up) is not None:
        shares = {"history_share": history.share, "history_left_s": history.left_s}
        _log.info("%s", history.shown, extra={"figures": shares})
    _log.info(
        "%s: %s events/s, lag %s records (%s s), version %s (%s s old), loss %s (baseline %s)",
        *(
            "–" if figure is None else f"{figure:,.4g}" if isinstance(figure, float) else figure
            for figure in figures.values()
        ),
        extra={"figures": figures},
    )
