"""Tokens for the login by OAUTHBEARER: out of a file, of an endpoint of OpenID Connect, or of a provider of the user.

A token is asked for at each login. A broker ends a connection whose token has expired (``connections.max.reauth.ms``);
the client then connects again, with a new token.
"""

from __future__ import annotations

import asyncio
import base64
import inspect
from collections.abc import Mapping
from typing import Any, Final, Protocol, final
from urllib.parse import quote, urlencode

import orjson

from streamiter.errors import ConfigurationError, TopicDenied, TopicError
from streamiter.topics.http import HttpAnswer, check_authorities, checked_url, exchange
from streamiter.topics.urls import hide, shown_path
from streamiter.values.helpers.clock import Clock, SystemClock
from streamiter_kafka.trouble import BrokerTrouble
from streamiter_kafka.wire import AbstractTokenProvider

# A new token is asked for after this part of a token's life: clocks differ, and a login takes a moment.
_USED_FOR: Final = 0.8

# The life of a token whose endpoint tells none (RFC 6749 recommends that it does).
_LIFE_S: Final = 60.0

_TOO_MANY_REQUESTS: Final = 429


class TokenProvider(Protocol):
    """Gives tokens, such as an ``AbstractTokenProvider`` of aiokafka. It may have a method ``extensions()``."""

    async def token(self) -> str:
        """Return a token that has not expired."""


@final
class Login(AbstractTokenProvider):  # type: ignore[misc]
    """What aiokafka asks for a token. It remembers the last one, so that no message shows it."""

    def __init__(self, provider: TokenProvider, subject: str) -> None:
        self._provider = provider
        self._subject = subject
        self.last_token = ""

    async def token(self) -> str:
        """Return a token; raise ``TopicDenied`` where the provider gives none."""
        given: Any = self._provider.token()
        token = await given if inspect.isawaitable(given) else given
        # RFC 6750: a token has no spaces and no control characters.
        if not isinstance(token, str) or not token or not token.isascii() or not token.isprintable() or " " in token:
            raise TopicDenied(
                f"{self._subject}: expected a token (a text without spaces) for the login by OAUTHBEARER, given "
                f"{'another text' if isinstance(token, str) else type(token).__name__}"
            )
        self.last_token = token
        return token

    def extensions(self) -> Mapping[str, str]:
        """Return the extensions of the provider, as RFC 7628 calls them."""
        extensions = getattr(self._provider, "extensions", dict)
        return extensions() or {}

    def __repr__(self) -> str:
        return f"Login({type(self._provider).__name__})"


class TokenFile:
    """A file with a token, which another program renews. It is read at each login."""

    def __init__(self, path: str, subject: str) -> None:
        self._path = path
        self._subject = subject
        self._read()

    async def token(self) -> str:
        """Return the content of the file, without white space around it."""
        return self._read()

    def _read(self) -> str:
        try:
            with open(self._path, encoding="ascii") as file:
                return file.read().strip()
        except (OSError, ValueError) as error:
            reason = (error.strerror if isinstance(error, OSError) else None) or "no ASCII text"
            raise ConfigurationError(
                f"{self._subject}: expected sasl_oauth_token_file to name a file with a token, given "
                f"{shown_path(self._path)}, which cannot be read ({reason})"
            ) from None


class ClientCredentials:
    """Asks an endpoint of OpenID Connect for tokens, with the id and the secret of a client (RFC 6749, section 4.4)."""

    def __init__(
        self,
        endpoint: str,
        client: tuple[str, str],
        scope: str | None,
        cafile: str | None,
        subject: str,
        timeout_s: float,
        clock: Clock | None = None,
    ) -> None:
        self._subject = f"{subject}, sasl_oauth_token_endpoint"
        self._endpoint = checked_url(endpoint, self._subject, "give the client as sasl_oauth_client_id and …_secret")
        self._client = client
        self._scope = scope
        check_authorities(cafile, "sasl_oauth_cafile", subject)
        self._cafile = cafile
        self._timeout_s = timeout_s
        self._clock = clock or SystemClock()
        self._token = ""
        self._renew_s = 0.0
        self._lock = asyncio.Lock()

    async def token(self) -> str:
        """Return the token of the last answer, or a new one.

        Raises ``BrokerTrouble`` where the endpoint does not answer, and ``TopicDenied`` where it refuses the client.
        """
        async with self._lock:
            if not self._token or self._clock.monotonic_s() >= self._renew_s:
                answer = await asyncio.to_thread(self._ask)
                self._token, life_s = self._checked(answer)
                self._renew_s = self._clock.monotonic_s() + _USED_FOR * life_s
            return self._token

    def _ask(self) -> HttpAnswer:
        user, secret = (quote(part, safe="") for part in self._client)
        headers = {
            "Accept": "application/json",
            "Authorization": f"Basic {base64.b64encode(f'{user}:{secret}'.encode()).decode()}",
            "Content-Type": "application/x-www-form-urlencoded",
        }
        form = {"grant_type": "client_credentials", **({} if self._scope is None else {"scope": self._scope})}
        body = urlencode(form).encode()
        try:
            return exchange(self._endpoint, headers=headers, body=body, cafile=self._cafile, timeout_s=self._timeout_s)
        except OSError as error:
            reason = hide(error.strerror or str(error) or type(error).__name__, self._client)
            raise BrokerTrouble(f"{self._subject} {self._endpoint!r}: no answer ({reason})") from None

    def _checked(self, answer: HttpAnswer) -> tuple[str, float]:
        try:
            found = orjson.loads(answer.body)
        except orjson.JSONDecodeError:
            found = {}
        found = found if isinstance(found, dict) else {}
        token, life_s = found.get("access_token"), found.get("expires_in", _LIFE_S)
        if answer.status == 200 and isinstance(token, str) and token:
            return token, float(life_s) if isinstance(life_s, (int, float)) else _LIFE_S
        reasons = [str(found[name]) for name in ("error", "error_description") if found.get(name)]
        said = hide(": ".join(reasons)[:300] or "no reason", self._client)
        where = f"{self._subject} {self._endpoint!r}"
        if answer.status >= 500 or answer.status == _TOO_MANY_REQUESTS:
            raise BrokerTrouble(f"{where}: status {answer.status} ({said})")
        if answer.status in (400, 401, 403):
            raise TopicDenied(
                f"{where}: it refuses the client ({answer.status}, {said}); check sasl_oauth_client_id, "
                "sasl_oauth_client_secret and sasl_oauth_scope"
            )
        raise TopicError(f"{where}: expected an access_token in JSON, given status {answer.status} ({said})")
