"""A broker takes tokens (OAUTHBEARER), out of a file, of an endpoint of OpenID Connect, or of a provider."""

import asyncio
import base64
import json
import pickle
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any
from urllib.parse import parse_qs

import pytest
from aiokafka.abc import AbstractTokenProvider
from support.kafka_server import KafkaServer
from support.waiting import until
from topics.topic_case import ManualClock, patiently, read_to_end, values_of, write

from streamiter import Flow
from streamiter.errors import ConfigurationError, TopicDenied, TopicError, TopicUnavailable
from streamiter.topics import OutgoingBatch, Topic, topic
from streamiter_kafka.tokens import ClientCredentials
from streamiter_kafka.trouble import BrokerTrouble

OAUTH = {"security_protocol": "SASL_PLAINTEXT", "sasl_mechanism": "OAUTHBEARER"}
SECRET = "right-horse"
# A connection ends when its token has expired; brokers compare whole seconds.
LIFE_S = 2


def unsecured_token(subject: str = "alice", life_s: float = 60.0) -> str:
    """Return a token without a signature, as Kafka's own test mode takes it."""
    now = time.time()
    parts: list[dict[str, Any]] = [{"alg": "none"}, {"sub": subject, "iat": now - 1, "exp": now + life_s}]
    encoded = [base64.urlsafe_b64encode(json.dumps(part).encode()).rstrip(b"=").decode() for part in parts]
    return ".".join([*encoded, ""])


class Provider(AbstractTokenProvider):  # type: ignore[misc]
    """A provider as users of aiokafka have it."""

    def __init__(self, life_s: float = 60.0) -> None:
        self.life_s = life_s
        self.asked = 0

    async def token(self) -> str:
        self.asked += 1
        return unsecured_token(life_s=self.life_s)


class Endpoint(ThreadingHTTPServer):
    """An endpoint of OpenID Connect that knows one client; ``answers`` come before its own."""

    def __init__(self) -> None:
        self.forms: list[dict[str, list[str]]] = []
        self.answers: list[tuple[int, object]] = []
        super().__init__(("127.0.0.1", 0), _AnswerTokens)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/token"


class _AnswerTokens(BaseHTTPRequestHandler):
    server: Endpoint

    def do_POST(self) -> None:
        form = self.rfile.read(int(self.headers["content-length"])).decode()
        self.server.forms.append(parse_qs(form))
        login = base64.b64decode(self.headers["authorization"].removeprefix("Basic ")).decode()
        if self.server.answers:
            status, answer = self.server.answers.pop(0)
        elif login != f"job%201:{SECRET}":
            status, answer = 401, {"error": "invalid_client", "error_description": f"no client {login}"}
        else:
            status, answer = 200, {"access_token": unsecured_token(), "token_type": "Bearer", "expires_in": 100}
        body = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Write no log."""


@pytest.fixture
def endpoint() -> Iterator[Endpoint]:
    with Endpoint() as server:
        thread = Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()


async def check_round_trip(made: Topic) -> None:
    await made.create()
    await write(made, [b"a"])
    transactions = await made.open_transactions(f"{made.name}-t")
    await transactions.begin()
    await transactions.write(made, OutgoingBatch([b"b"]))
    await patiently(transactions.commit())
    await transactions.close()
    assert values_of(await read_to_end(made)) == [b"a", b"b"]


def of_endpoint(endpoint: Endpoint, secret: str = SECRET) -> dict[str, Any]:
    return {
        **OAUTH,
        "sasl_oauth_token_endpoint": endpoint.url,
        "sasl_oauth_client_id": "job 1",
        "sasl_oauth_client_secret": secret,
        "sasl_oauth_scope": "kafka",
    }


async def test_tokens_of_a_file_an_endpoint_and_a_provider(
    breakable_broker: KafkaServer, endpoint: Endpoint, topic_prefix: str, tmp_path: Path
) -> None:
    url, file = f"kafka://{breakable_broker.address('TOKENS')}/{topic_prefix}", tmp_path / "token.txt"
    file.write_text(f"{unsecured_token()}\n")
    provider = Provider()
    await check_round_trip(topic(f"{url}provider", sasl_oauth_token_provider=provider, **OAUTH))
    assert provider.asked > 3
    await check_round_trip(topic(f"{url}file", sasl_oauth_token_file=str(file), **OAUTH))
    await check_round_trip(topic(f"{url}endpoint", **of_endpoint(endpoint)))
    assert endpoint.forms == [
        {"grant_type": ["client_credentials"], "scope": ["kafka"]}
    ]  # one token for all connections
    sent = pickle.loads(pickle.dumps(topic(f"{url}endpoint", **of_endpoint(endpoint))))  # as Ray sends flows
    assert values_of(await read_to_end(sent)) == [b"a", b"b"]


async def test_a_job_survives_the_end_of_its_tokens(breakable_broker: KafkaServer, topic_prefix: str) -> None:
    """A broker ends a connection whose token has expired; the client connects again, and no record is lost."""
    provider = Provider(LIFE_S)
    made = topic(
        f"kafka://{breakable_broker.address('TOKENS')}/{topic_prefix}clicks",
        sasl_oauth_token_provider=provider,
        **OAUTH,
    )
    await made.create()
    flow = Flow("read")
    seen: list[int] = []
    flow.source(made).map(seen.append).collect()
    job = await flow.start()
    writer = await made.open_writer()
    logins, count = provider.asked, 0
    while provider.asked < logins + 6:  # each of a few connections is opened again at least once
        await writer.write(OutgoingBatch([b"%d" % count]))
        await writer.flush()
        count += 1
        await asyncio.sleep(0.02)  # tokens end by the clock of the broker
    await until(lambda: len(seen) >= count)
    await writer.close()
    await job.stop()
    assert seen == list(range(count))


@pytest.mark.parametrize("token", [unsecured_token(life_s=-10), "no.token.", unsecured_token().replace(".", "", 1)])
async def test_a_token_that_the_broker_refuses(
    breakable_broker: KafkaServer, tmp_path: Path, token: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Aiokafka took the refusal for a login, and the job waited for a minute for a broker that dropped it."""
    caplog.set_level("DEBUG")
    file = tmp_path / "token.txt"
    file.write_text(token)
    made = topic(f"kafka://{breakable_broker.address('TOKENS')}/clicks", sasl_oauth_token_file=str(file), **OAUTH)
    with pytest.raises(
        TopicDenied, match=r"refused the login by OAUTHBEARER .*check sasl_mechanism, the token and its issuer"
    ) as denied:
        await patiently(made.describe())
    logged = "\n".join(record.getMessage() for record in caplog.records)
    assert token not in f"{denied.value}{logged}{made!r}{made.options!r}"


async def test_a_file_whose_token_is_gone(breakable_broker: KafkaServer, tmp_path: Path) -> None:
    file = tmp_path / "token.txt"
    file.write_text(unsecured_token())
    made = topic(f"kafka://{breakable_broker.address('TOKENS')}/clicks", sasl_oauth_token_file=str(file), **OAUTH)
    file.write_text("")
    with pytest.raises(TopicDenied, match=r"expected a token \(a text without spaces\) for the login by OAUTHBEARER"):
        await patiently(made.describe())
    file.unlink()
    with pytest.raises(
        ConfigurationError, match=r"expected sasl_oauth_token_file to name a file with a token, given .*No such"
    ):
        await patiently(made.describe())


async def test_an_endpoint_that_refuses_the_client(breakable_broker: KafkaServer, endpoint: Endpoint) -> None:
    made = topic(f"kafka://{breakable_broker.address('TOKENS')}/clicks", **of_endpoint(endpoint, "wrong-horse"))
    with pytest.raises(TopicDenied) as denied:
        await patiently(made.describe())
    assert str(denied.value).endswith(
        f"sasl_oauth_token_endpoint {endpoint.url!r}: it refuses the client (401, invalid_client: no client "
        "job%201:…); check sasl_oauth_client_id, sasl_oauth_client_secret and sasl_oauth_scope"
    )
    endpoint.answers = [(200, {"no": "token"})]
    with pytest.raises(TopicError, match=r"expected an access_token in JSON, given status 200 \(no reason\)"):
        await patiently(made.describe())


async def test_an_endpoint_that_is_away(breakable_broker: KafkaServer, endpoint: Endpoint, topic_prefix: str) -> None:
    url = f"kafka://{breakable_broker.address('TOKENS')}/{topic_prefix}"
    endpoint.answers = [(503, {}), (429, [])]
    await patiently(topic(f"{url}clicks", **of_endpoint(endpoint)).create())
    options = {**of_endpoint(endpoint), "sasl_oauth_token_endpoint": "http://127.0.0.1:9/token", "give_up_after_s": 0.2}
    with pytest.raises(
        TopicUnavailable, match=r"sasl_oauth_token_endpoint 'http://127\.0\.0\.1:9/token': no answer \("
    ):
        await patiently(topic(f"{url}clicks", **options).describe())


async def test_a_token_is_used_for_most_of_its_life(endpoint: Endpoint) -> None:
    clock = ManualClock()
    tokens = ClientCredentials(endpoint.url, ("job 1", SECRET), None, None, "topic 't'", 5.0, clock)
    assert len(set(await asyncio.gather(*(tokens.token() for _ in range(5))))) == 1
    clock.advance(79)
    await tokens.token()
    assert endpoint.forms == [{"grant_type": ["client_credentials"]}]
    clock.advance(2)
    endpoint.answers = [(500, {}), (200, {"access_token": "short", "expires_in": 1})]
    with pytest.raises(BrokerTrouble):
        await tokens.token()
    assert await tokens.token() == "short"
    assert len(endpoint.forms) == 3
