"""The page of a service, in a real browser, and its documents."""

from __future__ import annotations

import asyncio
import re
import socket
import threading
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import orjson
import pytest
from models.embedding_cases import embedded
from models.model_case import write
from models.shape_cases import linear_part, shaped
from service.http_case import case, problem_of
from service.service_models import trained_in_epochs
from support.chromium import chromium, visit
from support.waiting import PATIENCE_S, until

from streamiter.learn import FieldWatch
from streamiter.learn.online.challengers import ComparedRows
from streamiter.learn.quality.field_watch import WatchedFields
from streamiter.models import ModelSnapshot, ModelUpdateEncoder, ServedModel
from streamiter.service.http.server import serving
from streamiter.service.observing.challenger import Challenger
from streamiter.service.observing.observations import Observations, RejectedRecord
from streamiter.service.observing.page_documents import page_history, page_state
from streamiter.service.observing.quality import ValidationReport
from streamiter.service.service import OnlineLearningService
from streamiter.service.settings.tables import (
    ChallengerSettings,
    CheckpointSettings,
    HttpSettings,
    InputSettings,
    LabelSettings,
    LearnSettings,
    PublishSettings,
    ServiceSettings,
)
from streamiter.topics import OutgoingBatch, topic
from streamiter.values.helpers.clock import SystemClock
from streamiter.values.named_rows import FieldReader

if TYPE_CHECKING:
    from playwright.async_api import Browser

__all__ = ["chromium"]

in_browser = pytest.mark.asyncio(loop_scope="module")
"""These tests share a browser."""

SCRIPT = "<script>window.injected = true</script><img src=x onerror=window.injected=true>"


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the documents follow each other sooner, and let a server that ends not wait for open pages: all tests have
    one.
    """
    monkeypatch.setattr("streamiter.service.http.server._GRACE_S", 0.2)
    for module in ("http.page", "surfaces"):
        monkeypatch.setattr(f"streamiter.service.{module}.SAMPLE_S", 0.2)


@asynccontextmanager
async def learning(folder: Path) -> AsyncIterator[str]:
    """Run a service on topics in memory; give the address of its page."""
    urls = [f"memory://{folder.name}-{name}" for name in ("trips", "updates", "dead")]
    for url in urls:
        await topic(url).create()
    settings = ServiceSettings(
        folder.name,  # Memory has the commits of all flows of the process, by their names.
        InputSettings(urls[0], dead_letter=urls[2]),
        LearnSettings("classification", LabelSettings("late")),
        PublishSettings(urls[1], every_s=0.1),
        checkpoints=CheckpointSettings(str(folder), interval_s=0.2),
        http=HttpSettings("127.0.0.1:0"),
    )
    service = OnlineLearningService(settings)
    writer = await topic(urls[0]).open_writer()

    async def write() -> None:
        number = 0
        while True:
            rows: list[Any] = [{"km": float(n % 7), "late": n % 7 > 3} for n in range(number, number + 100)]
            await writer.write(OutgoingBatch([*map(orjson.dumps, rows), SCRIPT.encode()]))
            number += 100
            await asyncio.sleep(0.05)

    tasks = [asyncio.create_task(service.serve()), asyncio.create_task(write())]
    try:
        async with asyncio.timeout(PATIENCE_S):
            while service.address is None:
                await asyncio.sleep(0.02)
        yield service.address
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)


@in_browser
async def test_the_page_shows_a_service_that_learns(tmp_path: Path, chromium: Browser) -> None:
    """The figures were on four pages, and the one that was open said nothing of a model that was an hour old."""
    async with learning(tmp_path) as address, visit(chromium, address) as visited:
        page = visited.page
        await visited.says("#sentence", "All is well")
        await visited.says("#flow svg", "mini-batches")
        await visited.says("#loss", "0.")
        for tile in ("events", "lag", "loss", "auc", "version", "checkpoint"):
            await visited.says(f"#{tile}", re.compile(r"\d"))
        assert await page.locator("#flow .step").count() >= 10
        # Its training is asynchronous: neither the loop nor its steps have epochs.
        await visited.says("#flow svg", re.compile(r"iteration · [\d,]+ records fed back"))
        assert "epoch" not in (await page.locator("#flow svg").text_content() or "")
        assert await page.locator("#quality .series").count() == 2
        # The first screen has everything down to the flow.
        assert await page.evaluate("document.querySelector('#flow').getBoundingClientRect().bottom") <= 800
        await visited.says("#versions tbody", "1.")
        await visited.says("#checkpoints tbody", "KiB")
        # A record of a stranger is text, not a part of the page.
        await visited.says("#dead tbody", SCRIPT)
        assert await page.evaluate("window.injected") is None
        # A phone, and a screen of 1280 at 200 %: nothing is outside of the screen, and the steps are a table.
        await page.emulate_media(color_scheme="dark")
        for width in (360, 640):
            await page.set_viewport_size({"width": width, "height": 800})
            await visited.says("#flow tbody", "mini-batches")
            assert await page.evaluate("document.documentElement.scrollWidth") == width
        assert {url.split("/")[2] for url in visited.requests} == {address.removeprefix("http://")}
        assert visited.complaints == []


@in_browser
async def test_unknown_figures_are_dashes(chromium: Browser) -> None:
    """A rate of 0 was shown before the first sample, and read as a consumer that stands still."""
    async with case(versions=0) as service, visit(chromium, service.address) as visited:
        await visited.says("#sentence", "Not ready: starting")
        await visited.says("#problems", "no model to predict with")
        for tile in ("events", "lag", "loss", "auc", "version", "checkpoint"):
            assert await visited.text(f"#{tile}") == "–"
        await visited.says("#dead .rows", "No record has been refused.")  # It comes after the figures.
        assert visited.complaints == []


@in_browser
async def test_the_page_connects_again_and_marks_the_gap(chromium: Browser) -> None:
    """After a restart the page showed the figures of the old process, as if nothing had happened."""
    async with case(flow=True) as service:
        address = service.address
        service.observations.enter("running")
        service.observations.sample()
        shown = visit(chromium, address)
        visited = await shown.__aenter__()
        await visited.says("#connection", "live")
    try:
        await visited.says("#sentence", "No answer of the service since")
        assert await visited.page.locator("#verdict").get_attribute("data-level") == "unknown"
        # The page's own time, which decides whether there was a gap.
        later = SystemClock().now_ms() + 30_000
        async with case(flow=True, address=address.removeprefix("http://")) as service:
            service.observations.clock = _At(later)
            service.observations.enter("running")
            service.observations.sample()
            await visited.says("#connection", "live")
            await visited.says("#sentence", "All is well")
            assert await visited.page.locator("#rate .gap").count() == 1
            described = await visited.page.locator("#rate svg").get_attribute("aria-label") or ""
            assert "Without data: 1 time" in described
    finally:
        await shown.__aexit__(None, None, None)


class _At(SystemClock):
    """A clock that is ahead."""

    def __init__(self, now_ms: int) -> None:
        super().__init__()
        self._ahead_ms = now_ms - SystemClock().now_ms()

    def now_ms(self) -> int:
        return super().now_ms() + self._ahead_ms


@in_browser
async def test_everything_is_reached_by_the_keyboard_and_has_a_name(chromium: Browser) -> None:
    """Without a mouse the tables behind charts could not be opened; a screen reader said "button" four times."""
    async with case(flow=True) as service, visit(chromium, service.address) as visited:
        service.observations.enter("running")
        page = visited.page
        await visited.says("#flow svg", "add")
        await visited.says("#dead .rows", "No record has been refused.")  # Before it, its place has no name.
        reached = []
        for _ in range(30):
            await page.keyboard.press("Tab")
            focused = await page.evaluate(
                "document.activeElement.getAttribute('aria-label') ?? document.activeElement.textContent"
            )
            if focused in reached or await page.evaluate("document.activeElement === document.body"):
                break
            reached.append(focused)
        expected = ["Skip to the figures", "Table of Quality, last hour", "Table of Flow", "Dead letters", "OpenAPI"]
        assert [name for name in reached if name in expected] == expected, reached
        button = page.get_by_role("button", name="Table of Events per second")
        await button.focus()
        await page.keyboard.press("Enter")
        assert await button.get_attribute("aria-expanded") == "true"
        await page.get_by_role("region", name="Events per second, a row for each minute").wait_for()
        await page.get_by_role("radio", name="Log loss").focus()
        await page.keyboard.press("ArrowRight")
        await page.get_by_role("img", name="AUC in the last hour. AUC: no data yet").wait_for()
        tree = await page.locator("body").aria_snapshot()
        for named in ('heading "late"', 'img "The steps of the flow. items: ', 'region "Dead letters"', "status:"):
            assert named in tree, tree


@in_browser
async def test_nothing_is_loaded_from_elsewhere_and_no_script_is_taken_from_data(chromium: Browser) -> None:
    """A dead letter with a script ran in the browser of an operator, and sent the token of the service away."""
    from playwright.async_api import Error as BrowserError

    async with case() as service, visit(chromium, service.address) as visited:
        answer = await service.client.get("/")
        policy = answer.headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        await visited.says("#connection", "live")
        with pytest.raises(BrowserError, match="TrustedScript"):
            await visited.page.evaluate(
                "document.body.appendChild(document.createElement('script')).text = 'injected = 1'"
            )
        with pytest.raises(BrowserError, match="TrustedHTML"):
            await visited.page.evaluate("document.body.innerHTML = '<img>'")
        elsewhere = "fetch('http://localhost:1/').then(() => 'sent', error => error.message)"
        assert await visited.page.evaluate(elsewhere) == "Failed to fetch"
        await until(lambda: any("connect-src" in complaint for complaint in visited.complaints))


@in_browser
async def test_a_browser_opens_the_page_of_a_service_with_a_token(
    chromium: Browser, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The browser did not ask for the token, because the answer named two ways to send it in one header."""
    monkeypatch.setenv("SERVICE_TOKEN", "s3cret")
    given: Any = {"username": "anyone", "password": "s3cret"}
    async with (
        case(token_env="SERVICE_TOKEN") as service,
        visit(chromium, service.address, http_credentials=given) as visited,
    ):
        await visited.says("#connection", "live")
        assert visited.complaints == []


@in_browser
async def test_the_page_draws_what_the_fields_of_a_model_with_tables_do(chromium: Browser) -> None:
    """A model was better than the linear one, and nobody could say what it had learned."""
    model = shaped("softmax", scores=3)
    [place, *_] = model["places"].tolist()
    async with case(model=model) as service, AsyncExitStack() as stack:
        # Before the page is opened: it asks for the details once for each version.
        service.observations.texts_at = lambda places: {place: "town = Kyjiw"} if place in places else {}
        visited = await stack.enter_async_context(visit(chromium, service.address))
        await visited.says("#effects .rows", "town = Kyjiw")
        await visited.says("#pairs", "together: ")
        picture = visited.page.get_by_role("img", name=re.compile(r"^km: from -\d\.\d+ \(.+\) to \d\.\d+ \(.+\)$"))
        assert await picture.locator("rect").count() > 50
        assert visited.complaints == []
        explained = (await service.client.post("/predict?explain=true", json={"km": 7.0, "town": "Roma"})).json()
    assert {"km", "town", "km × load", "(several fields)"} <= explained["predictions"][0]["contributions"].keys()
    async with case(model=linear_part("logit")) as service, visit(chromium, service.address) as visited:
        await visited.says("#weights .rows", "Two versions are needed.")
        assert not await visited.page.locator("#effects").is_visible()
        assert not await visited.page.locator("#embeddings").is_visible()


@in_browser
async def test_the_page_marks_the_fields_that_have_shifted(chromium: Browser) -> None:
    """A field was null for a week, and the page showed a loss that rose."""
    watched, reader = WatchedFields(FieldWatch(reference=400, window=400, sample=1.0), 18), FieldReader(bits=18)
    rows = [{f"n{field}": float(n % 40) for field in range(60)} | {"sky": "sun"} for n in range(800)]
    rows[400:] = [row | {"n7": None, "sky": "snow" if n % 9 == 0 else "sun"} for n, row in enumerate(rows[400:])]
    [report] = watched.add(reader.rows(rows))
    async with case() as service, AsyncExitStack() as stack:
        service.observations.quality.watched(report)
        visited = await stack.enter_async_context(visit(chromium, service.address))
        await visited.says("#fields-window", "2 of 61 have shifted in rows 400 to 799, compared with 400 rows")
        marks = visited.page.locator("#fields .shifted")
        assert await marks.all_text_contents() == ["▲ new values, psi", "▲ missing"]
        assert visited.complaints == []
        details = (await service.client.get("/api/details")).json()["fields"]
        assert (len(details["report"]["fields"]), details["count"]) == (50, 61)
        metrics = (await service.client.get("/metrics")).text
        assert "streamiter_features_shifted{" in metrics
        assert 'streamiter_feature_missing_ratio{field="n7",model=' in metrics
        assert metrics.count("streamiter_feature_psi{") <= 20


@in_browser
async def test_the_page_tells_of_embeddings_and_of_a_challenger(chromium: Browser) -> None:
    """Memory was full, features left as fast as they came, and nobody saw it; or that a challenger was better."""
    model = embedded("logit")
    model |= {"embeddings": model["embeddings"] | {"expired": 3, "evicted": 12_345}}
    async with case(model=model) as service, visit(chromium, service.address) as visited:
        await visited.says("#embeddings-kind", "deepfm, 3 factors")
        await visited.says("#embeddings .rows", "Share of the prediction")
        for figure in ("70.0 %", "Features of 4 fields", "with a vector of their own", "12,345"):
            await visited.says("#embeddings .rows", figure)
        assert not await visited.page.locator("#challenger").is_visible()
        assert service.observations.served is not None
        updates = service.observations.served.topic
        async with ServedModel(updates, "late-b", predict=lambda parameters, row: 0.5) as second:
            service.observations.challenger = Challenger("late-b", second, ChallengerSettings(share=0.1, key="user"))
            await visited.says("#challenger-name", "late-b –")
            await visited.says("#challenger .rows", "not known yet")
            compared = ComparedRows(12_345, 0.25, 0.5, -0.25, -0.375, -0.125, 7)
            version = ModelSnapshot({"weights": [0.5]}, metrics=asdict(compared))
            await write(updates, ModelUpdateEncoder("late-b", 3, clock=SystemClock()).encode([version]))
            await visited.says("#challenger .rows", "yes")
            await visited.says("#challenger-name", "late-b 3.1")
            for figure in ("12,345", "0.2500", "0.5000", "-0.25000", "-0.37500", "-0.12500", "10.0 %"):
                await visited.says("#challenger .rows", figure)
            await visited.page.set_viewport_size({"width": 360, "height": 800})
            assert await visited.page.evaluate("document.documentElement.scrollWidth") == 360
        assert visited.complaints == []


# -- documents ---------------------------------------------------------------------------------------------


async def test_events_are_the_documents_of_the_page_until_the_service_ends() -> None:
    """The service did not end: its server waited for open pages."""
    async with case(flow=True) as service:
        service.observations.enter("running")
        received: list[tuple[str, Any]] = []
        async with service.client.stream("GET", "/api/events") as answer:
            assert answer.headers["content-type"] == "text/event-stream"
            name = ""
            async for line in answer.aiter_lines():
                field, _, value = line.partition(": ")
                if field == "event":
                    name = value
                elif field == "data":
                    received.append((name, orjson.loads(value)))
                    service.observations.enter("finished")
        assert [each[0] for each in received] == ["state", "details", "state"]
        assert [each[1]["phase"] for each in received if each[0] == "state"] == ["running", "finished"]
        state = (await service.client.get("/api/state")).json()
        assert state.keys() == received[0][1].keys()
        assert (await service.client.get("/api/details")).json().keys() == received[1][1].keys()
        drawing = (await service.client.get("/api/drawing")).json()
        assert [step["name"] for step in drawing["steps"]] == [step["name"] for step in state["steps"]]


async def test_a_page_that_does_not_read_holds_a_connection_and_nothing_else() -> None:
    """A laptop was closed with the page open, and the service kept a state a second for it until memory ended."""
    states = 0

    class Hurried(SystemClock):
        async def sleep(self, seconds: float) -> None:
            nonlocal states
            states += 1
            await asyncio.sleep(0)

    observations = Observations("late", clock=Hurried())
    letter = RejectedRecord(0, "read", "wrong", "x" * 500, None, None, None)
    observations.rejected.extend([letter] * 50)
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        async with serving(observations, HttpSettings("127.0.0.1:0")) as address, asyncio.timeout(PATIENCE_S):
            client.connect(("127.0.0.1", int(address.rpartition(":")[2])))
            client.sendall(b"GET /api/events HTTP/1.1\r\nHost: localhost\r\n\r\n")
            await until(lambda: states > 0)
            # Others are answered, and in this time no more states are made than the buffers of the connection take.
            async with httpx.AsyncClient(base_url=address, trust_env=False) as other:
                answers = [await other.get("/api/state") for _ in range(300)]
            assert {answer.status_code for answer in answers} == {200}
            assert states * len(answers[0].content) < 1 << 20


async def test_there_are_at_most_32_open_pages_and_they_take_no_place_of_predictions() -> None:
    """A browser opened its forgotten tabs at once: all of them got a stream, and no client a prediction."""
    async with case(requests_max=60, client={"limits": httpx.Limits(max_connections=64)}) as service:
        streams = [service.client.stream("GET", "/api/events") for _ in range(60)]
        try:
            answers = await asyncio.gather(*(stream.__aenter__() for stream in streams))
            [refused, *_] = [answer for answer in answers if answer.status_code == 429]
            await refused.aread()
            assert sorted(answer.status_code for answer in answers) == [200] * 32 + [429] * 28
            assert "32 open pages" in problem_of(refused)["detail"]
        finally:
            for stream in streams:
                await stream.__aexit__(None, None, None)
    async with case(requests_max=1) as service, service.client.stream("GET", "/api/events"):
        assert await service.is_well()


async def test_weights_are_compared_and_named_by_a_thread() -> None:
    """Each open page stopped the job for 29 ms every five seconds, to find the texts of weights."""
    threads: list[threading.Thread] = []
    async with case(versions=2) as service:
        assert service.observations.model is not None
        service.observations.compared.append(replace(service.observations.model, version=1))
        service.observations.texts_at = lambda places: threads.append(threading.current_thread()) or {}
        assert (await service.client.get("/api/details")).json()["weights"] is not None
    assert len(threads) == 2  # Of weights, and of effects.
    assert threading.main_thread() not in threads


async def test_a_client_that_leaves_starts_no_second_thread() -> None:
    """Impatient clients asked and left, and each left a thread behind that compared all weights."""
    running, most, go_on = 0, 0, threading.Event()

    def texts_at(_: object) -> dict[int, str]:
        nonlocal running, most
        running += 1
        most = max(most, running)
        go_on.wait(PATIENCE_S)
        running -= 1
        return {}

    async with case(versions=2) as service:
        assert service.observations.model is not None
        service.observations.compared.append(replace(service.observations.model, version=1))
        service.observations.texts_at = texts_at
        for _ in range(3):
            with pytest.raises(httpx.ReadTimeout):
                await service.client.get("/api/details", timeout=httpx.Timeout(PATIENCE_S, read=0.2))
        go_on.set()
        assert (await service.client.get("/api/details")).status_code == 200
    assert most == 1


def test_a_model_that_is_worse_than_its_baseline_is_told() -> None:
    """A model was worse than a constant for a week, while all checks were green."""
    observations = Observations("late")
    observations.enter("running")
    report = {"window_loss": 0.7, "window_baseline_loss": 0.5, "window_auc": 0.48, "window_count": 100}
    observations.validated(report)
    state = page_state(observations)
    assert state.level == "attention"
    assert state.sentence == (
        "The service works, but the model predicts badly: its log loss of 0.7000 is above the baseline of 0.5000"
    )
    observations.validated({"window_loss": 2.0, "window_baseline_loss": 8.0, "window_mae": 1.0})
    quality = page_state(observations).quality
    assert quality is not None
    assert (quality.measure, quality.loss, quality.baseline, quality.auc) == ("RMSE", 2.0, 4.0, None)


def test_the_history_has_a_point_for_each_five_seconds() -> None:
    """An hour of samples was sent whenever a page was opened, 400 kB each time."""
    observations = Observations("late", clock=(clock := _Set()))
    for second in range(12):
        clock.ms = 1_000 * second
        observations.sample()
        if second != 7:
            observations.quality.reports.append(ValidationReport(clock.ms, {"window_loss": 0.1 * second}))
    history = page_history(observations)
    assert history.at_ms == (0, 5_000, 10_000)
    assert history.loss == (pytest.approx(0.4), pytest.approx(0.9), pytest.approx(1.1))
    assert history.events_per_s == (None, None, None)


class _Set(SystemClock):
    """A clock that is set."""

    ms = 0

    def now_ms(self) -> int:
        return self.ms


async def test_steps_of_a_loop_have_their_epoch_and_other_steps_none() -> None:
    """A loop waited for one worker, and the page showed epoch 0 at all steps, also at those without epochs."""
    state = page_state(await trained_in_epochs())
    epochs = {step.name: step.epoch_watermark for step in state.steps}
    [loop] = state.loops
    assert loop.epoch_complete is not None
    assert loop.epoch_complete >= 8
    assert (epochs["learn"] or 0) >= 8
    assert (epochs["items"], epochs["collect"]) == (None, None)
    assert {step.state for step in state.steps} == {"ended"}
