"""Verification on plain tensors of a simulated GPU: the CPU's answers, and nothing is read or copied on the host."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from oracles import fake_sglang as fake
from torch import Tensor

from specdec_fast import TokenDistributions, verify, verify_packed
from specdec_fast.embedding import (
    flat_from_chains,
    links_from_parents,
    mask_from_parents,
    parents_from_mask,
    verify_links,
)
from specdec_fast.integrations.sglang.tree_sampler import TreeSampler
from specdec_kernels import simulated_gpu

pytestmark = [
    pytest.mark.aot,
    pytest.mark.filterwarnings("ignore::specdec_kernels.FallbackWarning"),  # results are computed on the CPU
]
ROWS, K, VOCAB = 5, 3, 40


def inputs() -> dict[str, Tensor]:
    """What a serving stack holds on the device."""
    source = torch.Generator().manual_seed(1)
    logits = torch.randn(ROWS, K + 1, VOCAB, generator=source) * 2
    lengths = torch.tensor([3, 0, 2, 1, 3])
    tokens = logits[:, :K].argmax(-1)
    flat, ends = flat_from_chains(tokens, lengths)
    parents = torch.tensor([-1, 0, 0, 1]).expand(ROWS, -1)
    links = links_from_parents(parents)
    return {
        "logits": logits,
        "tokens": tokens,
        "probs": torch.randn(ROWS, K, VOCAB, generator=source).softmax(-1),
        "lengths": lengths,
        "kept": logits[torch.arange(K + 1) <= lengths[:, None]],
        "flat": flat,
        "ends": ends,
        "parents": parents.clone(),
        "tree": torch.cat([tokens[:, :1], tokens], 1),
        "next_token": links.next_token,
        "next_sibling": links.next_sibling,
        "seeds": torch.arange(ROWS),
        "positions": torch.arange(ROWS) + 4,
        "temperature": torch.linspace(0, 1.2, ROWS),
    }


def calls(own: dict[str, Tensor], rule: str) -> list[Any]:
    """Every function, on tensors of one device."""
    options: dict[str, Any] = {"rule": rule, "top_p": 0.9}
    options |= {name: own[name] for name in ("seeds", "positions", "temperature")}
    sampled = own["probs"] if rule == "rejection" else None
    found: list[Any] = [
        verify(own["logits"], own["tokens"], sampled, **options),
        verify(own["logits"], own["tokens"], sampled, own["lengths"], **options),
        verify_packed(own["kept"], own["flat"], own["ends"], max_draft_tokens=K, **options),
    ]
    tree_rule = "recursive_rejection" if rule == "rejection" else "replay"
    tree = (own["tree"], own["next_token"], own["next_sibling"])
    found.append(verify_links(own["logits"], *tree, sampled, **options | {"rule": tree_rule}).path)
    found.append(TokenDistributions.of(own["kept"], top_k=3).lse)
    found.append(TokenDistributions.from_probs(own["probs"].flatten(0, 1)).lse)
    found.append(parents_from_mask(mask_from_parents(own["parents"])))
    return found


@pytest.mark.parametrize("rule", ["rejection", "replay"])
def test_a_gpu_is_never_waited_for(rule: str) -> None:
    host = inputs()
    want = calls(host, rule)
    with simulated_gpu.gpu("sm_90") as gpu:
        device = {name: value.cuda() for name, value in host.items()}
        gpu.clear()
        found = calls(device, rule)
        assert gpu.host_reads == [] and gpu.uploads == []
        answers = [each.cpu() for each in found]
    for got, expected in zip(answers, want, strict=True):
        assert torch.allclose(got.double(), expected.double(), atol=1e-5)


def test_a_batch_of_sglang_is_never_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seeds of requests reach the device by a pinned copy."""
    fake.install(monkeypatch)
    host = inputs()
    answers = []
    with simulated_gpu.gpu("sm_90") as gpu:
        for place in ("cpu", "cuda"):
            own = {name: value.to(place) for name, value in host.items()}
            batch = fake.batch([4] * ROWS, temperatures=own["temperature"].clamp(min=0.1)[:, None])
            batch.seq_lens = batch.seq_lens.to(place)
            given = SimpleNamespace(
                draft_token=own["tree"].flatten(),
                retrieve_index=torch.arange(ROWS * (K + 1)).view(ROWS, K + 1).to(place),
                retrieve_next_token=own["next_token"],
                retrieve_next_sibling=own["next_sibling"],
                draft_token_num=K + 1,
                max_tree_depth=K + 1,
                draft_probs=None,
            )
            gpu.clear()
            answer = TreeSampler("replay")(
                fake.eagle_sample, given, batch, fake.logits_output(own["logits"].flatten(0, 1))
            )
            assert gpu.host_reads == [] and gpu.uploads == []
            answers.append([each.cpu() for each in answer])
    for got, expected in zip(*answers, strict=True):
        assert torch.equal(got, expected)
