"""Negatives are other items, drawn with the same chance; no cut of batches and no restart changes a draw."""

from collections import Counter
from random import Random
from typing import Any

from iteration.iteration_support import SMALL, cut_items, run

from streamiter import Flow, tumbling
from streamiter.learn import sampled_negatives
from streamiter.learn.negatives import SampleNegatives


def clicks(count: int, items: int = 12) -> list[dict[str, Any]]:
    """Return clicks on items with prices; some items are clicked on much more often than others."""
    draw = Random(1)
    chosen = [min(draw.randrange(items), draw.randrange(items)) for _ in range(count)]
    return [{"user": f"u{n % 7}", "item": f"i{item}", "price": item / 2} for n, item in enumerate(chosen)]


def rows_of(records: list[Any], *, cuts: int | None = None, **options: Any) -> list[Any]:
    flow = Flow("negatives")
    stream = flow.from_items(records) if cuts is None else cut_items(flow, records, seed=cuts)
    rows = sampled_negatives(stream, ["item", "price"], **options).collect()
    if cuts is None:
        flow.run()
    else:
        run(flow, seed=cuts, limits=SMALL)
    return rows.items


def test_each_other_item_is_drawn_as_often_with_all_of_its_fields() -> None:
    """A popular item was mostly its own negative, and an item had the price of another one."""
    rows = rows_of(clicks(3_000), each=4)
    at_last, drawn = rows[-10_000:], Counter[str]()
    for place in range(0, len(at_last), 5):
        positive, *negatives = at_last[place : place + 5]
        assert positive["chosen"] is True
        for negative in negatives:
            assert negative["chosen"] is False
            assert negative["user"] == positive["user"]
            assert negative["item"] != positive["item"]
            assert negative["price"] == int(negative["item"][1:]) / 2
        drawn.update(negative["item"] for negative in negatives)
    chosen = Counter(row["item"] for row in at_last if row["chosen"])
    expected = {item: 8_000 * (1 - count / 2_000) / 11 for item, count in chosen.items()}
    # Ten deviations of such counts.
    assert all(abs(drawn[item] - count) < 10 * count**0.5 for item, count in expected.items())
    assert rows_of(clicks(100), seed=1) != rows_of(clicks(100))


def test_no_cut_and_no_restart_changes_a_draw() -> None:
    """After a restart a model learned from other negatives than the model that was never stopped."""
    records = clicks(80)
    expected = rows_of(records, each=3, items=5)
    assert all(rows_of(records, cuts=cuts, each=3, items=5) == expected for cuts in range(3))
    first, found = SampleNegatives(["item", "price"], each=3, items=5), list[Any]()
    for number, record in enumerate(records):
        if number % 9 == 0:
            state, first = first.snapshot(), SampleNegatives(["item", "price"], each=3, items=5)
            first.restore(state)
        found += first.rows_of(record)
    assert found == expected


def test_the_items_that_were_chosen_last_are_drawn_also_after_there_is_less_room() -> None:
    """Items that nobody could buy any more were negatives for ever."""
    negatives = SampleNegatives("item", each=30, items=4)
    for item in [1, 2, 3, 4, 1, 5, 3]:  # The last four are 4, 1, 5 and 3.
        rows = negatives.rows_of({"item": item})
    assert {row["item"] for row in rows[1:]} == {4, 1, 5}
    fewer = SampleNegatives("item", each=30, items=3)
    fewer.restore(negatives.snapshot())
    assert {row["item"] for row in fewer.rows_of({"item": 3})[1:]} == {1, 5}
    assert {row["item"] for row in fewer.rows_of({"item": 6})[1:]} == {5, 3}


def test_a_negative_has_the_time_of_its_positive() -> None:
    """A window by the hour had the negatives of another one."""
    flow = Flow("times")
    timed = flow.from_items([{"at": 10 * n, "item": n % 3} for n in range(30)]).event_time("at", unit="ms")
    rows = sampled_negatives(timed, "item", each=2)
    counts = rows.key_by(lambda row: 0).window(tumbling(0.1)).aggregate("count").collect()
    flow.run()
    assert [each.value for each in counts.items] == [28, 30, 30]  # The first item had no other one.


def test_records_without_an_item_change_nothing_for_the_others() -> None:
    """A record without an item ended the service, or was drawn."""
    good = clicks(20)
    bad = [{"user": "u1"}, {"item": None, "price": 1.0}, {"item": ["i1"], "price": 1.0}, {**good[0], "chosen": 1}, 7]
    mixed = [*good[:10], *bad, *good[10:]]
    assert rows_of(mixed, each=2, on_error="skip") == rows_of(good, each=2)
