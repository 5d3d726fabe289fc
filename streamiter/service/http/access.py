"""Who may ask: the tokens of a service with their roles, and its certificate. Both are read again when they change."""

from __future__ import annotations

import base64
import binascii
import contextlib
import hmac
import logging
import os
from collections.abc import Callable, Mapping
from typing import Final, Literal, cast, get_args

from streamiter.errors import ConfigurationError
from streamiter.service.settings.tables import HttpSettings, http_secret, load_certificate, tls_context
from streamiter.values.helpers.clock import Clock

_log = logging.getLogger("streamiter.service.http")

Role = Literal["all", "read", "predict", "metrics"]
"""What a token permits: everything; all but predictions; predictions only; ``/metrics`` only."""

# A file is looked at this often. A changed certificate may be in the files some seconds later than its key.
_LOOK_EVERY_S: Final = 5.0


class Access:
    """The tokens of a service, and its TLS. Raises ConfigurationError for a token or a certificate that cannot be read.

    A file of tokens has one in each line, with its role in front of it, if it is not ``all``; ``#`` begins a comment.
    """

    def __init__(self, settings: HttpSettings) -> None:
        self._settings = settings
        self._tokens = tokens_of(settings)
        self.tls = tls_context(settings)
        """The context of TLS; None without it."""
        self._seen = self._changed_at()
        self.on_change: Callable[[], None] = lambda: None
        """Is called when the tokens have changed."""

    @property
    def needs_token(self) -> bool:
        """Whether requests need a token."""
        return bool(self._tokens)

    def role_of(self, headers: Mapping[bytes, bytes]) -> Role | None:
        """Return what the token of a request permits, without tokens everything; None for a wrong token, or none."""
        given = _token_in(headers)
        # All are compared, so that the time tells nothing.
        roles = [role for token, role in self._tokens.items() if hmac.compare_digest(given, token)]
        return next(iter(roles), None) if self._tokens else "all"

    def reload(self) -> None:
        """Read tokens and certificate again. What cannot be read is told in the log, and nothing changes."""
        self._seen = self._changed_at()
        try:
            tokens = tokens_of(self._settings)
            tls_context(self._settings)  # A context of its own, since a wrong key would spoil the one in use.
            if self.tls is not None:
                # Connections that are open keep the certificate that they began with.
                load_certificate(self._settings, self.tls)
        except ConfigurationError as error:
            _log.error("tokens and certificate have not changed: %s", error)
            return
        if tokens != self._tokens:
            self._tokens = tokens
            self.on_change()
        _log.info("tokens and certificate have been read again")

    async def watch(self, clock: Clock) -> None:
        """Read the files again, soon after they have changed."""
        while self._seen:
            await clock.sleep(_LOOK_EVERY_S)
            if self._changed_at() != self._seen:
                self.reload()
        await clock.sleep(float("inf"))

    def _changed_at(self) -> dict[str, int | None]:
        """Return for each file when it has changed; None for one that is not there."""
        given = self._settings
        files = (given.token_file, given.tls_certificate, given.tls_key, given.tls_key_password_file)
        return {file: _changed_ns(file) for file in files if file is not None}


def _changed_ns(file: str) -> int | None:
    with contextlib.suppress(OSError):
        return os.stat(file).st_mtime_ns
    return None


def tokens_of(settings: HttpSettings) -> dict[bytes, Role]:
    """Return the role of each token; empty if the settings name none.

    Raises ConfigurationError for a file without a token, or with an unknown role; its text has no token.
    """
    given = http_secret(settings, "token")
    if given is None:
        return {}
    tokens: dict[bytes, Role] = {}
    for number, line in enumerate(given.splitlines(), start=1):
        words = line.split()
        if not words or words[0].startswith(b"#"):
            continue
        role = words[0].decode("latin-1") if len(words) == 2 else "all"
        if len(words) > 2 or role not in get_args(Role):
            raise ConfigurationError(
                f"[http]: expected a token in line {number}, or one of the roles {', '.join(get_args(Role))}, a space "
                "and the token, given another line (not shown); write each token in a line of its own"
            )
        tokens[words[-1]] = cast(Role, role)
    if not tokens:
        raise ConfigurationError("[http]: expected a token in token_file or token_env, given none; write one into it")
    return tokens


def permits(role: Role, method: str, path: str) -> bool:
    """Whether a token of this role permits the request."""
    is_prediction = method == "POST" and path.endswith("/predict")
    permitted = {
        "all": True,
        "read": not is_prediction,
        "predict": is_prediction or path == "/openapi.json",
        "metrics": path == "/metrics",
    }
    return permitted[role]


def _token_in(headers: Mapping[bytes, bytes]) -> bytes:
    """Return the token of a request; a browser sends it as the password of any user."""
    kind, _, given = headers.get(b"authorization", b"").partition(b" ")
    if kind.lower() == b"bearer":
        return given.strip()
    if kind.lower() == b"basic":
        with contextlib.suppress(binascii.Error):
            return base64.b64decode(given, validate=True).partition(b":")[2]
    return b""
