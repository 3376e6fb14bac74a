"""Tests of other engines: their texts against the distribution of the model, for `specdec lab --engine`.

`settings` lists engines and ways of drafting. `recording` runs an engine in its own interpreter: there,
`scripts/build_pairs.py` makes tiny models, and `scripts/record.py` records texts. `verdict` tests the texts, and
`table` shows the rows.
Tests: tests/lab/engines/.
"""
