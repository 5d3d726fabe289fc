"""Windows and joins by time, on keyed streams.

The pure part: `kinds` of windows, `aggregates` of their records, and the states of keys with what they emit:
`windowing` (windows), `joining` (joins by an interval and by windows) and `as_of` (what holds at the time of a record).
The operators around them: `steps` for windows, and `join_steps`.
"""
