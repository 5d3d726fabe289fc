"""A drawing shows the steps and loops of a flow, and is written as Mermaid text."""

from typing import Any

import pytest

from streamiter import Flow, IterationBodyResult, Operator, OutputTag, Stream, connect, iterate_unbounded_streams, topic
from streamiter.engine.graph.feedback import FeedbackLimits
from streamiter.engine.graph.graph import Edge, Step
from streamiter.errors import ConfigurationError
from streamiter.flow.drawing.formats import mermaid
from streamiter.flow.drawing.picture import Link, Node, Picture, picture_of
from streamiter.iteration.loop import Loop
from streamiter.operators import Context, Output
from streamiter.operators.steps import Identity
from streamiter.parameter_server import SSP, ParameterServer


class Both(Operator):
    def process_model(self, record: Any, out: Output) -> None: ...

    def process_data(self, record: Any, out: Output) -> None: ...


def counting_flow() -> Flow:
    """Return a flow that counts from 0 to 5 in a loop, and leaves out a 3 of its data."""
    flow = Flow("loop")

    def body(variables: list[Stream], data: list[Stream]) -> IterationBodyResult:
        raised = variables[0].map(lambda x: x + 1, name="raise")
        kept = data[0].filter(lambda x: x != 3, name="no three")
        return IterationBodyResult([raised.filter(lambda x: x < 5, name="below 5")], [raised, kept])

    start, numbers = flow.from_items([0], name="start"), flow.from_items([1, 2, 3], name="numbers")
    for output in iterate_unbounded_streams([start], [numbers], body):
        output.collect()
    return flow


def step(name: str, **fields: Any) -> Step:
    return Step(name=name, parallelism=1, where="here", factory=Identity, **fields)


def test_a_small_flow_is_drawn_as_it_is() -> None:
    """The text of a drawing, which users paste into documents, had changed."""
    flow = Flow("clicks", parallelism=2)
    clicks = flow.source(topic("memory://clicks"), name="clicks")
    keyed = clicks.key_by(lambda click: click["user"]).reduce(max, name="last")
    keyed.side_output(OutputTag("late")).rebalance().map(str, name='say "late"', parallelism=3)
    model = flow.from_items([1], name="model", parallelism=1).broadcast()
    connect(model=model, data=keyed).process(Both, name="score").sink(topic("memory://scores"))
    assert (
        flow.draw()
        == """\
---
title: clicks
---
flowchart LR
    s0[("clicks ×2")]
    s1["last ×2"]
    s2["say #34;late#34; ×3"]
    s3[("model")]
    s4["score ×2"]
    s5[/"sink scores ×2"/]
    s0 -->|by key| s1
    s1 -->|side output late, rebalance| s2
    s3 -->|model, broadcast| s4
    s1 -->|data| s4
    s4 --> s5
"""
    )


def test_an_iteration_is_a_box_and_its_feedback_is_dotted() -> None:
    """A drawing did not show the loop, or how its epochs change."""
    flow = Flow("loop")

    def body(variables: list[Stream], data: list[Stream]) -> IterationBodyResult:
        raised = variables[0].map(lambda x: x + 1, name="raise")
        return IterationBodyResult([raised], [raised])

    [out] = iterate_unbounded_streams([flow.from_items([0], name="start")], [], body)
    out.collect(name="seen")
    assert (
        flow.draw()
        == """\
---
title: loop
---
flowchart LR
    s0[("start")]
    s3[/"seen"/]
    subgraph loop1["iteration 1"]
        s1{{"variable 0<br>initial values: epoch 0"}}
        s2["raise"]
    end
    s0 -->|initial| s1
    s2 -. "feedback, epoch + 1" .-> s1
    s1 --> s2
    s2 --> s3
"""
    )


def test_edges_to_a_single_subtask_do_not_say_rebalance() -> None:
    """Each edge from two subtasks to one said "rebalance", which hid the important labels."""
    flow = Flow("gathered")
    numbers = flow.from_items([1, 2], name="numbers", parallelism=2)
    numbers.map(str, name="one", parallelism=1).map(str, name="three", parallelism=3)
    connect(model=numbers.broadcast(), data=numbers.rebalance()).process(Both, name="both", parallelism=1)
    labels = [(link.source, link.target, link.label) for link in picture_of(flow.name, flow.steps).links]
    assert labels == [(0, 1, ""), (1, 2, "rebalance"), (0, 3, "model, broadcast"), (0, 3, "data")]


def test_criteria_are_drawn_without_links_to_other_steps() -> None:
    """The criteria of a bounded iteration were drawn as a variable, although no step reads them."""
    loop = Loop(bounded=True, has_plain_endless_data=False, limits=FeedbackLimits())
    start = step("start")
    head = step("variable", loop=loop, edges=[Edge(start, "initial")])
    criteria = step("criteria", loop=loop, epochs_seen="decides the end")
    for closed in (head, criteria):
        loop.close(closed, [Edge(head, feedback=loop.limits)])
    picture = picture_of("flow", [start, head, criteria])
    assert [(link.kind, link.label) for link in picture.links] == [
        ("data", "initial"),
        ("feedback", "feedback, epoch + 1"),
        ("criteria", "criteria, epoch + 1"),
    ]
    assert picture.nodes[2].notes == ("decides the end",)


def test_steps_whose_state_is_reset_each_round_are_marked() -> None:
    """Users were surprised that a step had lost its state after each round."""
    loop = Loop(bounded=True, has_plain_endless_data=False, limits=FeedbackLimits())
    fresh = step("fresh", loop=loop, round_scope=object(), epochs_seen="every epoch (replayed)")
    assert picture_of("flow", [fresh]).nodes[0].notes == ("every epoch (replayed)", "per round")


def test_statistics_are_shown_at_each_step_though_steps_share_tasks() -> None:
    """All steps of a task showed the counts of its first step, which hid the step where records were lost."""
    flow = counting_flow()
    picture = picture_of(flow.name, flow.steps, flow.run())
    notes = {node.name: node.notes for node in picture.nodes}
    assert picture.title == "loop (finished)"
    assert notes["start"] == ("1 out",)
    assert notes["no three"] == ("3 in · 2 out", "epoch watermark 0")
    assert notes["raise"][-2:] == ("5 in · 5 out", "epoch watermark 4")
    assert notes["below 5"][-2:] == ("5 in · 4 out", "epoch watermark 4")
    assert notes["collect"] == ("5 in",)
    assert [box.notes for box in picture.boxes] == [("ended in epoch 5", "4 records fed back")]


async def test_statistics_of_a_running_job_are_shown() -> None:
    """The statistics of an endless loop could not be drawn while it ran."""
    job = await counting_flow().start()
    drawn = counting_flow().draw(job.statistics())
    await job.stop("abort")
    assert "title: loop (running)" in drawn
    assert "iteration 1 · no epoch complete · 0 records fed back" in drawn


def training_flow(server: ParameterServer) -> Flow:
    """Return a flow with two steps that use a server, one of them in a loop, and one step that uses another server."""
    flow = Flow("training")
    embeddings = ParameterServer(name="embeddings")

    def body(variables: list[Stream], data: list[Stream]) -> IterationBodyResult:
        worked = variables[0].process(Works, name="train", parameter_server=server)
        return IterationBodyResult([worked.filter(lambda x: x < 0)], [worked])

    [out] = iterate_unbounded_streams([flow.from_items([0], name="start")], [], body)
    judged = out.process(Works, name="judge", parameter_server=server)
    judged.process(Works, name="embed", parameter_server=embeddings).collect()
    return flow


class Works(Operator):
    async def open(self, context: Context) -> None:
        self._client = context.parameter_server
        await self._client.create_matrix("weights", rows=1, columns=3, consistency=SSP(staleness=2))

    async def process(self, record: Any, out: Output) -> None:
        await self._client.clock("weights")
        out.emit(record)


def test_a_parameter_server_is_a_node_linked_to_the_steps_that_work_with_it() -> None:
    """The drawing did not show the state that a parameter server keeps for the flow."""
    drawn = training_flow(ParameterServer(shards=2)).draw().splitlines()
    assert drawn[-5:] == [
        "    s4 --> s5",
        "    s5 --> s6",
        '    s2 <-. "get, add" .-> s7',
        '    s4 <-. "get, add" .-> s7',
        '    s5 <-. "get, add" .-> s8',
    ]
    assert '    s7[["parameter server<br>2 shards in this process"]]' in drawn
    assert '    s8[["embeddings<br>1 shard in this process"]]' in drawn


async def test_statistics_show_the_workers_and_clocks_of_a_parameter_server() -> None:
    """A drawing did not show whether the workers of a server make progress."""
    flow = training_flow(ParameterServer(shards=2))
    job = await flow.start()
    running = picture_of(flow.name, flow.steps, job.statistics()).nodes[7]
    ended = picture_of(flow.name, flow.steps, await job.wait()).nodes[7]
    assert running.notes[:2] == ("2 shards in this process", "2 workers")
    assert ended.notes == ("2 shards in this process", "weights, SSP(staleness=2): minimum clock 1")


def test_records_that_were_refused_are_shown() -> None:
    """Records were missing behind a step, and the drawing did not show that the step had refused them."""
    flow = Flow("skip")
    flow.from_items([1, "2"], name="numbers").map(lambda x: x * x, on_error="skip").collect()
    assert "2 in · 1 out · 1 rejected" in flow.draw(flow.run())


@pytest.mark.parametrize(
    ("statistics", "said"),
    [
        ("svg", "draw expected statistics of a job, given 'svg'"),
        (Flow("other"), "draw expected statistics of a job, given Flow('other', 0 steps)"),
    ],
)
def test_objects_that_are_no_statistics_are_refused(statistics: Any, said: str) -> None:
    """A user wrote `flow.draw("svg")`, and the error did not name the wrong argument."""
    with pytest.raises(ConfigurationError) as refused:
        counting_flow().draw(statistics)
    assert said in str(refused.value)


def test_statistics_of_another_flow_are_refused() -> None:
    """A drawing showed the counts of another flow's steps."""
    flow = Flow("other")
    flow.from_items([1], name="start").collect()
    with pytest.raises(ConfigurationError, match="given the statistics of flow 'other' without step 'numbers'"):
        counting_flow().draw(flow.run())


def test_an_unknown_format_is_refused() -> None:
    """The error about an unknown format did not list the formats."""
    with pytest.raises(ConfigurationError, match="'mermaid', 'svg', 'png', given 'jpeg'"):
        counting_flow().draw(format="jpeg")  # type: ignore[call-overload]


@pytest.mark.parametrize(
    ("name", "written"),
    [
        ("<lambda>", "#60;lambda#62;"),
        ('a "b" & c', "a #34;b#34; #38; c"),
        ("`a` #1;", "#96;a#96; #35;1;"),
        ("two\nlines", "two lines"),
    ],
)
def test_special_characters_of_mermaid_are_written_as_codes(name: str, written: str) -> None:
    """`<lambda>` was taken for HTML and disappeared, and a quote ended the label."""
    drawn = mermaid(Picture("flow", (Node(name, "operator"),), (Link(0, 0, label=f"({name})"),)))
    assert f's0["{written}"]' in drawn
    assert f's0 -->|"({written})"| s0' in drawn


def test_a_title_that_is_no_plain_yaml_is_quoted() -> None:
    """The title `a: b` made the whole drawing an error of YAML."""
    assert 'title: "clicks: #1"\n' in Flow("clicks: #1").draw()
