"""Notebooks show flows, jobs and models, whatever their names are."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from html.parser import HTMLParser
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from support.chromium import chromium, visit
from support.processes import forked_run
from support.waiting import PATIENCE_S, until

from streamiter import Flow
from streamiter.engine.graph.statistics import JobStatistics
from streamiter.errors import JobFailed
from streamiter.learn import SGD, AdaptiveLinearModel, LinearRegression
from streamiter.models import LinearPredictor, ModelSnapshot, ModelUpdate, ServedModel
from streamiter.topics import topic

if TYPE_CHECKING:
    from playwright.async_api import Browser

__all__ = ["chromium"]

HOSTILE = '<script>document.title = "taken"</script>"\'&\x00\u202e'


def flow_named(name: str) -> Flow:
    flow = Flow(name)
    flow.from_items(range(3)).map(lambda number: -number, name=name).collect()
    return flow


def learned() -> AdaptiveLinearModel:
    model = AdaptiveLinearModel()
    model.learn_each([{"km": 1.0}, {"km": 2.0}], [True, False])
    return model


SHOWN: dict[str, tuple[Callable[[], Any], str]] = {
    "flow": (lambda: flow_named(HOSTILE), "<script>"),
    "statistics": (lambda: flow_named(HOSTILE).run(), "finished"),
    "update": (
        lambda: ModelUpdate(HOSTILE, 1, 7, None, 0, 1200, {HOSTILE: 0.25}, {"weights": np.zeros(1000)}),
        "1,200",
    ),
    "served": (lambda: ServedModel(topic("memory://models"), "ctr"), "ctr"),
    "linear": (lambda: LinearRegression(3, optimizer=SGD(0.1)), "LinearRegression"),
    "adaptive": (learned, "classification"),
    "snapshot": (lambda: ModelSnapshot({"weights": np.zeros(1000)}, 1200, {HOSTILE: 0.25}), "1,200"),
    "dict of weights": (lambda: ModelSnapshot(dict.fromkeys(range(100_000), 0.25)), "100,000 in all"),
    "effects": (lambda: learned().effects, "strength"),
    "explanation": (lambda: learned().explain([{"km": 1.0, HOSTILE: 2.0}, {"km": 3.0}]), "intercept"),
}


class Balanced(HTMLParser):
    """Checks that every element is closed in order, and collects the names of elements."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.elements: set[str] = set()

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.elements.add(tag)
        self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: Any) -> None:
        self.elements.add(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


@pytest.fixture(scope="module")
def pieces() -> dict[str, str]:
    """Return what a notebook shows, by name."""
    return {what: make()._repr_html_() for what, (make, _) in SHOWN.items()}


@pytest.mark.parametrize("what", SHOWN)
def test_the_html_is_complete_and_takes_no_elements_from_names(what: str, pieces: dict[str, str]) -> None:
    """The name of a step in a shared notebook ran a script in the browser of its reader."""
    html = pieces[what]
    parser = Balanced()
    parser.feed(html)
    parser.close()
    assert parser.open == []
    assert "script" not in parser.elements
    assert "\x00" not in html
    assert len(html) < 20_000


async def test_a_running_job_shows_its_statistics_of_this_moment() -> None:
    job = await flow_named("numbers").start()
    assert "numbers: running" in job._repr_html_()
    await job.wait()
    assert "numbers: finished" in job._repr_html_()
    assert "<tr><td>numbers</td><td>3</td><td>3</td>" in job._repr_html_()
    assert "rejected" not in job._repr_html_()  # A column without any figure says nothing.
    assert repr(job).startswith("Job(numbers: finished, ")


async def test_a_failed_job_shows_its_error() -> None:
    """A cell without ``await job.wait()`` showed "failed, 0.0 s" and counts, and the error nowhere."""
    flow = Flow("numbers")
    flow.from_items([1]).map(lambda number: number["<b>"]).collect()
    job = await flow.start()
    await until(lambda: job.statistics().state == "failed")
    assert "step 'map'" in repr(job)
    assert "TypeError" in job._repr_html_()
    assert "<b>'" not in job._repr_html_()
    with pytest.raises(JobFailed):
        await job.wait()


@pytest.mark.parametrize(
    ("made", "shown"),
    [
        (lambda: flow_named("numbers").run(), r"numbers: finished, .* s\nstep +in +out .*\nnumbers +3 +3 .*"),
        (lambda: ModelSnapshot({"weights": np.zeros(10**6)}, 7), r"ModelSnapshot\(records=7, parameters={weights}, .*"),
        (lambda: JobStatistics("numbers", "aborted", 0.5, (), ()), r"numbers: aborted, 0\.5 s"),
        (
            lambda: ModelSnapshot(dict.fromkeys(range(100_000), 0.25)),
            r"ModelSnapshot\(.*{0, 1, .*, … \(100,000 names\)}.*",
        ),
        (lambda: ModelUpdate("m", 1, 7, None, 0, 9, {}, {"w": np.zeros(10**6)}), r"ModelUpdate\('m' 1\.7, .*{w}.*"),
        (lambda: learned().effects, r"field +strength .*"),
        (lambda: AdaptiveLinearModel(crosses=[("a", "b")]), r"AdaptiveLinearModel\(crosses=\[\('a', 'b'\)\]\)"),
        (lambda: LinearPredictor({"weights": np.zeros(1000)}), r"LinearPredictor\({weights}\)"),
        (lambda: ServedModel(topic("memory://models"), "ctr"), r"ServedModel\(model 'ctr' of memory://models\)"),
    ],
)
def test_a_terminal_shows_what_it_is_on_a_screen(made: Callable[[], Any], shown: str) -> None:
    """The statistics of eleven steps had 40,000 letters, a version all its weights, and a model was an address."""
    text = repr(made())
    assert re.fullmatch(shown, text, re.DOTALL), text
    assert len(text) < 500


def test_an_error_names_the_cell_of_the_step() -> None:
    """A message named the file of a cell, 2237987400.py, which the user had never seen."""
    cells = ["from streamiter import Flow", "flow = Flow('f')\nflow.from_items([1]).map(3)"]
    program = f"""
from IPython.core.interactiveshell import InteractiveShell
shell = InteractiveShell.instance()
for cell in {cells!r}:
    shell.run_cell(cell, store_history=True)
"""
    shown = forked_run([sys.executable, "-c", program], check=True, limit_s=PATIENCE_S).stdout
    assert "write a function or a lambda (at Cell In[2], line 2)" in shown


@pytest.mark.asyncio(loop_scope="module")
async def test_a_browser_shows_them(chromium: Browser, pieces: dict[str, str]) -> None:
    """A drawing without its namespace was an empty cell."""
    async with visit(chromium, "about:blank") as seen:
        for what, (_, text) in SHOWN.items():
            await seen.page.set_content(f"<title>kept</title><main>{pieces[what]}</main>")
            box = await seen.page.locator("main > *").first.bounding_box()
            assert box is not None
            assert box["width"] > 50
            assert box["height"] > 20
            assert text in (await seen.page.locator("main").text_content() or "")
            assert await seen.page.title() == "kept"
        assert seen.complaints == []
