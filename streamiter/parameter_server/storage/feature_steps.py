"""The compiled functions of a table of features: lookups, learned occurrences, expiry and eviction.

A *feature* is a key of 64 bits. It has an *entry*, a number in each of these arrays, all of which are allocated once:

====================  ================================================================================================
``entries``           the index, with open addressing and at most half full: the entry of a key, or 0
``keys``              the key of each entry
``counts``            its occurrences so far, at most ``COUNT_MAX``; 0: the entry is free
``last_ms``           the greatest time of a row that had it
``newer``, ``older``  its neighbours in the order of the last changes, which is the order of the calls of
                      ``touch_feature`` and ``renew_feature``; of a free entry, ``newer`` is the next free one
``file_of``           the number of the file of a snapshot that has it as it is; 0: it has changed since the last one
``weights``           numbers that a feature has from its first occurrence on, then the sums of their squared gradients
``row_of``            the number of its row, which it has once it is admitted, or 0
``early``             bytes in which the caller keeps what a feature without a row has learned; 0 at its first
                      occurrence
====================  ================================================================================================

``rows`` has numbers that a feature has from its ``admit``-th occurrence on, then the sums of their squared gradients.
With this occurrence it is *admitted*. Most features are rare, so there are fewer rows than entries.

Entry 0 is no feature: in the order it is before the oldest and behind the newest one. Each change of a feature makes it
the newest, so all that have changed since a snapshot are together. A feature is *expired* for a row
whose time is more than ``expire_ms`` after its last one: such a row does not find it, and learns it as a new one.
Features leave at the oldest end only, when they are expired, or when there is no room for another entry or row. So
those that stay are the ones with the last changes. Which entry and row a feature has is of no influence.

The functions get the arrays as pointers, see ``streamiter.learn.ready_made.row_steps``, and check no bounds. This
module needs Numba to be fast, see ``streamiter.values.helpers.compiled``.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from streamiter.values.helpers.compiled import compiled, pointer_function
from streamiter.values.numbers import Float32s, Integers

pointer_to = pointer_function()

EntryNumbers = npt.NDArray[np.int32]

COUNT_MAX: Final = 2**31 - 1

NO_FILE: Final = 0

# ---- the settings
OWN_WEIGHTS: Final = 0
"""The number of weights of an entry."""
WIDTH: Final = 1
"""The number of numbers of a row. With the sums of squares it is twice as many, as with weights."""
ADMIT: Final = 2
EXPIRE_MS: Final = 3
"""0: features never expire."""
ENTRIES_MAX: Final = 4
ROWS_MAX: Final = 5
INDEX_MAX: Final = 6
"""The greatest length of the index, a power of two."""
EARLY_BYTES: Final = 7
"""The number of bytes of an entry in ``early``; 0: none."""
SETTINGS_OF_FEATURES: Final = 8

# ---- the facts
IN_USE: Final = 0
ADMITTED: Final = 1
"""The number of features, and of the admitted ones among them."""
EXPIRED: Final = 2
"""The number of features that have left because they were expired, or began anew."""
EVICTED: Final = 3
"""The number of features that have left because there was no room."""
ENTRIES_USED: Final = 4
ROWS_USED: Final = 5
"""The entries, and the rows, from 1 to this number have been in use."""
FREE_ENTRY: Final = 6
"""The free entry among them that is taken next, or 0."""
FREE_ROWS: Final = 7
"""The number of free rows among them, which are in ``free_rows``."""
INDEX_MASK: Final = 8
"""The length of the index as it is now, a power of two, minus 1."""
NEW_ROW: Final = 9
"""The row that the last occurrence has given to its feature, or 0: most have given none."""
FACTS: Final = 10

# One more than an occurrence adds, so that expired features become fewer; not all of them at once, because a single row
# with a wrong time, years ahead, would empty the table.
_REMOVED_AT_ONCE: Final = 2


class FeatureArrays(NamedTuple):
    """The arrays of a table; in compiled code, pointers to their first numbers."""

    entries: EntryNumbers
    keys: Integers
    counts: EntryNumbers
    last_ms: Integers
    newer: EntryNumbers
    older: EntryNumbers
    file_of: EntryNumbers
    weights: Float32s
    """The numbers of an entry begin at ``entry * 2 * settings[OWN_WEIGHTS]``."""
    row_of: EntryNumbers
    early: npt.NDArray[np.int8]
    """The bytes of an entry begin at ``entry * settings[EARLY_BYTES]``."""
    rows: Float32s
    """The numbers of a row begin at ``row * 2 * settings[WIDTH]``."""
    free_rows: EntryNumbers
    settings: Integers
    facts: Integers


# ---- the index


@compiled
def _home(key: int, mask: int) -> int:
    """Return the place where the search for a key begins. The low bits of keys are those of a hash already."""
    return (key ^ (key >> 21) ^ (key >> 42)) & mask


@compiled
def _place(table: FeatureArrays, key: int) -> int:
    """Return the place of a key in the index, or the empty place where it would be."""
    mask = table.facts[INDEX_MASK]
    place = _home(key, mask)
    while table.entries[place] != 0 and table.keys[table.entries[place]] != key:
        place = (place + 1) & mask
    return int(place)


@compiled
def _empty_place(table: FeatureArrays, place: int) -> None:
    """Remove the entry at a place of the index, and move those behind it back to where a search finds them."""
    mask = table.facts[INDEX_MASK]
    place_behind = (place + 1) & mask
    while table.entries[place_behind] != 0:
        home = _home(table.keys[table.entries[place_behind]], mask)
        # A search that begins between the two places would not come to the first one.
        if ((place_behind - home) & mask) >= ((place_behind - place) & mask):
            table.entries[place] = table.entries[place_behind]
            place = place_behind
        place_behind = (place_behind + 1) & mask
    table.entries[place] = 0


@compiled
def _double_index(table: FeatureArrays) -> None:
    """Use twice as much of the index: a few features at random places of a long index would use all its memory."""
    facts = table.facts
    for place in range(facts[INDEX_MASK] + 1):
        table.entries[place] = 0
    facts[INDEX_MASK] = 2 * facts[INDEX_MASK] + 1
    for entry in range(1, facts[ENTRIES_USED] + 1):
        if table.counts[entry] != 0:
            table.entries[_place(table, table.keys[entry])] = entry


# ---- the order of the last changes


@compiled
def _unlink(table: FeatureArrays, entry: int) -> None:
    newer, older = table.newer[entry], table.older[entry]
    table.older[newer], table.newer[older] = older, newer


@compiled
def _link_newest(table: FeatureArrays, entry: int) -> None:
    newest = table.older[0]
    table.older[entry], table.newer[entry] = newest, 0
    table.newer[newest] = table.older[0] = entry


@compiled
def renew_feature(table: FeatureArrays, entry: int) -> None:
    """Note that an entry, or its row, changes without another occurrence: it is the newest one now."""
    _unlink(table, entry)
    _link_newest(table, entry)
    table.file_of[entry] = NO_FILE


# ---- room


@compiled
def _free_row(table: FeatureArrays, entry: int) -> None:
    """Take the row away from an entry, if it has one."""
    facts = table.facts
    if table.row_of[entry] != 0:
        table.free_rows[facts[FREE_ROWS]] = table.row_of[entry]
        facts[FREE_ROWS] += 1
        facts[ADMITTED] -= 1
        table.row_of[entry] = 0


@compiled
def _remove_oldest(table: FeatureArrays) -> None:
    entry, facts = table.newer[0], table.facts
    _empty_place(table, _place(table, table.keys[entry]))
    _unlink(table, entry)
    _free_row(table, entry)
    table.counts[entry] = 0
    table.file_of[entry] = NO_FILE
    table.newer[entry] = facts[FREE_ENTRY]
    facts[FREE_ENTRY] = entry
    facts[IN_USE] -= 1


@compiled
def _remove_expired(table: FeatureArrays, now_ms: int) -> None:
    """Remove features that are expired at this time, from the oldest end on, but few at once."""
    expire_ms = table.settings[EXPIRE_MS]
    for _ in range(_REMOVED_AT_ONCE):
        oldest = table.newer[0]
        if oldest == 0:
            return
        if table.last_ms[oldest] - now_ms > expire_ms:
            # One row had a wrong time, years ahead. Its features would hold up all others for as long.
            table.last_ms[oldest] = now_ms
            renew_feature(table, oldest)
        elif now_ms - table.last_ms[oldest] > expire_ms:
            _remove_oldest(table)
            table.facts[EXPIRED] += 1
        else:
            return


@compiled
def _take_entry(table: FeatureArrays, key: int) -> int:
    """Return an entry for a key that has none; it is not in the order yet. There must be room."""
    facts = table.facts
    if 2 * (facts[IN_USE] + 1) > facts[INDEX_MASK] + 1 and facts[INDEX_MASK] + 1 < table.settings[INDEX_MAX]:
        _double_index(table)
    entry = facts[FREE_ENTRY]
    if entry != 0:
        facts[FREE_ENTRY] = table.newer[entry]
    else:
        facts[ENTRIES_USED] += 1
        entry = facts[ENTRIES_USED]
    facts[IN_USE] += 1
    table.entries[_place(table, key)] = entry
    table.keys[entry] = key
    return int(entry)


@compiled
def _take_row(table: FeatureArrays, entry: int) -> int:
    """Give a row to an entry that has none, and return it. There must be room."""
    facts = table.facts
    if facts[FREE_ROWS] > 0:
        facts[FREE_ROWS] -= 1
        row = int(table.free_rows[facts[FREE_ROWS]])
    else:
        facts[ROWS_USED] += 1
        row = int(facts[ROWS_USED])
    facts[ADMITTED] += 1
    table.row_of[entry] = row
    return row


@compiled
def _evict_until(table: FeatureArrays, fact: int, most: int) -> None:
    """Let the oldest features leave until a fact is below its limit."""
    while table.facts[fact] == most:
        _remove_oldest(table)
        table.facts[EVICTED] += 1


# ---- what rows of a stream do


@compiled
def find_feature(table: FeatureArrays, key: int, now_ms: int) -> int:
    """Return the entry of a feature that is not expired at this time; 0 for any other key. It changes nothing."""
    entry = table.entries[_place(table, key)]
    expire_ms = table.settings[EXPIRE_MS]
    return 0 if 0 < expire_ms < now_ms - table.last_ms[entry] else int(entry)


@compiled
def touch_feature(table: FeatureArrays, key: int, now_ms: int, squares: float) -> int:
    """Count an occurrence in a row that is learned at this time; return the entry, which is the newest one now.

    A new feature begins with weights of 0. With its ``admit``-th occurrence it gets a row of zeros; ``NEW_ROW`` is its
    number. All sums of squared gradients begin with ``squares``. Other entries may leave, but none of those that were
    touched last.
    """
    settings = table.settings
    expire_ms = settings[EXPIRE_MS]
    table.facts[NEW_ROW] = 0
    if expire_ms > 0:
        _remove_expired(table, now_ms)
    entry, last_ms = int(table.entries[_place(table, key)]), now_ms
    if entry == 0:
        _evict_until(table, IN_USE, settings[ENTRIES_MAX])
        entry = _take_entry(table, key)
        _link_newest(table, entry)
        table.file_of[entry] = NO_FILE
    else:
        renew_feature(table, entry)
        if 0 < expire_ms < now_ms - table.last_ms[entry]:
            _free_row(table, entry)
            table.counts[entry] = 0
            table.facts[EXPIRED] += 1
        else:
            last_ms = max(now_ms, int(table.last_ms[entry]))
    table.last_ms[entry] = last_ms
    if table.counts[entry] == 0:
        count = settings[OWN_WEIGHTS]
        for number in range(entry * 2 * count, (entry * 2 + 1) * count):
            table.weights[number], table.weights[number + count] = 0.0, squares
        for number in range(entry * settings[EARLY_BYTES], (entry + 1) * settings[EARLY_BYTES]):
            table.early[number] = 0
    if table.counts[entry] < COUNT_MAX:
        table.counts[entry] += 1
    if table.row_of[entry] == 0 and table.counts[entry] >= settings[ADMIT]:
        _evict_until(table, ADMITTED, settings[ROWS_MAX])
        count = settings[WIDTH]
        table.facts[NEW_ROW] = _take_row(table, entry)
        at = table.facts[NEW_ROW] * 2 * count
        for number in range(count):
            table.rows[at + number], table.rows[at + count + number] = 0.0, squares
    return entry


# ---- what the table itself calls


@compiled
def find_features(arrays: FeatureArrays, keys: Integers, times_ms: Integers, found: EntryNumbers) -> None:
    """Fill in the result of ``find_feature`` for each key at its time."""
    table = pointer_to(arrays)
    for position in range(len(keys)):
        found[position] = find_feature(table, keys[position], times_ms[position])


@compiled
def touch_features(
    arrays: FeatureArrays,
    keys: Integers,
    times_ms: Integers,
    squares: float,
    touched: EntryNumbers,
    given: EntryNumbers,
) -> None:
    """Fill in the result of ``touch_feature`` for each key at its time, one after the other, and each ``NEW_ROW``."""
    table = pointer_to(arrays)
    for position in range(len(keys)):
        touched[position] = touch_feature(table, keys[position], times_ms[position], squares)
        given[position] = table.facts[NEW_ROW]


@compiled
def renew_features(arrays: FeatureArrays, entries: EntryNumbers) -> None:
    """Call ``renew_feature`` for each entry, one after the other."""
    table = pointer_to(arrays)
    for position in range(len(entries)):
        renew_feature(table, entries[position])


@compiled
def changed_entries(arrays: FeatureArrays, found: EntryNumbers) -> int:
    """Fill in the entries that are in no file, the newest first, and return how many they are."""
    table, count = pointer_to(arrays), 0
    entry = table.older[0]
    while entry != 0 and table.file_of[entry] == NO_FILE:
        found[count] = entry
        count += 1
        entry = table.older[entry]
    return count


@compiled
def newer_entries(arrays: FeatureArrays, entry: int, found: EntryNumbers) -> None:
    """Fill in the entries that come after an entry in the order, or the oldest ones for entry 0."""
    table = pointer_to(arrays)
    for position in range(len(found)):
        entry = table.newer[entry]
        found[position] = entry


@compiled
def add_older_features(
    arrays: FeatureArrays, keys: Integers, is_admitted: npt.NDArray[np.bool_], most: int, added: EntryNumbers
) -> int:
    """Add features from the last one on, each as the oldest, until there are ``most``, or no room; return how many are
    left.

    ``added`` gets their entries: for a feature that is there already, 0. Their counts, times and numbers are left to
    the caller.
    """
    table, position = pointer_to(arrays), len(keys)
    facts, settings = table.facts, table.settings
    while position > 0:
        key, needs_row = keys[position - 1], is_admitted[position - 1]
        if table.entries[_place(table, key)] == 0:
            if facts[IN_USE] >= most or (needs_row and facts[ADMITTED] == settings[ROWS_MAX]):
                return position
            entry, oldest = _take_entry(table, key), table.newer[0]
            table.newer[entry], table.older[entry] = oldest, 0
            table.older[oldest] = table.newer[0] = entry
            table.counts[entry] = 1
            if needs_row:
                _take_row(table, entry)
            added[position - 1] = entry
        position -= 1
    return position
