"""The few requests over HTTP that topics make: look-ups in a registry of schemas, and tokens of a login.

They are rare (one for each new schema, one for each token), so they use the standard library, in a thread.
"""

from __future__ import annotations

import ssl
from collections.abc import Mapping
from http.client import HTTPException
from typing import IO, Any, Final, NamedTuple
from urllib.error import HTTPError, URLError
from urllib.parse import urlsplit
from urllib.request import HTTPRedirectHandler, HTTPSHandler, Request, build_opener

from streamiter.errors import ConfigurationError
from streamiter.topics.urls import shown_path, shown_url

# A larger answer is no schema and no token.
_ANSWER_BYTES_MAX: Final = 16 << 20


class HttpAnswer(NamedTuple):
    """The answer of a server."""

    status: int
    body: bytes


class _NoRedirect(HTTPRedirectHandler):
    """A redirect is an answer like others: credentials must not follow it to another host."""

    def redirect_request(self, req: Request, fp: IO[bytes], code: int, msg: str, headers: Any, newurl: str) -> None:
        return None


def exchange(
    url: str, *, headers: Mapping[str, str], body: bytes | None = None, cafile: str | None, timeout_s: float
) -> HttpAnswer:
    """Send a GET, or a POST of ``body``, and return the answer, whatever its status. This blocks.

    ``cafile`` has the authorities that may sign the server's certificate; None for the authorities of the system.
    Proxies of the environment are used. Raises ``OSError`` where no answer arrives.
    """
    # Made for each request, since requests are rare, and their owners are sent to other processes.
    tls = ssl.create_default_context(cafile=cafile) if url.startswith("https:") else None
    request = Request(url, body, dict(headers))  # noqa: S310  # checked_url has checked the scheme.
    try:
        with build_opener(_NoRedirect, HTTPSHandler(context=tls)).open(request, timeout=timeout_s) as response:
            return HttpAnswer(response.status, response.read(_ANSWER_BYTES_MAX))
    except HTTPError as answer:
        with answer:
            return HttpAnswer(answer.code, answer.read(_ANSWER_BYTES_MAX))
    except URLError as error:
        raise OSError(str(error.reason)) from None
    except HTTPException as error:
        raise OSError(f"no answer in HTTP ({type(error).__name__})") from None


def checked_url(url: object, subject: str, advice: str) -> str:
    """Return the URL without a slash at its end; raise ``ConfigurationError`` unless it is HTTP, and names no user."""
    text = url if isinstance(url, str) else ""
    try:
        parts = urlsplit(text)
        is_good = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        is_good = False
    if not is_good or "@" in parts.netloc or parts.query or parts.fragment or not text.isprintable() or " " in text:
        given = repr(shown_url(url)) if isinstance(url, str) else type(url).__name__
        raise ConfigurationError(f"{subject}: expected http://host or https://host, given {given}; {advice}")
    return text.rstrip("/")


def check_authorities(cafile: str | None, option: str, subject: str) -> None:
    """Raise ``ConfigurationError`` for a file that has no certificates."""
    try:
        ssl.create_default_context(cafile=cafile)
    except (OSError, ValueError) as error:
        reason = (error.strerror if isinstance(error, OSError) else None) or type(error).__name__
        raise ConfigurationError(
            f"{subject}: expected {option} to be a file of certificates (PEM), given {shown_path(cafile or '')} "
            f"({reason})"
        ) from None
