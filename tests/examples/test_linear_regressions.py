"""The four linear regressions after FLIP-176 run as users run them, and with different schedules."""

import asyncio
import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import orjson
import pytest
from iteration.iteration_support import cut_items, run
from support.processes import async_process, forked_run
from support.soak import in_soak
from support.waiting import PATIENCE_S

from streamiter import Columns, Flow
from streamiter.engine.plan.job_settings import ChannelLimits
from streamiter.models import model_updates
from streamiter.topics import OutgoingBatch, topic

EXAMPLES = Path(__file__).parents[2] / "examples" / "linear_regression"
BOUNDED = ("synchronous_bounded", "asynchronous_bounded")
UNBOUNDED = ("synchronous_unbounded", "asynchronous_unbounded")
TRUE_WEIGHTS = np.arange(1.0, 11.0)


def loaded(name: str) -> ModuleType:
    specification = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert specification is not None
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


def models_of(name: str, count: int, *, seed: int | None = None, limits: ChannelLimits | None = None) -> list[Any]:
    module, flow = loaded(name), Flow(name)
    rows = module.made_up_examples(count)
    if seed is None:
        examples = flow.from_items(rows)
    else:
        records = [{"x": x, "y": y} for x, y in zip(rows["x"], rows["y"].tolist(), strict=True)]
        examples = cut_items(flow, records, seed=seed)
        examples = examples if name == "synchronous_unbounded" else examples.map_batch(as_columns)
    models = module.regression(flow, examples).collect()
    run(flow, seed=seed or 0, limits=limits)
    return models.items


def as_columns(records: Any) -> Any:
    return Columns({"x": np.array([r["x"] for r in records]), "y": np.array([r["y"] for r in records])})


@pytest.mark.parametrize("name", [*BOUNDED, *UNBOUNDED])
def test_it_runs_without_arguments_and_says_what_it_has_learned(name: str) -> None:
    """The example failed when a user ran it without arguments."""
    done = forked_run([sys.executable, str(EXAMPLES / f"{name}.py")], limit_s=PATIENCE_S, check=True)
    printed = re.fullmatch(r"(\d+) models, the last one: \[([^]]*)\]\n", done.stdout)
    assert printed is not None, done.stdout
    assert np.array(printed[2].split(), dtype=float) == pytest.approx(TRUE_WEIGHTS, abs=0.05)
    assert done.stderr == ""


@pytest.mark.parametrize("is_sigint_ignored", [False, True], ids=["", "in the background of a script"])
@pytest.mark.parametrize("name", UNBOUNDED)
async def test_it_learns_from_one_topic_and_publishes_to_another(
    name: str, is_sigint_ignored: bool, tmp_path: Path
) -> None:
    """The example did not work as a service, which reads JSON from one topic and publishes each update to another."""
    rows = loaded(name).made_up_examples(5_000)
    events, updates = (topic(f"sqlite:///{tmp_path}/lr.db?topic={part}") for part in ("events", "updates"))
    await events.create()
    await updates.create()
    writer = await events.open_writer()
    records = zip(rows["x"].tolist(), rows["y"].tolist(), strict=True)
    await writer.write(OutgoingBatch([orjson.dumps({"x": x, "y": y}) for x, y in records]))
    await writer.close()
    async with async_process(
        [sys.executable, EXAMPLES / f"{name}.py", events.url, updates.url],
        is_sigint_ignored=is_sigint_ignored,
        is_forked=True,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    ) as program:
        # A live topic has no end: the program continues until a signal stops it.
        async with asyncio.timeout(PATIENCE_S):
            async for update in model_updates(updates, "regression", follow=True):
                if np.allclose(update.parameters, TRUE_WEIGHTS, atol=0.5):
                    break
        program.terminate()
        printed, _ = await program.communicate()
    assert (program.returncode, printed.count(b"\n")) == (0, 1), printed
    assert b"no positions are kept, since it has no checkpoints=" in printed
    assert update.version >= 10


@pytest.mark.parametrize("name", BOUNDED)
def test_it_learns_from_the_records_of_a_file_and_ends(name: str, tmp_path: Path) -> None:
    """The bounded example never ended, because its topic could have more records later."""
    rows = loaded(name).made_up_examples(5_000)
    file = tmp_path / "examples.jsonl"
    records = zip(rows["x"].tolist(), rows["y"].tolist(), strict=True)
    file.write_bytes(b"".join(orjson.dumps({"x": x, "y": y}) + b"\n" for x, y in records))
    done = forked_run([sys.executable, str(EXAMPLES / f"{name}.py"), f"file:{file}"], limit_s=PATIENCE_S, check=True)
    printed = re.fullmatch(r"(\d+) models, the last one: \[([^]]*)\]\n", done.stdout)
    assert printed is not None, done.stdout
    assert np.array(printed[2].split(), dtype=float) == pytest.approx(TRUE_WEIGHTS, abs=0.05)
    assert done.stderr == ""


def descended(rows: Columns, *, rounds: int) -> Any:
    """Return the result of gradient descent with all rows at once."""
    weights = np.zeros(10)
    for _ in range(rounds):
        weights = weights - 0.1 * (rows["x"].T @ (rows["x"] @ weights - rows["y"])) / len(rows)
    return weights


@pytest.mark.parametrize("seed", [0, 1, *in_soak(2, 3)])
@pytest.mark.parametrize("count", [1, 2, 301])
def test_bounded_and_in_step_the_rounds_equal_gradient_descent_on_all_rows(count: int, seed: int) -> None:
    """The result depended on the schedule, or was wrong when one worker had no rows."""
    models = models_of(BOUNDED[0], count, seed=seed, limits=ChannelLimits(records=7))
    rows = loaded(BOUNDED[0]).made_up_examples(count)
    assert len(models) == 100
    assert models[-1] == pytest.approx(descended(rows, rounds=100), rel=1e-9)


@pytest.mark.parametrize("seed", [0, 1, *in_soak(2, 3)])
def test_bounded_and_without_waiting_every_mini_batch_is_a_step_and_the_loop_ends(seed: int) -> None:
    """A loop without waiting lost a gradient, or did not end when its workers had no more rows."""
    models = models_of(BOUNDED[1], 1_003, seed=seed, limits=ChannelLimits(records=120))
    # Each of the two workers has 200 mini-batches.
    assert len(models) == 400
    assert models[-1] == pytest.approx(TRUE_WEIGHTS, abs=0.1)


@pytest.mark.parametrize("count", [1, 49, 50, 51, 100, 149, 151, 1_025])
def test_in_step_every_round_has_both_workers_and_the_loop_ends(count: int) -> None:
    """One worker ran out of examples, and the other waited for it for ever."""
    models = models_of(UNBOUNDED[0], count)
    assert count // 100 + 1 <= len(models) <= count // 50 + 2


def test_in_step_the_models_do_not_depend_on_the_schedule() -> None:
    """Two runs on the same examples had different models."""
    results = [models_of(UNBOUNDED[0], 1_000, seed=seed, limits=ChannelLimits(records=60)) for seed in (0, 1, 2)]
    for other in results[1:]:
        assert len(other) == len(results[0])
        assert np.allclose(other, results[0], rtol=1e-9)


@pytest.mark.parametrize("seed", [0, 1, *in_soak(2, 3)])
def test_without_waiting_every_mini_batch_is_a_step(seed: int) -> None:
    """A gradient was lost or used twice in some order of the workers."""
    models = models_of(UNBOUNDED[1], 2_000, seed=seed, limits=ChannelLimits(records=120))
    # Each of the two workers has a start and 20 mini-batches of 50.
    assert len(models) == 2 + 40
    assert np.abs(models[-1] - TRUE_WEIGHTS).max() < np.abs(models[1] - TRUE_WEIGHTS).max() / 2
