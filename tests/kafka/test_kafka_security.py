"""A broker requires passwords, certificates and rights."""

import asyncio
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from aiokafka.protocol.admin import CreateAclsRequest
from support.certificates import Authority, key_store
from support.kafka_fixtures import skip_without_java
from support.kafka_server import KafkaServer, running_kafka
from support.waiting import PATIENCE_S
from topics.topic_case import begun, created, patiently, read_to_end, values_of, write

from streamiter import Checkpoints, Flow
from streamiter.errors import ConfigurationError, JobFailed, TopicDenied, TopicNotFound, TopicUnavailable
from streamiter.learn import train_online
from streamiter.models import model_updates
from streamiter.topics import OutgoingBatch, ReadRequest, Topic, topic
from streamiter.topics.compacted import COMMIT_TOPIC, ensure_commit_topic, last_value
from streamiter.values.helpers.clock import SystemClock
from streamiter_kafka.cluster import BrokerConnections
from streamiter_kafka.options import KafkaAddress, KafkaOptions

PASSWORD = "right-horse"
QUICK = {"give_up_after_s": 2.0, "request_timeout_s": 1.0}
# The broker checks a login at most once a second, and delays each refusal on purpose.
PATIENT = {"give_up_after_s": 20.0}


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with certificates: an authority, a broker and a client signed by it, and another authority."""
    directory = tmp_path_factory.mktemp("certificates")
    authority = Authority(directory, "authority")
    key_store(directory, *authority.sign("broker", "IP:127.0.0.1"))
    authority.sign("client", "DNS:client")
    Authority(directory, "stranger")
    return directory


@pytest.fixture(scope="module")
def guarded_broker(certificates: Path) -> Iterator[KafkaServer]:
    """Start a broker that asks for passwords, for certificates, or for both.

    Alice has all rights, bob has none, and each other user has the rights that a test gives them.
    """
    skip_without_java()
    plain = "org.apache.kafka.common.security.plain.PlainLoginModule required"
    scram = "org.apache.kafka.common.security.scram.ScramLoginModule required;"
    names = ("alice", "bob", "carol", "dora", "emil", "fred", "gina")
    users = " ".join(f'user_{name}="{PASSWORD}"' for name in names) + ";"
    store = {"keystore": certificates / "broker-store.pem", "truststore": certificates / "authority.pem"}
    settings = {
        "authorizer.class.name": "org.apache.kafka.metadata.authorizer.StandardAuthorizer",
        "super.users": "User:ANONYMOUS;User:alice;User:CN=client",
        **{f"ssl.{name}.type": "PEM" for name in store},
        **{f"ssl.{name}.location": str(file) for name, file in store.items()},
        "listener.name.mutual.ssl.client.auth": "required",
        "sasl.enabled.mechanisms": "PLAIN,SCRAM-SHA-256,SCRAM-SHA-512",
    }
    for listener in ("password", "both"):
        settings[f"listener.name.{listener}.plain.sasl.jaas.config"] = f"{plain} {users}"
        settings[f"listener.name.{listener}.scram-sha-256.sasl.jaas.config"] = scram
        settings[f"listener.name.{listener}.scram-sha-512.sasl.jaas.config"] = scram
    listeners = {"PASSWORD": "SASL_PLAINTEXT", "TLS": "SSL", "MUTUAL": "SSL", "BOTH": "SASL_SSL"}
    user = f"[name=alice,password={PASSWORD}]"
    format_options = ("--add-scram", f"SCRAM-SHA-256={user}", "--add-scram", f"SCRAM-SHA-512={user}")
    with running_kafka(settings=settings, listeners=listeners, format_options=format_options) as server:
        yield server


def url(broker: KafkaServer, listener: str, name: str) -> str:
    return f"kafka://{broker.address(listener)}/{name}"


def as_user(name: str, password: str = PASSWORD, **options: object) -> dict[str, object]:
    return {
        "security_protocol": "SASL_PLAINTEXT",
        "sasl_username": name,
        "sasl_password": password,
        **PATIENT,
        **options,
    }


async def check_round_trip(made: Topic) -> None:
    """Check that a topic can be created, written, written in a transaction, and read."""
    await made.create()
    await write(made, [b"a"])
    transactions = await begun(made, f"{made.name}-t")
    await transactions.write(made, OutgoingBatch([b"b"]))
    await patiently(transactions.commit())
    await transactions.close()
    assert values_of(await read_to_end(made)) == [b"a", b"b"]


@pytest.mark.parametrize("mechanism", ["PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512"])
async def test_the_right_password_is_accepted(guarded_broker: KafkaServer, topic_prefix: str, mechanism: str) -> None:
    """A login with the right password failed, and every hosted Kafka asks for one."""
    made = topic(url(guarded_broker, "PASSWORD", topic_prefix + "clicks"), **as_user("alice", sasl_mechanism=mechanism))
    await check_round_trip(made)


@pytest.mark.parametrize("mechanism", ["PLAIN", "SCRAM-SHA-256"])
async def test_no_log_record_has_the_login(
    guarded_broker: KafkaServer, mechanism: str, caplog: pytest.LogCaptureFixture
) -> None:
    """At level DEBUG the library logged each request unchanged, and the login request contained the password."""
    caplog.set_level("DEBUG")
    for password in (PASSWORD, "wrong-horse"):
        made = topic(url(guarded_broker, "PASSWORD", "clicks"), **as_user("bob", password, sasl_mechanism=mechanism))
        with pytest.raises((TopicDenied, TopicNotFound)):
            await patiently(made.describe())
    logged = [record.getMessage() for record in caplog.records if record.name.startswith("aiokafka")]
    assert any("Request to" in message for message in logged)
    for message in logged:
        assert PASSWORD not in message
        assert "wrong-horse" not in message
        assert "bob" not in message


@pytest.mark.parametrize("mechanism", ["PLAIN", "SCRAM-SHA-256"])
async def test_a_wrong_password_is_an_error_that_does_not_repeat_it(
    guarded_broker: KafkaServer, mechanism: str
) -> None:
    """A client repeated a wrong login silently, which locked the account."""
    made = topic(url(guarded_broker, "PASSWORD", "clicks"), **as_user("alice", "wrong-horse", sasl_mechanism=mechanism))
    for call in (made.describe, made.open_writer, lambda: made.open_reader(ReadRequest())):
        with pytest.raises(TopicDenied, match="sasl_password") as caught:
            await patiently(call())
        assert guarded_broker.address("PASSWORD") in str(caught.value)
        assert "wrong-horse" not in str(caught.value)


async def test_a_user_without_rights_gets_an_error_that_names_the_missing_rights(
    guarded_broker: KafkaServer, topic_prefix: str
) -> None:
    """A missing right was reported as a missing topic, and the search for the reason took an afternoon."""
    name = topic_prefix + "clicks"
    await topic(url(guarded_broker, "PLAINTEXT", name)).create()
    made = topic(url(guarded_broker, "PASSWORD", name), **as_user("bob"))
    for call in (made.describe, made.open_writer, lambda: made.open_reader(ReadRequest())):
        with pytest.raises(TopicDenied, match="TOPIC_AUTHORIZATION_FAILED"):
            await patiently(call())
    with pytest.raises(TopicDenied, match="AUTHORIZATION_FAILED"):
        await patiently(made.open_transactions("t"))


# The protocol's numbers of kinds of resources, operations, patterns and permissions.
TOPIC, TRANSACTIONAL_ID = 2, 5
READ, WRITE = 3, 4  # each of them also permits describing
LITERAL, ALLOW = 3, 3


async def allow(broker: KafkaServer, user: str, rights: list[tuple[int, str, int]]) -> None:
    address = KafkaAddress.parse(f"kafka://{broker.bootstrap}/")
    async with BrokerConnections(address.servers, KafkaOptions(), "rights") as cluster:
        for kind, name, operation in rights:
            request = CreateAclsRequest(kind, name, LITERAL, f"User:{user}", "*", operation, ALLOW)
            response = await cluster.request_any(request)
            assert [code for code, *_ in response.creation_responses] == [0]


async def test_the_commit_topic_needs_no_right_but_to_read_and_write_it(
    guarded_broker: KafkaServer, topic_prefix: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A flow could not run exactly once where administrators create all topics, and errors did not name the missing
    right.
    """
    administered = await created(topic(url(guarded_broker, "PLAINTEXT", topic_prefix + "outputs")))
    outputs = topic(url(guarded_broker, "PASSWORD", topic_prefix + "outputs"), **as_user("carol"))
    for step in range(2):
        if step:
            rights = [(TOPIC, name, right) for name in (outputs.name, COMMIT_TOPIC) for right in (READ, WRITE)]
            await allow(guarded_broker, "carol", [*rights, (TRANSACTIONAL_ID, "streamiter-flow", WRITE)])
        with pytest.raises(TopicDenied, match=r"1 partition and cleanup\.policy=compact, ") as caught:
            await patiently(ensure_commit_topic(outputs))
        assert COMMIT_TOPIC in str(caught.value)
    await ensure_commit_topic(administered)
    commits = await patiently(ensure_commit_topic(outputs))
    transactions = await begun(commits, "streamiter-flow")
    await patiently(transactions.write(outputs, OutgoingBatch([b"output"])))
    await patiently(transactions.write(commits, OutgoingBatch([b"commit"], keys=[b"flow"])))
    await patiently(transactions.commit())
    await transactions.close()
    record = await patiently(last_value(commits, b"flow", clock=SystemClock()))
    assert record is not None
    assert record.value == b"commit"
    assert values_of(await read_to_end(outputs)) == [b"output"]
    assert [record for record in caplog.records if record.name == "streamiter.topics"] == []


async def test_encrypted_connections_work(guarded_broker: KafkaServer, certificates: Path, topic_prefix: str) -> None:
    """A connection with TLS failed, although the broker's authority was given in a file."""
    made = topic(
        url(guarded_broker, "BOTH", topic_prefix + "clicks"),
        **as_user("alice", security_protocol="SASL_SSL", ssl_cafile=str(certificates / "authority.pem")),
    )
    await check_round_trip(made)


async def test_a_client_shows_its_own_certificate(
    guarded_broker: KafkaServer, certificates: Path, topic_prefix: str
) -> None:
    """A client that has a certificate instead of a password could not log in."""
    made = topic(
        url(guarded_broker, "MUTUAL", topic_prefix + "clicks"),
        security_protocol="SSL",
        ssl_cafile=str(certificates / "authority.pem"),
        ssl_certfile=str(certificates / "client.pem"),
        ssl_keyfile=str(certificates / "client.key"),
        **PATIENT,
    )
    await check_round_trip(made)


@pytest.mark.parametrize("options", [{}, {"ssl_cafile": "stranger.pem"}])
async def test_a_broker_without_a_valid_certificate_is_refused_with_the_option_to_set(
    guarded_broker: KafkaServer, certificates: Path, options: dict[str, str]
) -> None:
    """A client sent its password to an unknown server at the broker's address."""
    files = {name: str(certificates / file) for name, file in options.items()}
    made = topic(url(guarded_broker, "TLS", "clicks"), security_protocol="SSL", **files, **PATIENT)
    with pytest.raises(TopicDenied, match=r"certificate does not verify.*ssl_cafile"):
        await patiently(made.describe())


async def test_a_broker_of_another_name_is_refused_unless_that_is_allowed(
    guarded_broker: KafkaServer, certificates: Path, topic_prefix: str
) -> None:
    """A client accepted a broker by a name that is not in the broker's certificate, without the option for it."""
    port = guarded_broker.address("TLS").rpartition(":")[2]
    by_name = f"kafka://localhost:{port}/{topic_prefix}clicks"
    options = {"security_protocol": "SSL", "ssl_cafile": str(certificates / "authority.pem"), **PATIENT}
    with pytest.raises(TopicDenied, match="localhost"):
        await patiently(topic(by_name, **options).describe())
    await check_round_trip(topic(by_name, ssl_check_hostname=False, **options))


async def test_the_wrong_protocol_is_an_error_with_a_hint(guarded_broker: KafkaServer, certificates: Path) -> None:
    """The broker dropped a connection of the wrong protocol, and the error did not name the reason."""
    plain_to_tls = topic(url(guarded_broker, "TLS", "clicks"), **QUICK)
    tls = {"security_protocol": "SSL", "ssl_cafile": str(certificates / "authority.pem")}
    tls_to_plain = topic(url(guarded_broker, "PLAINTEXT", "clicks"), **tls, **QUICK)
    both = asyncio.gather(plain_to_tls.describe(), tls_to_plain.describe(), return_exceptions=True)
    to_tls, to_plain = await patiently(both)
    assert isinstance(to_tls, TopicUnavailable)
    assert re.search(r"security_protocol|no answer|no connection", str(to_tls))
    assert isinstance(to_plain, TopicUnavailable | TopicDenied)
    assert guarded_broker.bootstrap in str(to_plain)


async def test_files_that_do_not_fit_are_named(guarded_broker: KafkaServer, certificates: Path) -> None:
    """The library's error KEY_VALUES_MISMATCH named no file."""
    made = topic(
        url(guarded_broker, "MUTUAL", "clicks"),
        security_protocol="SSL",
        ssl_cafile=str(certificates / "authority.pem"),
        ssl_certfile=str(certificates / "client.pem"),
        ssl_keyfile=str(certificates / "broker.key"),
    )
    with pytest.raises(ConfigurationError, match=r"client\.pem.*broker\.key"):
        await patiently(made.describe())


RESOURCES = {"topic": TOPIC, "transactional id": TRANSACTIONAL_ID, "group": 3}
KAFKA_PAGE = Path(__file__).parents[2] / "docs" / "kafka.md"


def documented_rights(principal: str, prefix: str) -> list[tuple[int, str, int]]:
    """Return the rights of a principal in the table of the page, for topics and ids with a prefix."""
    rows = re.findall(
        rf"^\| {principal} \| ([a-z ]+) \| `(.+)` \| ([\w, ]+) \|$",
        KAFKA_PAGE.read_text(encoding="utf-8"),
        re.MULTILINE,
    )
    return [
        (RESOURCES[resource], prefixed(name, prefix), {"Read": READ, "Write": WRITE}[operation])
        for resource, name, operations in rows
        for operation in operations.split(", ")
    ]


def prefixed(name: str, prefix: str) -> str:
    if name == COMMIT_TOPIC:
        return name
    return name.replace("late-flights", f"{prefix}late-flights") if name.startswith("streamiter-") else prefix + name


async def test_the_documented_rights_suffice_for_the_service_its_producer_and_its_consumers(
    guarded_broker: KafkaServer, topic_prefix: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """An administrator gave the rights of the page, and the service failed at its first checkpoint."""
    names = ("flights", "model-updates", "flights-dead-letters")
    for name in names:
        await topic(url(guarded_broker, "PLAINTEXT", topic_prefix + name)).create()
    await ensure_commit_topic(topic(url(guarded_broker, "PLAINTEXT", topic_prefix + "flights")))

    def topics_of(user: str) -> list[Topic]:
        return [topic(url(guarded_broker, "PASSWORD", topic_prefix + name), **as_user(user)) for name in names]

    for user, principal in (("dora", "service"), ("emil", "producer"), ("fred", "consumer")):
        await allow(guarded_broker, user, documented_rights(principal, topic_prefix))
    events, *_ = topics_of("emil")
    await patiently(write(events, [b'{"km": 1, "late": true}', b"no JSON"] * 50))

    events, updates, dead_letters = topics_of("dora")
    flow = Flow(f"{topic_prefix}late-flights")
    training = train_online(flow.source(events, stop="latest", dead_letter=dead_letters), label="late")
    training.models.publish_model(updates, model="late-flights")
    job = await flow.start(checkpoints=Checkpoints(tmp_path / "checkpoints", interval_s=0.2))
    await asyncio.wait_for(job.wait(), PATIENCE_S)
    logged = [record for record in caplog.records if record.name.startswith("streamiter")]
    assert [record.getMessage() for record in logged if record.levelname != "INFO"] == []

    _, updates, _ = topics_of("fred")
    seen = [update async for update in model_updates(updates, "late-flights", follow=False)]
    assert seen[-1].records == 50
    with pytest.raises(TopicDenied):
        await patiently(write(updates, [b"a model of a stranger"]))


async def test_the_documented_rights_suffice_for_a_job_without_state_and_a_missing_one_is_named(
    guarded_broker: KafkaServer, topic_prefix: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A job that could not commit its positions ran, and read everything again after its restart."""
    names = [topic_prefix + name for name in ("flights", "flights-clean")]
    for name in names:
        await topic(url(guarded_broker, "PLAINTEXT", name)).create()
    await write(topic(url(guarded_broker, "PLAINTEXT", names[0])), [b"1", b"2"])
    flights, clean = (topic(url(guarded_broker, "PASSWORD", name), **as_user("gina")) for name in names)
    group = f"streamiter-{topic_prefix}late-flights"

    async def run() -> None:
        flow = Flow(f"{topic_prefix}late-flights")
        flow.source(flights, start="committed", stop="latest", name="flights").sink(clean)
        await asyncio.wait_for((await flow.start()).wait(), PATIENCE_S)

    *others, right_on_group = documented_rights("job without state", topic_prefix)
    assert right_on_group == (RESOURCES["group"], group, READ)
    await allow(guarded_broker, "gina", others)
    with pytest.raises(JobFailed) as caught:
        await run()
    assert "step 'flights'" in str(caught.value)
    assert f"consumer group {group!r}" in str(caught.value)
    assert "GROUP_AUTHORIZATION_FAILED; ask for the right to do this" in str(caught.value)
    await allow(guarded_broker, "gina", [right_on_group])
    for _ in range(2):
        await run()
    assert values_of(await read_to_end(topic(url(guarded_broker, "PLAINTEXT", names[1])))) == [b"1", b"2"]
    logged = [record for record in caplog.records if record.name.startswith("streamiter")]
    assert [record.getMessage() for record in logged if record.levelname != "INFO"] == []
