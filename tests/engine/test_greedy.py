"""Greedy decoding through the engine is token-identical to transformers' `generate`, for every drafter and rule.

The reference runs on an untouched copy of the model with transformers' own attention and cache, one prompt at
a time.
"""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from oracles import models
from oracles.noisy_oracle import NoisyChain, NoisyTree
from oracles.pairwise import pairwise

from specdec_fast import Engine, HuggingFaceTarget, SamplingParams, get_drafter
from specdec_fast.engine.request import Handle

NEW = 28
FACTORS: dict[str, tuple[Any, ...]] = {
    "family": models.FAMILY_NAMES,
    "drafter": ("draft_model", "ngram", "chain", "tree"),
    "num_draft_tokens": tuple(range(1, 9)),
    "batch": tuple(range(1, 9)),
    "rule": ("replay", "greedy", "rejection"),
    "page_size": (1, 16, 256),
    "attention": ("eager", "sdpa"),
    "passes": ("modules", "whole"),  # the fused forward, where it exists (Llama)
}
CASES = pairwise(FACTORS, seed=3)


def lengths(batch: int, seed: int) -> list[int]:
    """Prompt lengths of a ragged batch."""
    return random.Random(seed).sample(models.PROMPT_LENGTHS, batch)


def drafter(
    name: str, family: str, count: int, texts: list[list[int]], rows: int = 8, fused_forward: bool | None = False
) -> Any:
    if name == "draft_model":
        small = HuggingFaceTarget(models.kin(family), max_length=320, max_rows=rows, fused_forward=fused_forward)
        return get_drafter(name)(small, num_draft_tokens=count)
    if name == "ngram":
        return get_drafter(name)(num_draft_tokens=count, n_min=1)
    kind = {"chain": NoisyChain, "tree": NoisyTree}[name]
    made = kind(texts, 0.75, 96, num_draft_tokens=count, seed=count)
    if name == "tree" and count > 2:
        made.score_only_rate = 0.1
    return made


def check(handles: list[Handle], want: list[list[int]], family: str, prompts: list[list[int]]) -> None:
    """Checks equality token by token. A difference is reported with the gap between the two best logits there."""
    for handle, expected, prompt in zip(handles, want, prompts, strict=True):
        if handle.tokens == expected:
            continue
        assert handle.error is None, handle.error
        both = zip([*handle.tokens, -1], [*expected, -2], strict=False)
        at = next(place for place, (one, other) in enumerate(both) if one != other)
        with torch.no_grad():
            logits = models.untouched(family)(torch.tensor([[*prompt, *expected[:at]]])).logits[0, -1]
        best = logits.topk(2).values
        pytest.fail(
            f"prompt of {len(prompt)}: token {at} is {[*handle.tokens, None][at]}, generate says "
            f"{[*expected, None][at]}; the two best logits there differ by {float(best[0] - best[1]):.2g}"
        )


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(str(value) for value in case.values()))
def test_the_text_is_that_of_generate(case: dict[str, Any]) -> None:
    rule, name = case["rule"], case["drafter"]
    if rule == "rejection" and name == "tree":
        rule = "replay"  # rule `rejection` takes chains only
    family, seed = case["family"], CASES.index(case)
    sizes = lengths(case["batch"], seed)
    prompts = [models.prompt(length) for length in sizes]
    want = [models.greedy_text(family, length, NEW, case["attention"]) for length in sizes]
    texts = [[*prompt, *text] for prompt, text in zip(prompts, want, strict=True)]
    source = random.Random(seed)
    ends: tuple[int, ...] = ()
    if seed % 2:  # an end-of-sequence id in the middle of a text, so inside accepted runs too
        places = [at for at in range(8, NEW) if want[0].index(want[0][at]) >= 4]
        ends = (want[0][source.choice(places)],) if places else ()
        want = [models.until(text, ends) for text in want]
    whole = None if case["passes"] == "whole" else False
    shape = {"page_size": case["page_size"], "max_rows": source.choice([case["batch"], 8])}
    engine = Engine(
        models.target(family, fused_forward=whole, **shape),
        drafter(name, family, case["num_draft_tokens"], texts, fused_forward=whole),
        rule=rule,
        eos_token_ids=ends,
        prefill_chunk=source.choice([7, 64, 2048]),
    )
    handles = engine.generate(prompts, SamplingParams(temperature=0, max_new_tokens=NEW))
    check(handles, want, family, prompts)
    for handle in handles:
        assert handle.finish_reason == ("eos" if handle.tokens[-1] in ends else "length")
    if name != "ngram" and case["num_draft_tokens"] > 1:
        assert engine.stats.tau > 1.15, "nothing was accepted: the test would prove little"
    assert engine.target.cache.pages.num_used == 0


def test_every_pair_of_factors_is_covered() -> None:
    assert len(CASES) <= 100
    for one in FACTORS:
        for two in FACTORS:
            if one < two:
                pairs = {(case[one], case[two]) for case in CASES}
                assert len(pairs) == len(FACTORS[one]) * len(FACTORS[two])


@pytest.mark.parametrize("family", ["mistral", "gemma2"])
def test_the_window_matters_for_these_texts(family: str) -> None:
    """Otherwise the cases above would not detect a window that is ignored or off by one."""
    ids = torch.tensor([models.prompt(75)])
    model = models.untouched(family)
    found = []
    for window in (24, 23, 25, 4096):
        model.config.sliding_window = window
        other = type(model)(model.config)
        other.load_state_dict(model.state_dict())
        with torch.no_grad():
            found.append(other.eval()(ids, use_cache=False).logits[0, 40:].argmax(1))
    model.config.sliding_window = 24
    assert all(int((found[0] != other).sum()) >= 1 for other in found[1:])


def test_every_position_of_an_accepted_run_can_end_the_text() -> None:
    """A perfect drafter of eight tokens; each of the first twelve tokens in turn ends the text."""
    family, length = "llama", 17
    prompt, text = models.prompt(length), models.greedy_text("llama", 17, NEW)
    target = models.target(family)
    for end in dict.fromkeys(text[:12]):
        engine = Engine(target, NoisyChain([[*prompt, *text]], 1.0, 96, num_draft_tokens=8), eos_token_ids=(end,))
        handle = engine.generate([prompt], SamplingParams(temperature=0, max_new_tokens=NEW))[0]
        assert handle.tokens == models.until(text, (end,)) and handle.finish_reason == "eos"
        assert len(handle.origins) == len(handle.tokens) == handle.stats.new_tokens
