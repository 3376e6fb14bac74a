"""The end-to-end settings under pytest-benchmark: the timed call is speculative decoding, the ratios go beside it."""

from __future__ import annotations

import pytest

from benchmarks.end_to_end import Setting, all_settings, measure


@pytest.mark.parametrize("setting", all_settings(draft_tokens=4), ids=lambda setting: setting.name)
def test_draft_model_end_to_end(benchmark, setting: Setting) -> None:
    row, runs = measure(setting, rounds=3, prompts=4)
    benchmark.extra_info.update(row)
    benchmark.pedantic(runs["speculative"], rounds=3)
    if setting.dtype == "float32":
        assert row["identical"], "speculation changed the text: no speed-up is reported on a red test"
