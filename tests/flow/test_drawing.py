"""The graph as Mermaid text."""

from __future__ import annotations

from typing import Any

from streamiter import (
    Flow,
    IterationBodyResult,
    Operator,
    OutputTag,
    Stream,
    connect,
    iterate_unbounded_streams,
    topic,
)
from streamiter.operators import Output


class Both(Operator):
    def process_model(self, record: Any, out: Output) -> None: ...

    def process_data(self, record: Any, out: Output) -> None: ...


def test_a_small_flow_is_drawn_as_it_is() -> None:
    """The whole text: it is pasted into documents."""
    flow = Flow("clicks", parallelism=2)
    clicks = flow.source(topic("memory://clicks"), name="clicks")
    keyed = clicks.key_by(lambda click: click["user"]).reduce(max, name="last")
    keyed.side_output(OutputTag("late")).rebalance().map(str, name='say "late"', parallelism=1)
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
    s2["say 'late'"]
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
    """So that one sees the loop."""
    flow = Flow("loop")

    def body(variables: list[Stream], data: list[Stream]) -> IterationBodyResult:
        raised = variables[0].map(lambda x: x + 1, name="raise")
        return IterationBodyResult([raised], [raised])

    iterate_unbounded_streams([flow.from_items([0], name="start")], [], body)
    assert (
        flow.draw()
        == """\
---
title: loop
---
flowchart LR
    s0[("start")]
    s3{{"output 0"}}
    subgraph loop1["iteration 1"]
        s1{{"variable 0"}}
        s2["raise"]
    end
    s0 -->|initial| s1
    s2 -. "feedback" .-> s1
    s1 --> s2
    s2 --> s3
"""
    )
