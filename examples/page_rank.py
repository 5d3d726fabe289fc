"""PageRank: the probability that a reader, who follows links and sometimes jumps to a random page, is at each page.

Pages are partitioned by key over several subtasks, and each subtask knows the links of its own pages. In each round a
page gives its rank to the pages that it links to, in equal parts. The parts travel as a variable stream, in columns, to
the subtasks of these pages. A page without links gives its rank to all pages: an all-reduce tells every subtask their
sum in the next round. With a generated graph::

    python examples/page_rank.py
"""

from __future__ import annotations

from typing import Any

import numpy as np

from streamiter import (
    Columns,
    Flow,
    IterationBodyResult,
    IterationListener,
    Operator,
    OutputTag,
    Stream,
    connect,
    iterate_bounded_streams_until_termination,
)
from streamiter.iteration import all_reduce, terminate_after

PAGES = 1_000
SUBTASKS = 2
DAMPING = 0.85
TOLERANCE = 1e-12
ROUNDS_MAX = 1_000

FIGURES = OutputTag("figures")
"""Of a subtask at the end of a round: how many pages it has, what rank those without links have altogether, and how
much ranks have changed altogether."""
RANKS = OutputTag("ranks")
ARRAYS = ("figures", "pages", "out_degrees", "linked_pages", "link_from", "link_to", "ranks")


class Pages(Operator, IterationListener):
    """The pages of one subtask: their links, and their ranks.

    Epoch 0 brings the links. In epoch 1 the number of pages is known, and each page gets its first rank. From epoch 2
    on the new ranks follow from the received parts. All work is done at the end of an epoch, and sums have a fixed
    order, so the ranks do not depend on the speed of subtasks.
    """

    def __init__(self, damping: float) -> None:
        self.damping = damping
        self.links: list[Columns] = []
        self.parts: list[Columns] = []
        self.figures = np.zeros(3)
        self.pages = self.out_degrees = self.linked_pages = self.link_from = self.link_to = np.zeros(0, int)
        self.ranks = np.zeros(0)

    def open(self, context: Any) -> None:
        self.context = context

    def process_links_batch(self, links: Columns, out: Any) -> None:
        self.links.append(links)

    def process_parts_batch(self, parts: Columns, out: Any) -> None:
        self.parts.append(parts)

    def process_figures(self, figures: np.ndarray[Any, Any], out: Any) -> None:
        self.figures = figures

    def on_epoch_watermark_incremented(self, epoch_watermark: int, context: Any, out: Any) -> None:
        if epoch_watermark == 0:
            self.arrange_links()
            out.emit(np.array([len(self.pages), 0.0, np.inf]), tag=FIGURES)
            return
        count, without_links = max(self.figures[0], 1.0), self.figures[1]
        before = self.ranks
        if epoch_watermark == 1:
            self.ranks = np.full(len(self.pages), 1.0 / count)
            change = np.inf
        else:
            followed = self.damping * (self.received() + without_links / count)
            self.ranks = (1.0 - self.damping) / count + followed
            change = float(np.abs(self.ranks - before).sum())
        out.emit(np.array([len(self.pages), self.ranks[self.out_degrees == 0].sum(), change]), tag=FIGURES)
        self.send_parts(out)

    def arrange_links(self) -> None:
        """Number the pages of this subtask, and the pages that they link to."""
        if not self.links:
            return
        fields = ("page", "to", "is link")
        pages, to, is_link = (np.concatenate([links[name] for links in self.links]) for name in fields)
        self.pages = np.unique(pages)
        # In a fixed order, whatever the order of arrival.
        order = np.lexsort((to[is_link], pages[is_link]))
        self.link_from = np.searchsorted(self.pages, pages[is_link][order])
        self.out_degrees = np.bincount(self.link_from, minlength=len(self.pages))
        self.linked_pages, self.link_to = np.unique(to[is_link][order], return_inverse=True)
        self.links = []

    def received(self) -> np.ndarray[Any, Any]:
        """Return the sum of the parts for each page, added up in the order of the sending subtasks."""
        parts, self.parts = sorted(self.parts, key=lambda part: part["subtask"][0]), []
        sums = np.zeros(len(self.pages))
        for part in parts:
            np.add.at(sums, np.searchsorted(self.pages, part["page"]), part["rank"])
        return sums

    def send_parts(self, out: Any) -> None:
        """Emit one record for each page that is linked to: the sum of the parts from this subtask."""
        if not len(self.link_from):
            return
        given = self.ranks[self.link_from] / self.out_degrees[self.link_from]
        sums = np.bincount(self.link_to, weights=given, minlength=len(self.linked_pages))
        subtask = np.full(len(sums), self.context.subtask_index)
        out.emit_batch(Columns({"page": self.linked_pages, "rank": sums, "subtask": subtask}))

    def on_iteration_terminated(self, context: Any, out: Any) -> None:
        out.emit_batch(Columns({"page": self.pages, "rank": self.ranks}), tag=RANKS)

    def snapshot(self) -> dict[str, Any]:
        # Arrays are replaced, never changed; the lists grow.
        arrays = {name: getattr(self, name) for name in ARRAYS}
        return {**arrays, "links": list(self.links), "parts": list(self.parts)}

    def restore(self, state: dict[str, Any]) -> None:
        for name, value in state.items():
            setattr(self, name, value)


def both_ends(links: Columns) -> Columns:
    """Return each link, and a record for its target, so that pages without links are known, too."""
    pages, to = links["from"], links["to"]
    return Columns(
        {
            "page": np.concatenate([pages, to]),
            "to": np.concatenate([to, to]),
            "is link": np.repeat([True, False], len(pages)),
        }
    )


def page_rank(
    links: Stream,
    *,
    damping: float = DAMPING,
    tolerance: float = TOLERANCE,
    rounds_max: int = ROUNDS_MAX,
    subtasks: int = SUBTASKS,
) -> Stream:
    """Return the rank of each page (fields ``page``, ``rank``) for a bounded stream of links (``from``, ``to``: ints).

    The iteration ends when the sum of all changes in a round is at most ``tolerance``. Several links from one page to
    another count several times.
    """
    flow = links.flow
    no_parts = flow.from_items([], name="no parts", parallelism=subtasks)
    no_figures = flow.from_items([], name="no figures", parallelism=1)
    ends = links.map_batch(both_ends, name="both ends")

    def body(variables: list[Stream], data: list[Stream]) -> IterationBodyResult:
        [parts, figures], [ends] = variables, data
        pages = connect(
            parts=parts.key_by_batch(lambda part: part["page"]),
            figures=figures.broadcast(),
            links=ends.key_by_batch(lambda link: link["page"]),
        ).process(lambda: Pages(damping), name="pages", parallelism=subtasks)
        totals = all_reduce(pages.side_output(FIGURES), name="totals")
        changes = totals.map(lambda total: total[2])
        return IterationBodyResult(
            feedback_variable_streams=[pages, totals],
            output_streams=[pages.side_output(RANKS)],
            # The links are epoch 0, the first ranks epoch 1.
            termination_criteria=terminate_after(changes, rounds=rounds_max + 2, tolerance=tolerance, name="end"),
        )

    outputs: list[Stream] = iterate_bounded_streams_until_termination([no_parts, no_figures], [ends], body)
    return outputs[0]


def made_up_links(pages: int = PAGES, links: int = 5 * PAGES) -> Columns:
    """Return random links; more of them lead to pages with low numbers, and some pages have none."""
    generator = np.random.default_rng(seed=1)
    return Columns(
        {
            "from": generator.integers(pages // 10, pages, size=links),
            "to": (pages * generator.random(links) ** 2).astype(int),
        }
    )


class Report(Operator):
    """Prints the pages with the highest ranks at the end."""

    def __init__(self) -> None:
        self.pages: list[Any] = []

    def process(self, page: Any, out: Any) -> None:
        self.pages.append(page)

    def finish(self, out: Any) -> None:
        best = sorted(self.pages, key=lambda page: (-page["rank"], page["page"]))[:5]
        print(f"{len(self.pages)} pages, of ranks that sum to {sum(page['rank'] for page in self.pages):.6f}")
        for page in best:
            print(f"page {page['page']}: {page['rank']:.6f}")


def flow() -> Flow:
    """Return the flow from generated links to the report."""
    made = Flow("page rank")
    page_rank(made.from_items(made_up_links())).process(Report, name="report", parallelism=1)
    return made


if __name__ == "__main__":
    flow().run(on_interrupt="drain")
