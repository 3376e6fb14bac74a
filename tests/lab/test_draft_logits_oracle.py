"""Distributions of drafters from plain forwards: they are those that the drafters themselves draft by, over their
caches.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from oracles import heads, models

from specdec_fast import Engine
from specdec_fast.drafters import make_drafter
from specdec_fast.heads.medusa import MedusaHeads
from specdec_fast.lab.draft_logits_oracle import plain_draft
from specdec_fast.lab.text_positions import find_places
from specdec_fast.sampling.params import SamplingParams


def drafting(name: str, folder: Path) -> Engine:
    target = models.target("llama", max_rows=1)
    if name == "medusa":
        torch.manual_seed(1)
        made = MedusaHeads(heads.HIDDEN, heads.VOCAB, 2, own_lm_head=False)
        torch.nn.init.normal_(made.weight, std=0.1)
        options: dict[str, Any] = {"head": made, "shape": [-1, 0, 1], "pick": "greedy"}
    else:
        options = {**heads.options(name, folder), "how": "top_k", "depth": 1, "width": 4}
    return Engine(target, make_drafter(name, options, target=target), rule="greedy", eos_token_ids=())


@pytest.mark.parametrize("name", ["eagle", "eagle3", "medusa"])
def test_the_first_drafted_tokens_are_the_likeliest_of_the_plain_distribution(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = drafting(name, tmp_path)
    dist_after, drafter = plain_draft(engine), engine.drafter
    assert drafter is not None
    propose, seen = drafter.propose, []

    def watched(view: Any, rows: Any, *rest: Any) -> Any:
        draft = propose(view, rows, *rest)
        children = draft.tokens[draft.parents == 0].tolist()
        seen.append((list(view.tokens(rows[0])), children))
        return draft

    monkeypatch.setattr(drafter, "propose", watched)
    handle = engine.generate([models.prompt(9)], SamplingParams(temperature=0, max_new_tokens=12))[0]
    assert handle.error is None and len(seen) >= 4
    for text, children in seen:
        logits = dist_after(text)
        assert logits.shape == (heads.VOCAB,) and children
        assert set(children) == set(logits.topk(len(children)).indices.tolist())
        if name == "eagle3":
            assert {token for token in range(heads.VOCAB) if logits[token] == float("-inf")} == set(
                range(heads.VOCAB)
            ) - set(heads.KEPT)


def test_a_drafter_without_a_distribution_is_refused() -> None:
    target = models.target("llama", max_rows=1)
    engine = Engine(target, make_drafter("ngram", {}, target=target))
    with pytest.raises(
        ValueError, match=r"got drafter ngram, which has no distribution of its own .* draft_model, draft_tree"
    ):
        find_places(engine, [("one", "two")], SamplingParams())


@pytest.mark.parametrize("name", ["eagle", "medusa"])
def test_heads_have_nothing_to_read_before_the_only_token(name: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="got a text of 1 token; expected at least 2"):
        plain_draft(drafting(name, tmp_path))([3])
