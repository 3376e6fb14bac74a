"""The losslessness lab: exact enumeration, statistics over many draws, plots and a report (`specdec lab`).

`exact` enumerates rules over all coins against rational arithmetic; `draws` runs them through production randomness on
real distributions; `statistics` and `sequential` judge counts; `recorded` takes draws of foreign samplers. Nothing
heavy is imported here; the extra `lab` brings scipy, matplotlib and jinja2. Tests: tests/lab/.
"""

from __future__ import annotations

DRAFTERS = ("draft_model", "draft_tree", "medusa", "blockwise", "eagle", "eagle3", "mtp")
"""Drafters with a distribution of their own, which draws are made from."""
