"""Real vLLM with the plugin: the same texts with and without drafts, in all that vLLM does to requests."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from oracles.vllm_models import OWN_DRAFTERS, PROMPT, VOCAB, generate, metric, reference, runner_of

from .conftest import WITHOUT_VLLM, Engines

pytestmark = [WITHOUT_VLLM, pytest.mark.slow]

TINY_CACHE = {"num_gpu_blocks_override": 20, "max_num_seqs": 16, "block_size": 32}
"""Blocks for a part of the requests, so that vLLM preempts some."""
SMALL_CHUNKS = {
    "enable_prefix_caching": True,
    "max_num_batched_tokens": 32,
    "max_num_seqs": 16,
    "block_size": 32,
    "num_gpu_blocks_override": 200,
}
"""Prompts are prefilled in parts, and their beginnings shared."""


def requests(count: int = 96, logprobs: bool = False) -> tuple[list[list[int]], list[Any]]:
    """Prompts and parameters of every kind that vLLM takes with speculation."""
    from vllm import SamplingParams

    chance = random.Random(5)
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.9},
        {"temperature": 0.0},
        {"temperature": 1.3, "top_k": 5},
        {"temperature": 0.8, "top_p": 0.7},
        {"temperature": 1.0, "repetition_penalty": 1.3, "presence_penalty": 0.4},
        {"temperature": 0.0, "frequency_penalty": 0.6},
        {"temperature": 0.9, "allowed_token_ids": [1, 2, 3, 5, 8, 13]},
        {"temperature": 0.9, "stop_token_ids": [7], "min_tokens": 6},
    ]
    shared = [chance.randrange(VOCAB) for _ in range(40)]
    prompts, params = [], []
    for at in range(count):
        prompts.append(
            shared[: chance.randrange(41)] + [chance.randrange(VOCAB) for _ in range(chance.randrange(1, 12))]
        )
        kind = {**kinds[at % len(kinds)], "logprobs": 2 if logprobs else None}
        params.append(SamplingParams(seed=at // 3, max_tokens=chance.randrange(8, 40), detokenize=False, **kind))
    return prompts, params


@pytest.fixture(scope="module")
def plain(engines: Engines) -> list[list[int]]:
    """Texts under rule `replay` without drafts."""
    return generate(engines("replay"), *requests())


def test_greedy_texts_equal_those_of_stock_vllm(engines: Engines) -> None:
    from vllm import SamplingParams

    prompts, _ = requests(32)
    params = [SamplingParams(temperature=0.0, max_tokens=40, detokenize=False, ignore_eos=True)] * 32
    stock = generate(engines(None), prompts, params)
    for rule, drafts in (("replay", "none"), ("replay", "greedy"), ("rejection", "sampled"), ("block", "sampled")):
        assert generate(engines(rule, drafts), prompts, params) == stock, (rule, drafts)


@pytest.mark.parametrize("drafts", ["greedy", *OWN_DRAFTERS])
def test_drafts_never_change_a_text(engines: Engines, plain: list[list[int]], drafts: str) -> None:
    engine = engines("replay", drafts)
    runner, lengths = runner_of(engine), []
    sample = runner._sample

    def counted(logits: Any, drafts: Any) -> Any:
        found = sample(logits, drafts)
        lengths.extend((found.sampled_token_ids >= 0).sum(1).tolist() if drafts else [])
        return found

    runner._sample = counted
    assert generate(engine, *requests()) == plain
    runner._sample = sample
    assert {1, 2} < set(lengths), "some drafts are accepted, and some rejected"


@pytest.mark.parametrize("drafts", ["greedy", "suffix"])
def test_preemption_never_changes_a_text(engines: Engines, plain: list[list[int]], drafts: str) -> None:
    engine = engines("replay", drafts, **TINY_CACHE)
    before = metric(engine, "num_preemptions")
    assert generate(engine, *requests()) == plain
    assert metric(engine, "num_preemptions") > before


@pytest.mark.parametrize("drafts", ["none", "greedy", "suffix"])
def test_chunked_prefills_and_shared_prefixes_never_change_a_text(
    engines: Engines, plain: list[list[int]], drafts: str
) -> None:
    engine = engines("replay", drafts, **SMALL_CHUNKS)
    assert generate(engine, *requests()) == plain
    assert generate(engine, *requests()) == plain, "with all prefixes stored"


def test_several_choices_have_seeds_of_their_own(engines: Engines) -> None:
    from vllm import SamplingParams

    engine = engines("replay", "greedy")
    fixed = {"temperature": 1.0, "max_tokens": 12, "detokenize": False}
    (several,) = engine.generate([{"prompt_token_ids": PROMPT}], SamplingParams(n=3, seed=11, **fixed), use_tqdm=False)
    single = generate(engine, [PROMPT] * 3, [SamplingParams(seed=11 + at, **fixed) for at in range(3)])
    assert [list(each.token_ids) for each in several.outputs] == single
    assert len(set(map(tuple, single))) == 3


@pytest.mark.parametrize("drafts", ["none", "greedy"])
def test_bad_words_are_never_emitted(engines: Engines, drafts: str) -> None:
    from vllm import SamplingParams

    engine = engines("replay", drafts)
    params = SamplingParams(temperature=0.9, seed=3, max_tokens=60, detokenize=False)
    params._bad_words_token_ids = [[5], [1, 9], [3, 7]]  # words become ids by a tokenizer, which tiny models lack
    made = generate(engine, [PROMPT] * 8, [params.clone() for _ in range(8)])
    for text in made:
        assert 5 not in text
        assert not {(1, 9), (3, 7)} & set(zip([*PROMPT[-1:], *text], text))
    assert made == generate(engines("replay"), [PROMPT] * 8, [params.clone() for _ in range(8)])


def test_parameters_that_vllm_refuses_with_speculation_work_without(engines: Engines) -> None:
    from vllm import SamplingParams
    from vllm.exceptions import VLLMValidationError

    kinds: tuple[dict[str, Any], ...] = ({"logit_bias": {2: 100.0}}, {"min_p": 0.3})
    fixed = {"temperature": 1.0, "max_tokens": 12, "detokenize": False}
    params = [SamplingParams(**fixed, **kinds[at > 0], seed=at) for at in range(9)]
    biased, *tempered = generate(engines("replay"), [PROMPT] * 9, params)
    assert biased == [2] * 12
    free = generate(engines("replay"), [PROMPT] * 8, [SamplingParams(**fixed, seed=at + 1) for at in range(8)])
    assert tempered != free
    for kind in kinds:
        with pytest.raises(VLLMValidationError, match="not yet supported with speculative decoding"):
            generate(engines("replay", "greedy"), [PROMPT], [SamplingParams(**fixed, **kind)])
    assert len(generate(engines("replay", "greedy"), [PROMPT], [SamplingParams(**fixed)])[0]) == 12


@pytest.mark.parametrize("mode", ["raw_logprobs", "processed_logprobs", "raw_logits", "processed_logits"])
def test_logprobs_are_those_of_the_model(engines: Engines, tiny: Path, mode: str) -> None:
    from vllm import SamplingParams

    options = {} if mode == "raw_logprobs" else {"logprobs_mode": mode}
    model = reference(tiny)
    kinds = ({"temperature": 0.8}, {"temperature": 0.0}, {"temperature": 1.2, "top_k": 4})
    params = [SamplingParams(seed=4, max_tokens=14, logprobs=3, detokenize=False, **kind) for kind in kinds]
    asked = [{"prompt_token_ids": PROMPT}] * len(kinds)
    seen = []
    for drafts in ("none", "greedy"):
        made = engines("replay", drafts, **options).generate(asked, params, use_tqdm=False)
        seen.append([list(each.outputs[0].token_ids) for each in made])
        for each, kind in zip(made, kinds):
            text = list(each.outputs[0].token_ids)
            with torch.no_grad():
                rows = model(torch.tensor([[*PROMPT, *text]])).logits[0, len(PROMPT) - 1 : -1]
            if mode.startswith("processed"):
                rows = rows / (kind["temperature"] or 1.0)
                if "top_k" in kind:
                    rows = rows.masked_fill(rows < rows.topk(4).values[:, -1:], -torch.inf)
            rows = rows.log_softmax(-1) if mode.endswith("logprobs") else rows
            assert len(each.outputs[0].logprobs) == len(text)
            for row, token, found in zip(rows, text, each.outputs[0].logprobs):
                assert token in found and len(found) in (3, 4)
                for other, value in found.items():
                    assert value.logprob == pytest.approx(float(row[other]), abs=1e-4)
                assert found[token].rank == 1 + int((row > row[token]).sum())
    assert seen[0] == seen[1]


def test_two_engines_in_a_process_do_not_see_each_other(engines: Engines) -> None:
    asked, stock = runner_of(engines("replay")), runner_of(engines(None))
    assert "_sample" in vars(asked) and "_sample" not in vars(stock) and not hasattr(stock, "_specdec")
    assert type(stock)._sample.__module__ == "vllm.v1.worker.gpu_model_runner"
    assert stock._sample.__func__ is type(asked)._sample
    drafting = runner_of(engines(None, "sampled")).drafter
    assert not {"_sample_draft_tokens", "set_inputs_first_pass"} & set(vars(drafting))


@pytest.mark.parametrize("drafts", ["greedy", "suffix", "recycling"])
def test_a_client_that_leaves_takes_everything_along(engines: Engines, drafts: str) -> None:
    from vllm import SamplingParams

    llm = engines("replay", drafts)
    engine, runner = llm.llm_engine, runner_of(llm)
    for name in ("a", "b", "c"):
        engine.add_request(name, {"prompt_token_ids": PROMPT}, SamplingParams(max_tokens=60, seed=1, detokenize=False))
    for _ in range(5):
        engine.step()
    engine.abort_request(["a", "b"])
    finished = []
    while engine.has_unfinished_requests():
        finished += [each for each in engine.step() if each.finished]
    assert [each.request_id for each in finished] == ["c"]
    again = generate(llm, [PROMPT], [SamplingParams(max_tokens=60, seed=1, detokenize=False)])
    assert again == [list(finished[0].outputs[0].token_ids)]
    generate(llm, [[4, 2]], [SamplingParams(max_tokens=1, detokenize=False)])
    assert len(runner.requests) <= 1 and len(runner._specdec._batch.request_ids) <= 1
    if drafts in OWN_DRAFTERS:
        assert len(runner.drafter._view._texts) <= 1 and len(runner.drafter._view._rows) <= 1
