"""The plot of a search."""

from __future__ import annotations

import sys

import pytest

from specdec_fast.targets.skipped_layers import SkippedLayers
from specdec_fast.tune.search_plot import search_chart
from specdec_fast.tune.skipped_layers_search import Trial

TRIALS = [Trial(SkippedLayers(), 1.1, 0.02), Trial(SkippedLayers((1,), (0,)), 0.9, 0.05)]


def test_a_png_that_follows_the_trials() -> None:
    pytest.importorskip("matplotlib")
    shown = search_chart(TRIALS, TRIALS[1], 2, "a model")
    assert shown.startswith(b"\x89PNG") and len(shown) > 5000
    assert shown == search_chart(TRIALS, TRIALS[1], 2, "a model") != search_chart(TRIALS[:1], TRIALS[0], 2, "a model")


def test_without_trials_or_library(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="got no trials"):
        search_chart([], TRIALS[0], 2, "")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ValueError, match=r"pip install -e '.\[tune\]'"):
        search_chart(TRIALS, TRIALS[0], 2, "")
