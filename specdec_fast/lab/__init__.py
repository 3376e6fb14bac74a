"""The losslessness lab: exact enumeration, statistics over many draws, plots and a report (`specdec lab`).

`exact_distributions` enumerates all outcomes of a rule and compares them with rational arithmetic. `draw_counts` runs
rules with production randomness on real distributions. `statistics` and `sequential_test` test the counts.
`foreign_samples` tests draws of other programs. The extra `lab` installs scipy, matplotlib and jinja2, which are
imported only when needed. Tests: tests/lab/.
"""

from __future__ import annotations

DRAFTERS = ("draft_model", "draft_tree", "medusa", "blockwise", "eagle", "eagle3", "mtp")
"""Drafters that have a distribution of their own, from which the lab samples drafts."""
