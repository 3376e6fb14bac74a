"""Engines of hybrid models on a simulated GPU: CUDA-graph steps over recurrent states, with and without drafts."""

from __future__ import annotations

import pytest
from oracles import models
from oracles.simulated_gpu_engines import hybrid_engine, texts

from specdec_fast import SamplingParams
from specdec_kernels import simulated_gpu

RECURRENT = {
    "qwen3_next": {"tree_conv", "tree_delta", "state_commit"},
    "bamba": {"tree_conv", "tree_ssm", "state_commit"},
    "lfm2": {"tree_conv", "state_commit"},
}
"""Families, and folders of the recurrent kernels that their steps launch: `state_commit` holds window_commit."""
SHORT = (1, 17)


@pytest.mark.parametrize("drafts", [False, True])
@pytest.mark.parametrize("family", RECURRENT)
def test_texts_of_hybrids_on_a_gpu_are_those_of_the_cpu(family: str, drafts: bool) -> None:
    want = texts(hybrid_engine(family, "cpu", "sync", drafts), lengths=SHORT)
    with simulated_gpu.gpu("sm_90") as gpu:
        made = hybrid_engine(family, "cuda", "graph", drafts)
        gpu.clear()
        assert texts(made, lengths=SHORT) == want
        assert made.step_mode == "graph", made.explain()
        launched = {each.kernel.partition(".")[0] for each in gpu.launches if each.captured}
        assert gpu.captures and launched >= RECURRENT[family] - (set() if drafts else {"state_commit"})


@pytest.mark.parametrize("family", RECURRENT)
def test_a_captured_step_of_a_hybrid_reads_nothing(family: str) -> None:
    with simulated_gpu.gpu("sm_90") as gpu:
        made = hybrid_engine(family, "cuda", "graph", True)
        for seed, length in enumerate(SHORT):
            made.submit(models.prompt(length), SamplingParams(temperature=0.8, seed=seed, max_new_tokens=60))
        for _ in range(4):
            made.step()
        gpu.clear()
        made.step()
        assert gpu.captures == [] and gpu.launches == []
        assert gpu.host_reads == [] and gpu.uploads == [] and gpu.events_awaited == 1
