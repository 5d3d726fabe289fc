"""Who may ask: tokens with roles, and files that are read again while the service runs."""

import asyncio
import contextlib
import os
import ssl
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest
from models.model_case import write
from service.http_case import problem_of, request
from service.service_models import learned
from support.certificates import Authority
from support.waiting import PATIENCE_S

from streamiter.errors import ConfigurationError
from streamiter.models import ModelSnapshot, ModelUpdateEncoder, ServedModel
from streamiter.service.http.access import Access, Role
from streamiter.service.http.server import serving
from streamiter.service.observing.observations import Observations
from streamiter.service.settings.tables import HttpSettings
from streamiter.topics import MemoryBroker
from streamiter.values.helpers.clock import SystemClock

TOKENS = "# of the load balancer\npredict p-1\r\n\nread r-1\nmetrics m-1\nall a-1\na-2\n"


class Looks(SystemClock):
    """A clock whose every sleep lasts until the test lets it end."""

    def __init__(self) -> None:
        self._ends = asyncio.Event()
        self.slept = 0

    async def sleep(self, seconds: float) -> None:
        self.slept += 1
        await self._ends.wait()
        self._ends.clear()

    async def look(self) -> None:
        """Let the sleep end, and return at the next one."""
        before = self.slept
        self._ends.set()
        async with asyncio.timeout(PATIENCE_S):
            while self.slept == before:
                await asyncio.sleep(0)


class Asked(Access):
    """Counts how often a request was checked."""

    times = 0

    def role_of(self, headers: Mapping[bytes, bytes]) -> Role | None:
        self.times += 1
        return super().role_of(headers)


@asynccontextmanager
async def watched(settings: HttpSettings) -> AsyncIterator[tuple[str, Looks]]:
    """Serve with access that is watched; yield the address, and the clock of the watch."""
    access, clock = Access(settings), Looks()
    async with serving(Observations("late"), settings, access) as address:
        watch = asyncio.create_task(access.watch(clock))
        try:
            yield address, clock
        finally:
            watch.cancel()


async def status(address: str, method: str, path: str, token: str) -> int:
    async with httpx.AsyncClient(base_url=address, verify=False, trust_env=False, timeout=PATIENCE_S) as client:
        answer = await client.request(method, path, headers={"Authorization": f"Bearer {token}"}, content=b"{}")
        if answer.status_code == 403:
            assert "expected a token that permits" in problem_of(answer)["detail"]
        return answer.status_code


async def test_a_role_permits_what_it_names(tmp_path: Path) -> None:
    """The one token was in the configuration of Prometheus, and permitted the page with the data of users."""
    file = tmp_path / "tokens"
    file.write_text(TOKENS)
    asked = [("POST", "/predict"), ("GET", "/metrics"), ("GET", "/api/state"), ("GET", "/openapi.json")]
    permitted = {"p-1": "1001", "r-1": "0111", "m-1": "0100", "a-1": "1111", "a-2": "1111", "all": "0000", "x": "0000"}
    async with watched(HttpSettings("127.0.0.1:0", token_file=str(file))) as (address, _):
        for token, expected in permitted.items():
            codes = [await status(address, *each, token) for each in asked]
            refused = 401 if token in ("all", "x") else 403
            assert ["0" if code == refused else "1" for code in codes] == list(expected), (token, codes)


async def test_tokens_that_are_replaced_count_at_once_and_a_wrong_file_changes_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A token that had leaked was good until the next restart."""
    file = tmp_path / "tokens"

    def write(text: str, at_s: int) -> None:
        file.write_text(text)
        os.utime(file, (at_s, at_s))

    write("old", 1)
    async with watched(HttpSettings("127.0.0.1:0", token_file=str(file))) as (address, clock):
        codes = [await status(address, "GET", "/metrics", token) for token in ("old", "new")]
        assert codes == [200, 401]
        write("new\nmetrics old\n", 2)
        await clock.look()
        assert await status(address, "GET", "/metrics", "new") == 200
        assert await status(address, "POST", "/predict", "old") == 403
        write("teach s3cret", 3)
        await clock.look()
        assert await status(address, "GET", "/metrics", "new") == 200
        file.unlink()
        await clock.look()
        assert await status(address, "GET", "/metrics", "new") == 200
    assert "tokens and certificate have not changed" in caplog.text
    assert "s3cret" not in caplog.text


async def test_a_request_that_began_with_an_old_token_does_not_keep_it(tmp_path: Path) -> None:
    """A request was under way while its token was replaced; its head was kept, and the old token was good for ever."""
    file = tmp_path / "tokens"
    file.write_text("old")
    access = Asked(HttpSettings("127.0.0.1:0", token_file=str(file)))
    observations = Observations("late")
    async with contextlib.AsyncExitStack() as stack:
        updates = MemoryBroker().topic("models")
        await updates.create()
        snapshot = ModelSnapshot(learned().parameters(), 1)
        await write(updates, ModelUpdateEncoder("late", 1, clock=SystemClock()).encode([snapshot]))
        observations.served = await stack.enter_async_context(ServedModel(updates, "late"))
        await observations.served.ready()
        settings = HttpSettings("127.0.0.1:0", token_file=str(file))
        address = await stack.enter_async_context(serving(observations, settings, access))
        port = int(address.rpartition(":")[2])
        asked = request("/predict", b'{"km": 600.0}', "Authorization: Bearer old")
        codes = []
        for part in (asked[:-5], asked):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(part)
            if part is not asked:
                async with asyncio.timeout(PATIENCE_S):
                    while not access.times:
                        await asyncio.sleep(0)
                file.write_text("new")
                access.reload()
                writer.write(asked[-5:])
            codes.append(int((await reader.readline()).split()[1]))
            writer.close()
    assert codes == [200, 401]


async def test_new_connections_get_the_new_certificate_unless_it_is_a_wrong_one(tmp_path: Path) -> None:
    """A service was started again each time that its certificate was renewed."""
    authority = Authority(tmp_path, "authority")
    certificate, key = authority.sign("service", "IP:127.0.0.1")
    trusting = ssl.create_default_context(cafile=str(authority.certificate))

    async def shown(address: str) -> bytes | None:
        host, port = address.removeprefix("https://").split(":")
        _, writer = await asyncio.open_connection(host, int(port), ssl=trusting)
        found: bytes | None = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
        writer.close()
        return found

    settings = HttpSettings("127.0.0.1:0", tls_certificate=str(certificate), tls_key=str(key))
    async with watched(settings) as (address, clock):
        first = await shown(address)
        authority.sign("service", "IP:127.0.0.1")
        await clock.look()
        second = await shown(address)
        expected = ssl.PEM_cert_to_DER_cert(certificate.read_text())
        certificate.write_text("half of a certifi")
        await clock.look()
        assert await shown(address) == second
    assert first != second == expected


@pytest.mark.parametrize("text", ["teach s3cret", "all s3 cret", "# only a comment"])
def test_a_file_without_tokens_is_refused_without_showing_it(tmp_path: Path, text: str) -> None:
    """A service whose file had no token served everyone; one with a wrong line told it in the log."""
    file = tmp_path / "tokens"
    file.write_text(text)
    with pytest.raises(ConfigurationError, match=r"\[http\]: expected a token") as raised:
        Access(HttpSettings(token_file=str(file)))
    assert "cret" not in str(raised.value)
