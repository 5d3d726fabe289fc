"""Fields under watch: neither cuts nor orders change a profile, and only changed fields have shifted."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from streamiter import Columns, Flow
from streamiter.errors import ConfigurationError
from streamiter.learn import FieldWatch, compare_profiles, train_online
from streamiter.learn.model_owner import OwnerOptions
from streamiter.learn.online.row_training import RowOwner
from streamiter.learn.quality.field_watch import FIELD_REPORTS, WatchedFields
from streamiter.learn.ready_made.adaptive import AdaptiveLinearModel
from streamiter.learn.ready_made.row_reading import record_of_features
from streamiter.operators.timed.aggregates import BY_NAME
from streamiter.testing import check_restore
from streamiter.values.field_profiles import (
    GROUPS_MAX,
    PROFILED_FIELDS_MAX,
    FieldProfiles,
    GroupCounts,
    codes_of_numbers,
    compared,
)
from streamiter.values.named_rows import FieldReader
from streamiter.values.plain_data import PlainData


def rows_of(seed, count, **shifted):
    """Return rows of numbers and texts of many kinds, some of them missing; ``shifted`` replaces columns."""
    draw = np.random.default_rng(seed)
    columns = {
        "normal": draw.normal(size=count),
        "year": 2000.0 + draw.integers(0, 30, count),
        "heavy": draw.standard_cauchy(count),
        "town": [f"t{n}" for n in draw.integers(0, 40, count)],
        "user": [f"u{n}" for n in draw.zipf(1.3, count)],
        "words": [[f"w{n}" for n in range(1 + k)] for k in draw.integers(0, 4, count)],
    } | {name: column(draw) for name, column in shifted.items()}
    lost = draw.random((len(columns), count)) < 0.05
    named = [[None if is_lost else value for is_lost, value in zip(*pair)] for pair in zip(lost, columns.values())]  # noqa: B905
    return [dict(zip(columns, row, strict=True)) for row in zip(*named, strict=True)]


def profiles(rows, reference=None):
    made = FieldProfiles(reference)
    made.add(FieldReader(bits=18).rows(rows))
    return made


def same(one, other):
    return PlainData().encode(one) == PlainData().encode(other)


@pytest.mark.parametrize("seed", range(2))
def test_profiles_depend_on_no_cut_and_no_order_of_rows(seed):
    """A window had other figures when its rows came in another order, or in other batches."""
    draw, rows, before = np.random.default_rng(seed), rows_of(seed, 6_000), profiles(rows_of(9, 3_000))
    for reference in (None, before):
        whole, parts = profiles(rows, reference), FieldProfiles(reference)
        order = draw.permutation(len(rows)).tolist()
        for start, stop in pairwise(sorted({0, len(rows), *draw.integers(0, len(rows), 5).tolist()})):
            parts.add(FieldReader(bits=18).rows([rows[place] for place in order[start:stop]]))
            parts = FieldProfiles.of_state(parts.state(), reference)
        states = [each.state() | {"fields": dict(sorted(each.state()["fields"].items()))} for each in (whole, parts)]
        assert same(*states)
        one, other = ({each["field"]: each for each in compared(before, now)} for now in (whole, parts))
        assert one == other


@pytest.mark.parametrize("seed", range(2))
def test_the_profile_of_a_window_depends_on_no_order_and_no_parts(seed):
    """A session that two others became had another profile than one whose records came in order."""
    profile, draw = BY_NAME["profile"](), np.random.default_rng(seed)
    values = [*draw.normal(size=3_000).tolist(), *(f"t{n}" for n in draw.integers(0, 900, 2_000)), *[None] * 7, True]
    values = list(map(profile.checked, values))
    whole = profile.result(profile.added(range(len(values)), values))
    draw.shuffle(values)
    cuts = [0, *sorted(draw.integers(0, len(values), 3)), len(values)]
    parts = [profile.added(range(stop - start), values[start:stop]) for start, stop in pairwise(cuts)]
    before = repr(parts)
    encode = PlainData().encode
    assert encode(profile.result(profile.combined(parts))) == encode(whole)
    assert (repr(parts), whole["records"], whole["rows"]) == (before, 5_008, 5_001)


def test_what_is_no_profile_is_refused():
    """The values of a window without names were compared as profiles, with an error of a key."""
    with pytest.raises(ConfigurationError, match="expected the profiles of a window by field"):
        compare_profiles({"km": 3}, {"km": 4})
    with pytest.raises(TypeError, match=r"profile: expected a number, a text or None, given \[1\]; convert it before"):
        BY_NAME["profile"]().checked([1])


def test_the_groups_are_as_narrow_as_their_number_allows():
    """Years around 2000 shared one group, since groups had the width that numbers near 0 need."""
    draw = np.random.default_rng(1)
    for numbers in (draw.normal(size=5_000), 2000.0 + draw.integers(0, 400, 5_000), 1e9 + draw.random(5_000)):
        codes, counts = np.sort(codes_of_numbers(numbers)), GroupCounts()
        for part in np.split(codes, [7, 3_000]):
            counts.add(part)
        finer = len(set((codes >> np.uint64(max(counts.level - 1, 0))).tolist()))
        assert len(counts.groups) <= GROUPS_MAX
        assert finer > GROUPS_MAX or counts.level == 0
        assert counts.counts.sum() == len(numbers)
    assert len(set(codes_of_numbers(np.array([0.0, -0.0])).tolist())) == 1


def test_ks_and_psi_are_those_of_the_values():
    """PSI was computed on groups of equal width, where a few outliers put all values into one."""
    draw = np.random.default_rng(2)
    for one, other in (
        (draw.normal(size=9_000), draw.normal(0.5, 1, 9_000)),
        (draw.standard_cauchy(9_000), 2.0 * draw.standard_cauchy(9_000)),
        (draw.integers(0, 9, 9_000).astype(float), draw.integers(0, 7, 9_000).astype(float)),
    ):
        values = np.concatenate([one, other])
        exact = np.abs(
            np.searchsorted(np.sort(one), values, "right") - np.searchsorted(np.sort(other), values, "right")
        ).max()
        before = profiles(Columns({"x": one}))
        [found] = compared(before, profiles(Columns({"x": other}), before))
        assert found["ks"] <= exact / 9_000 + 1e-9 <= found["ks_at_most"] + 2e-9 < found["ks"] + 0.06
        edges = np.unique(np.quantile(one, np.linspace(0, 1, 17)[1:-1]))
        p, q = ((np.bincount(np.searchsorted(edges, each), minlength=17) + 0.5) / 9_000 for each in (one, other))
        assert found["psi"] == pytest.approx(float(((p - q) * np.log(p / q)).sum()), rel=0.3)


def watched_reports(watch, rows, cuts):
    """Return the reports of rows in batches; at each cut the watch is restored from its state."""
    watched, reader, reports = WatchedFields(watch, 18), FieldReader(bits=18), []
    for start, stop in pairwise([0, *cuts, len(rows)]):
        reports += watched.add(reader.rows(rows[start:stop]))
        state = PlainData().decode(PlainData().encode(watched.state()))
        watched = WatchedFields(watch, 18)
        watched.restore(state)
    return reports


def test_reports_depend_on_no_cut_and_on_no_restart():
    """A window had other rows after a restart, and a report of a backlog others than one of a slow stream."""
    rows, watch = rows_of(3, 12_000), FieldWatch(reference=2_500, window=3_000, sample=0.5, without=["year"])
    whole = watched_reports(watch, rows, [])
    assert [report["first_row"] for report in whole] == [2_500, 5_500, 8_500]
    assert all(1_000 < report["sampled"] < 2_000 and len(report["fields"]) == 5 for report in whole)
    draw = np.random.default_rng(4)
    for cuts in ([1, 2_499, 2_501, 5_500], sorted(draw.integers(0, 12_000, 12).tolist())):
        assert same(whole, watched_reports(watch, rows, cuts))


def test_only_another_reference_begins_again():
    """A corrected limit took a new reference from data that was wrong by then."""
    watched, rows = WatchedFields(FieldWatch(reference=1_000, window=2_000), 18), rows_of(5, 4_000)
    watched.add(FieldReader(bits=18).rows(rows[:2_000]))
    for options, first_rows in (
        ({"psi": 0.1}, [1_000]),
        ({"window": 1_000}, [2_000, 3_000]),
        ({"name": "after the sale"}, []),
    ):
        again = WatchedFields(FieldWatch(**{"reference": 1_000, "window": 2_000} | options), 18)
        again.restore(watched.state())
        reports = again.add(FieldReader(bits=18).rows(rows[2_000:]))
        assert [report["first_row"] for report in reports] == first_rows


def shifts(report):
    return {each["field"]: each["shifted"] for each in report["fields"] if each["shifted"]}


def test_unchanged_rows_have_no_alarm_in_two_hundred_windows():
    """Each small window alarmed, since the usual limits of PSI are for many rows, and new users for new values."""
    watch = FieldWatch(reference=4_000, window=300, sample=1.0)
    reports = watched_reports(watch, rows_of(6, 64_000), [])
    assert len(reports) == 200
    assert [shifts(report) for report in reports if shifts(report)] == []


def test_shifted_missing_and_new_values_are_alarms():
    """A producer sent another unit, then null, then a new text, and the loss rose days later."""
    watch, before = FieldWatch(reference=4_000, window=2_000, sample=1.0), rows_of(7, 6_000)
    changed = {
        "normal": (lambda draw: draw.normal(0.8, 1, 2_000), ["psi", "ks"]),
        "town": (lambda draw: ["new" if each < 0.03 else f"t{int(each * 40)}" for each in draw.random(2_000)], None),
        "heavy": (lambda draw: [None if each < 0.15 else each for each in draw.random(2_000)], None),
        "user": (lambda draw: [f"x{n}" for n in draw.zipf(1.3, 2_000)], None),
    }
    few = {"town": lambda draw: ["new" if each < 0.009 else f"t{int(each * 40)}" for each in draw.random(2_000)]}
    rows = before + rows_of(8, 2_000, **few)  # Six in a thousand of the towns are new.
    for limits, found in (({}, {}), ({"new_values": 0.001}, {"town": ["new values"]})):
        _, report = watched_reports(replace(watch, **limits), rows, [])
        assert shifts(report) == found
    assert all(0.03 < each["missing"] < 0.07 for each in report["fields"])
    for field, (column, expected) in changed.items():
        unchanged, report = watched_reports(watch, before + rows_of(8, 2_000, **{field: column}), [])
        assert shifts(unchanged) == {}
        found = shifts(report)
        assert list(found) == [field]
        assert expected in (None, found[field])
        assert {"town": "new values", "heavy": "missing", "user": "new values"}.get(field, "psi") in found[field]


def test_fields_and_values_without_end_need_no_more_memory():
    """A producer put an id into the names of fields, and the service ended for lack of memory."""
    watched, reader = WatchedFields(FieldWatch(reference=600, window=600, sample=1.0), 18), FieldReader(bits=18)
    reports = []
    for start in range(0, 1_200, 300):
        rows = [{f"f{n % 400}": n, "user": f"u{n}", "x": n**1.5} for n in range(start, start + 300)]
        reports += watched.add(reader.rows(rows))
    [report] = reports
    assert len(report["fields"]) == PROFILED_FIELDS_MAX
    assert report["left_out"] > 200
    state = watched.state()["reference"]["fields"]
    assert all(len(each[kind][1]) <= GROUPS_MAX for each in state.values() for kind in ("numbers", "texts"))
    assert "new values" not in shifts(report)["x"]  # It only grows. All users are new, as they were before.
    assert "user" not in shifts(report) or "new values" not in shifts(report)["user"]


def trained(rows, **options):
    flow = Flow("watched")
    training = train_online(flow.from_items(rows), label="late", **options)
    reports, _ = training.fields.collect(), training.models.collect()
    flow.run()
    return reports.items


def test_a_training_watches_fields_as_the_model_reads_them_whatever_its_workers():
    """Texts that are numbers were watched as texts, and each later time of a row was a shift."""
    draw, start = np.random.default_rng(9), np.datetime64("2026-01-01T00:00")
    rows = [
        {"km": f"{draw.normal(5, 1):.3f}", "at": str(start + 7 * n), "town": "ab"[n % 2], "late": bool(n % 3)}
        for n in range(6_000)
    ]
    for row in rows[4_000:]:
        row |= {"km": f"{float(row['km']) + 2:.3f}", "at": None if draw.random() < 0.2 else row["at"]}
    watch = FieldWatch(reference=2_000, window=2_000, sample=1.0)
    first, second = trained(rows, watch=watch)
    assert [each["field"] for each in first["fields"]] == ["at", "km", "town"]
    assert shifts(first) == {}
    assert shifts(second) == {"at": ["missing"], "km": ["psi", "ks"]}
    in_epochs = trained(rows, watch=watch, mode="synchronous", mini_batch=700, workers=3)
    assert same([first, second], in_epochs)


def test_an_owner_is_restored_in_the_middle_of_a_window():
    """A service that was restarted each hour never completed a window."""
    rows, reader = rows_of(10, 450), FieldReader(bits=18)
    batches = [
        {
            "position": (0, start),
            "numbers": np.arange(start, start + 90),
            "records": rows[start : start + 90],
            "features": record_of_features(reader.rows(rows[start : start + 90])),
            "labels": [n % 2 == 0 for n in range(90)],
            "weights": None,
            "label_fields": [],
        }
        for start in range(0, 450, 90)
    ]

    def owner():
        watch = FieldWatch(reference=100, window=150, sample=1.0)
        return RowOwner(lambda: AdaptiveLinearModel(shapes=False), OwnerOptions(watch=watch))

    check_restore(owner, {"start": [None], "rows": batches}, epochs=1, tags=[FIELD_REPORTS], fresh_process=False)
    fresh = owner()
    before = repr(fresh.snapshot())
    fresh.restore({name: part for name, part in owner().snapshot().items() if name != "watched"})
    assert repr(fresh.snapshot()) == before  # A checkpoint of a version that watched nothing.
