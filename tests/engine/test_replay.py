"""Replay: the text is a function of prompt, parameters and seed, with and without speculation, in any batch.

The reference is plain decoding through the engine. For some cases it is a full forward pass of the untouched model per
token, with the distribution in float64.
"""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from oracles import models
from oracles.automaton import AutomatonTarget, random_logits
from oracles.noisy_oracle import NoisyChain, NoisyTree
from oracles.pairwise import pairwise
from oracles.plain_decoding import plain_decode, recompute

from specdec_fast import Engine, HuggingFaceTarget, SamplingParams, get_drafter
from specdec_fast.targets import linear_layers
from specdec_kernels.dispatch import extension

DISTS: dict[str, dict[str, Any]] = {
    "whole": {},
    "top-k": {"top_k": 12},
    "top-p": {"top_p": 0.85},
    "min-p": {"min_p": 0.08},
    "all": {"top_k": 20, "top_p": 0.9, "min_p": 0.03},
}
NEW = 24
PROMPTS = [models.prompt(length) for length in (1, 5, 17, 40)]


def params(seed: int, temperature: float, dist: str, new: int = NEW, **changes: Any) -> SamplingParams:
    return SamplingParams(temperature=temperature, seed=seed, max_new_tokens=new, **DISTS[dist], **changes)


@pytest.mark.parametrize(
    "case",
    pairwise(
        {"temperature": (0.3, 0.7, 1.0, 1.5), "dist": tuple(DISTS), "family": ("llama", "gpt2", "mistral")},
        seed=1,
    ),
    ids=lambda case: "-".join(str(value) for value in case.values()),
)
def test_plain_decoding_is_the_cache_free_oracle(case: dict[str, Any]) -> None:
    wanted = params(11, case["temperature"], case["dist"], new=16)
    prompts = PROMPTS[1:3]
    engine = Engine(models.target(case["family"]))
    handles = engine.generate(prompts, wanted)
    logits_after = recompute(models.untouched(case["family"]))
    for prompt, handle in zip(prompts, handles, strict=True):
        assert handle.tokens == plain_decode(logits_after, prompt, wanted)


FACTORS: dict[str, tuple[Any, ...]] = {
    "temperature": (0.3, 0.7, 1.0, 1.5),
    "dist": tuple(DISTS),
    "drafter": ("coupled", "sampled", "ngram", "tree"),
    "num_draft_tokens": tuple(range(1, 9)),
}


@pytest.fixture(scope="module", params=[False, None], ids=["modules", "whole"])
def llama(request: pytest.FixtureRequest) -> HuggingFaceTarget:
    """Yields targets whose passes run the model's modules, and the fused forward."""
    return models.target("llama", max_rows=4, fused_forward=request.param)


@pytest.fixture(scope="module")
def small() -> HuggingFaceTarget:
    return HuggingFaceTarget(models.kin("llama"), max_length=320, max_rows=4, fused_forward=None)


@pytest.mark.parametrize(
    "case", pairwise(FACTORS, seed=2), ids=lambda case: "-".join(str(value) for value in case.values())
)
def test_the_text_of_a_seed_does_not_depend_on_speculation(
    case: dict[str, Any], llama: HuggingFaceTarget, small: HuggingFaceTarget
) -> None:
    count = case["num_draft_tokens"]
    wanted = [params(100 + at, case["temperature"], case["dist"]) for at in range(len(PROMPTS))]
    plain = Engine(llama).generate(PROMPTS, wanted)
    if case["drafter"] == "tree":
        texts = [[*prompt, *handle.tokens] for prompt, handle in zip(PROMPTS, plain, strict=True)]
        drafter: Any = NoisyTree(texts, 0.7, 96, num_draft_tokens=count)
    elif case["drafter"] == "ngram":
        drafter = get_drafter("ngram")(num_draft_tokens=count, n_min=1)
    else:
        drafter = get_drafter("draft_model")(small, num_draft_tokens=count, pick=case["drafter"])
    engine = Engine(llama, drafter)
    order = random.Random(count).sample(range(len(PROMPTS)), len(PROMPTS))  # other rows of the batch
    drafted = engine.generate([PROMPTS[at] for at in order], [wanted[at] for at in order])
    for at, handle in zip(order, drafted, strict=True):
        assert handle.tokens == plain[at].tokens
    if case["drafter"] in ("coupled", "tree"):
        assert engine.stats.tau > 1.2
    assert engine.idle and llama.cache.pages.num_used == 0 and small.cache.pages.num_used == 0


def test_half_precision_texts_are_the_same_alone_and_in_a_batch() -> None:
    """With `batch_invariant_linear` on any processor, a token in a batch of trees has the bits of a step of its own."""
    if extension.unavailable_reason() is not None:
        pytest.skip("CPU extension not built")
    wanted = [params(at, temperature, "whole", new=32) for at, temperature in enumerate((0.0, 0.7, 1.0, 1.5))]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(linear_layers, "has_instructions", lambda dtype: False)
        target = HuggingFaceTarget(models.own("llama", torch.bfloat16), max_length=128, max_rows=4)
    alone = [Engine(target).generate([prompt], own)[0].tokens for prompt, own in zip(PROMPTS, wanted, strict=True)]
    texts = [[*prompt, *tokens] for prompt, tokens in zip(PROMPTS, alone, strict=True)]
    engine = Engine(target, NoisyTree(texts, 0.7, 96, num_draft_tokens=8))
    assert [handle.tokens for handle in engine.generate(PROMPTS, wanted)] == alone
    assert engine.stats.tau > 2


def automaton(**shape: int) -> AutomatonTarget:
    return AutomatonTarget(random_logits(31, 9, seed=4), **shape)


def requests(count: int) -> list[tuple[list[int], SamplingParams]]:
    source = random.Random(9)
    made = []
    for seed in range(count):
        prompt = [source.randrange(9) for _ in range(source.randrange(1, 12))]
        dist, temperature = source.choice(list(DISTS)), source.choice([0.0, 0.3, 0.7, 1.0, 1.5])
        made.append((prompt, params(seed, temperature, dist, new=source.randrange(1, 25))))
    return made


@pytest.fixture(scope="module")
def alone() -> list[list[int]]:
    """Decodes every request alone, without speculation."""
    target, texts = automaton(), []
    for prompt, wanted in requests(40):
        handle = Engine(target).generate([prompt], wanted)[0]
        assert handle.tokens == plain_decode(target.logits_after, prompt, wanted)
        texts.append(handle.tokens)
    return texts


@pytest.mark.parametrize("kind", ["none", "ngram", "draft_model", "chain", "tree"])
@pytest.mark.parametrize("rows", [1, 3, 8])
def test_rows_join_and_leave_without_changing_a_text(kind: str, rows: int, alone: list[list[int]]) -> None:
    """Requests arrive at random times, with their own budgets, in batches of up to `rows`."""
    source = random.Random(rows)
    target = automaton(max_rows=rows, page_size=source.choice([1, 4, 16]))
    texts = [[*prompt, *text] for (prompt, _), text in zip(requests(40), alone, strict=True)]
    drafter: Any = {
        "none": lambda: None,
        "ngram": lambda: get_drafter("ngram")(num_draft_tokens=5, n_min=1),
        "draft_model": lambda: get_drafter("draft_model")(
            AutomatonTarget(random_logits(31, 9, seed=4) + 0.7 * random_logits(31, 9, seed=5), max_rows=rows)
        ),
        "chain": lambda: NoisyChain(texts, 0.8, 9, num_draft_tokens=6),
        "tree": lambda: NoisyTree(texts, 0.8, 9, num_draft_tokens=12),
    }[kind]()
    engine = Engine(target, drafter)
    waiting = list(enumerate(requests(40)))
    source.shuffle(waiting)
    handles = {}
    while waiting or not engine.idle:
        while waiting and source.random() < 0.5:
            at, (prompt, wanted) = waiting.pop()
            budget = None if drafter is None else source.choice([None, 0, 1, 3, 9])
            handles[at] = engine.submit(prompt, wanted, num_draft_tokens=budget)
        engine.step()
    assert {at: handle.tokens for at, handle in handles.items()} == dict(enumerate(alone))
    if kind in ("draft_model", "chain", "tree"):
        assert engine.stats.alpha > 0.3
    assert target.cache.pages.num_used == 0


def test_seeds_that_were_not_given_are_recorded_and_replay() -> None:
    engine = Engine(automaton())
    first = engine.generate([[1, 2], [1, 2]], SamplingParams(max_new_tokens=30, temperature=1.5))
    assert first[0].params.seed is not None and first[0].params.seed != first[1].params.seed
    assert first[0].tokens != first[1].tokens
    again = engine.generate([[1, 2]], first[0].params)[0]
    assert again.tokens == first[0].tokens and again.as_dict()["seed"] == first[0].params.seed


def test_min_new_tokens_follows_the_oracle_at_every_node() -> None:
    """Ends are forbidden by position, at accepted nodes of a tree too."""
    target = automaton()
    ends = (3, 5)
    for seed in range(12):
        wanted = params(seed, 1.0, "whole", new=16, min_new_tokens=seed % 7)
        want = plain_decode(target.logits_after, [1, 2, 3], wanted, eos=ends)
        texts = [[1, 2, 3, *want, 3, 5]]
        for drafter in (None, NoisyChain(texts, 0.9, 9, 7), NoisyTree(texts, 0.9, 9, 12)):
            engine = Engine(target, drafter, eos_token_ids=ends)
            handle = engine.generate([[1, 2, 3]], wanted)[0]
            assert handle.tokens == want and len(want) >= min(seed % 7 + 1, 16)
