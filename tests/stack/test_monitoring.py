"""Rules, dashboard and documentation speak of metrics that the service really exposes."""

import json
import re
import subprocess
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from random import Random
from typing import Any

import promql_parser
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families
from stack.stack_files import EXAMPLE, ROOT, SERVICES
from support.programs import system_program
from support.waiting import PATIENCE_S
from topics.topic_case import write

from streamiter import Checkpoints, Flow
from streamiter.learn import Embeddings, FieldWatch, PageHinkley, train_online
from streamiter.learn.online.challengers import ComparedRows
from streamiter.models import ModelSnapshot, ModelUpdateEncoder, ServedModel
from streamiter.service.observing.challenger import Challenger
from streamiter.service.observing.metrics import MetricsNow, exposition
from streamiter.service.observing.observations import HistoryRead, Observations
from streamiter.service.observing.prediction_log import PredictionLog
from streamiter.service.settings.tables import ChallengerSettings, PredictionSettings
from streamiter.topics import MemoryBroker
from streamiter.values.helpers.clock import SystemClock


async def exposed_metrics(folder: Path) -> dict[str, set[str]]:
    """Return the labels of each sample of a service for yes or no, and of a service for numbers."""
    classes = await _scraped(folder / "classes", lambda x: x > 0.5, embeddings=Embeddings("fm", at_most="1 MB"))
    return classes | await _scraped(folder / "numbers", lambda x: 3.0 * x)


async def _scraped(folder: Path, label_of: object, embeddings: Embeddings | None = None) -> dict[str, set[str]]:
    broker, draw = MemoryBroker(), Random(1)
    events, updates, dead_letters = [broker.topic(name) for name in ("events", "updates", "dead-letters")]
    for topic in (events, updates, dead_letters):
        await topic.create()
    values = [draw.random() for _ in range(2_000)]
    rows = [{"x": x, "item": f"i{number % 9}", "y": label_of(x)} for number, x in enumerate(values)]  # type: ignore[operator]
    await write(events, [b"no JSON", *(json.dumps(row).encode() for row in rows)])
    observations = Observations("clicks")
    observations.prediction_log = PredictionLog(PredictionSettings("memory://log"), SystemClock())
    observations.prediction_log.waiting = 0
    flow = Flow("clicks")
    source = flow.source(events, stop="latest", dead_letter=dead_letters)
    watch = FieldWatch(reference=500, window=500, sample=1.0)
    training = train_online(
        source, label="y", report_every=500, drift=PageHinkley(), watch=watch, embeddings=embeddings
    )
    training.fields.map(observations.quality.watched)
    training.models.publish_model(updates, model="clicks")
    training.validation.map(observations.validated)
    compared = {each.name: 0.1 for each in fields(ComparedRows)}
    model = ModelSnapshot({"weights": [0.5]}, metrics=compared)
    await write(updates, ModelUpdateEncoder("clicks-b", 1, clock=SystemClock()).encode([model]))
    second = ServedModel(updates, "clicks-b", predict=lambda parameters, row: 0.5)
    async with ServedModel(updates, "clicks") as served, second as other:
        observations.challenger = Challenger("clicks-b", other, ChallengerSettings())
        await other.ready()
        observations.served = served
        observations.job = job = await flow.start(checkpoints=Checkpoints(folder, interval_s=0.1))
        await job.wait()
        await served.ready()
        observations.quality.drifted({"row": 1, "old_loss": 0.1, "new_loss": 0.2, "detector": "PageHinkley"})
        observations.predicted(0.001, predicted=1)
        observations.requested("/predict", 200)
        observations.catching_up = HistoryRead(0.4, 60.0)
        body, _ = exposition(MetricsNow(observations), "")
    families = text_string_to_metric_families(body.decode())
    samples = [sample for family in families for sample in family.samples]
    return {sample.name: set(sample.labels) for sample in samples if not sample.name.endswith("_created")}


PROMETHEUS = EXAMPLE / "prometheus"
BOARD: dict[str, Any] = json.loads((EXAMPLE / "grafana" / "dashboards" / "streamiter.json").read_text(encoding="utf-8"))
[GROUP] = yaml.safe_load((PROMETHEUS / "rules.yaml").read_text(encoding="utf-8"))["groups"]
OPERATIONS = ROOT / "docs" / "operations.md"
# Prometheus adds them itself.
ADDED = {"instance", "job"}


def queries() -> Iterator[tuple[str, str]]:
    """Yield the name and the text of each query of the rules and of the dashboard."""
    for rule in GROUP["rules"]:
        yield rule["alert"], rule["expr"]
    for panel in BOARD["panels"]:
        for target in panel.get("targets", ()):
            yield panel["title"], target["expr"]
    for annotation in BOARD["annotations"]["list"]:
        yield annotation["name"], annotation["expr"]


def parsed(query: str) -> Any:
    return promql_parser.parse(query.replace("$__interval", "1m"))


def selected(query: str) -> list[tuple[str, set[str]]]:
    """Return each metric that a query selects, with the labels that it matches."""
    found: list[tuple[str, set[str]]] = []

    def visit(node: Any) -> bool:
        if isinstance(node, promql_parser.VectorSelector):
            found.append((node.name, {matcher.name for matcher in node.matchers.matchers}))
        return True

    promql_parser.walk(parsed(query), pre_visit=visit)
    return found


async def test_queries_select_metrics_and_labels_that_the_service_exposes(tmp_path: Path) -> None:
    """A metric was renamed; its panel was empty, and its alert never fired."""
    exposed = await exposed_metrics(tmp_path) | {"up": set()}
    unknown = [
        (name, metric, labels)
        for name, query in queries()
        for metric, labels in selected(query)
        if metric not in exposed or not labels <= exposed[metric] | ADDED
    ]
    assert unknown == []
    grouped = {label for _, query in queries() for label in re.findall(r"by \(([^)]*)\)", query)}
    labels = set().union(*exposed.values()) | ADDED
    assert {each.strip() for names in grouped for each in names.split(",")} <= labels
    shown = set(re.findall(r"\{\{(\w+)\}\}", json.dumps(BOARD)))
    assert shown <= labels


async def test_the_dashboard_shows_all_metrics_and_the_page_explains_them(tmp_path: Path) -> None:
    """A new metric was on no page, and people did not know from which value on it is bad."""
    exposed = {
        re.sub(r"_(bucket|sum|count)$", "", name): labels for name, labels in (await exposed_metrics(tmp_path)).items()
    }
    documented = {
        name: set(re.findall(r"\w+", labels))
        for name, labels in re.findall(
            r"^\| `(streamiter_\w+)(?:\{([\w, ]+)\})?` \|", OPERATIONS.read_text("utf-8"), re.MULTILINE
        )
    }
    assert documented == {name: labels - {"le"} for name, labels in exposed.items()}
    on_board = {re.sub(r"_(bucket|sum|count)$", "", metric) for _, query in queries() for metric, _ in selected(query)}
    assert set(exposed) - on_board == {"streamiter_build_info"}


@pytest.mark.parametrize(
    "command",
    [
        ["check", "config", "--syntax-only", "prometheus.yaml"],
        ["check", "rules", "--lint-fatal", "rules.yaml"],
        ["test", "rules", str(Path(__file__).with_name("rules.yaml"))],
    ],
    ids=lambda command: " ".join(command[:2]),
)
def test_promtool_accepts(command: list[str]) -> None:
    """Prometheus did not start, or an alert fired at the wrong time, or never."""
    promtool = system_program("promtool", "prometheus")
    done = subprocess.run(
        [promtool, *command], cwd=PROMETHEUS, capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_each_alert_has_a_test_a_severity_and_a_text() -> None:
    """An alert that had never fired was wrong since its first day."""
    tests = yaml.safe_load(Path(__file__).with_name("rules.yaml").read_text(encoding="utf-8"))["tests"]
    fired = {check["alertname"] for test in tests for check in test["alert_rule_test"] if check["exp_alerts"]}
    assert fired == {rule["alert"] for rule in GROUP["rules"]}
    for rule in GROUP["rules"]:
        assert rule["labels"]["severity"] in ("critical", "warning")
        assert set(rule["annotations"]) == {"summary", "description"}


def test_grafana_finds_its_data_source_and_dashboard() -> None:
    """Grafana started without a dashboard, or its panels asked for a data source of another name."""
    [source] = yaml.safe_load(
        (EXAMPLE / "grafana" / "provisioning" / "datasources" / "prometheus.yaml").read_text(encoding="utf-8")
    )["datasources"]
    [provider] = yaml.safe_load(
        (EXAMPLE / "grafana" / "provisioning" / "dashboards" / "dashboards.yaml").read_text(encoding="utf-8")
    )["providers"]
    assert source["url"] == "http://prometheus:9090"
    used = {panel["datasource"]["uid"] for panel in BOARD["panels"] if "datasource" in panel}
    assert used == {source["uid"]}
    mounts = dict(volume.removesuffix(":ro").split(":")[::-1] for volume in SERVICES["grafana"]["volumes"])
    assert (ROOT / mounts[provider["options"]["path"]] / "streamiter.json").is_file()
    assert (ROOT / mounts["/etc/grafana/provisioning"] / "datasources").is_dir()


def test_panels_do_not_overlap_and_say_what_they_show() -> None:
    """Two panels were at the same place, and no one knew whether a curve should be high or low."""
    taken: set[tuple[int, int]] = set()
    for panel in BOARD["panels"]:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert max(x for x, _ in cells) < 24
        assert not cells & taken, panel["title"]
        taken |= cells
        assert panel["type"] == "row" or panel["description"].endswith(".")
    assert len({panel["id"] for panel in BOARD["panels"]}) == len(BOARD["panels"])
