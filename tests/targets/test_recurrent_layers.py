"""Targets with recurrent layers: texts of every family, and bits of states and logits after trees and refusals."""

from __future__ import annotations

import random
import sys

import pytest
import torch
from oracles import hybrid_models
from oracles.hybrid_models import EXPERTS, MIXERS, NAMES, SAME_BITS, Stepper, equal, path_to, random_tree
from oracles.noisy_oracle import NoisyChain, NoisyTree
from transformers.utils import logging as transformers_logging

from specdec_fast import Engine, HuggingFaceTarget, SamplingParams
from specdec_fast.targets.model_support import UnsupportedModelError
from specdec_fast.targets.recurrent_layers import MIXER_FUNCTIONS
from specdec_fast.targets.tiny_models import HYBRID_FAMILIES, tiny_model

PROMPTS = ([5, 6, 7, 8, 9, 3, 4], [11, 12, 13], [40, 41, 42, 43, 44, 45, 46, 47, 48, 49, 50], [1], [7, 7])
COUNT = 24


@pytest.mark.parametrize("name", NAMES)
def test_greedy_texts_are_those_of_transformers(name: str) -> None:
    """A ragged batch of five with chains and with trees, of which many tokens are accepted and others are not."""
    model = hybrid_models.model(name)
    expected = [hybrid_models.own_text(name, prompt, COUNT) for prompt in PROMPTS]
    texts = [[*prompt, *text] for prompt, text in zip(PROMPTS, expected)]
    target = HuggingFaceTarget(model, max_rows=5)
    params = SamplingParams(temperature=0, max_new_tokens=COUNT, ignore_eos=True)
    try:
        for drafter in (None, NoisyChain(texts, 0.7, 96), NoisyTree(texts, 0.7, 96)):
            engine = Engine(target, drafter=drafter, prefix_sharing=False)
            found = [list(each.tokens) for each in engine.generate([list(each) for each in PROMPTS], params)]
            assert found == expected
            assert drafter is None or engine.stats.tau > 1.5
    finally:
        target.close()


@pytest.mark.parametrize("name", NAMES)
def test_replayed_texts_do_not_depend_on_drafts(name: str) -> None:
    target = HuggingFaceTarget(hybrid_models.model(name), max_rows=5)
    params = [SamplingParams(temperature=1.0, seed=at, max_new_tokens=COUNT, ignore_eos=True) for at in range(5)]
    try:
        plain = Engine(target, rule="replay").generate([list(each) for each in PROMPTS], params)
        expected = [list(each.tokens) for each in plain]
        texts = [[*prompt, *text] for prompt, text in zip(PROMPTS, expected)]
        for drafter in (NoisyChain(texts, 0.7, 96), NoisyTree(texts, 0.7, 96)):
            engine = Engine(target, drafter=drafter, rule="replay")
            assert [list(each.tokens) for each in engine.generate([list(each) for each in PROMPTS], params)] == expected
            assert engine.stats.tau > 1.5
    finally:
        target.close()


@pytest.mark.parametrize("name", SAME_BITS)
def test_bits_after_a_tree_are_those_of_single_tokens(name: str) -> None:
    """Logits of all nodes, states after a commit, and the logits of the next token."""
    target = HuggingFaceTarget(hybrid_models.model(name), max_rows=3)
    steps, source = Stepper(target), random.Random(7)
    try:
        for _ in range(6):
            prompt = [source.randrange(1, 90) for _ in range(source.randint(1, 9))]
            tokens, parents = random_tree(source)
            steps.start(0, prompt)
            logits, slots = steps.score([(0, tokens, parents)])
            for node in range(len(tokens)):
                alone = steps.follow(1, prompt, [tokens[at] for at in path_to(parents, node)])
                assert torch.equal(logits[node], alone), f"node {node} of {parents}"
            path = path_to(parents, source.randrange(len(tokens)))
            steps.commit([0], slots, [path])
            steps.follow(1, prompt, [tokens[at] for at in path])
            assert equal(steps.states(0), steps.states(1))
            assert torch.equal(steps.feed(0, [3]), steps.feed(1, [3]))
    finally:
        target.close()


@pytest.mark.parametrize("name", MIXERS.values(), ids=MIXERS.keys())
def test_states_after_two_hundred_trees_are_those_of_single_tokens(name: str) -> None:
    """Four rows grow by a path of a tree in each step, and four twins by its tokens, one at a time."""
    target = HuggingFaceTarget(hybrid_models.model(name), max_rows=8)
    steps, source, lengths = Stepper(target), random.Random(11), [60] * 4
    try:
        for _ in range(50):
            for row in range(4):
                if lengths[row] > 50:
                    prompt = [source.randrange(1, 90) for _ in range(source.randint(1, 5))]
                    steps.start(row, prompt)
                    steps.start(row + 4, prompt)
                    lengths[row] = len(prompt)
            trees = [random_tree(source) for _ in range(4)]
            _, slots = steps.score([(row, *tree) for row, tree in enumerate(trees)])
            paths, first = [], 0
            for row, (tokens, parents) in enumerate(trees):
                path = path_to(parents, source.randrange(len(tokens)))
                paths.append([first + node for node in path])
                first += len(tokens)
                lengths[row] += len(path)
                for node in path:
                    steps.feed(row + 4, [tokens[node]])
            steps.commit(list(range(4)), slots, paths)
            for row in range(4):
                assert equal(steps.states(row), steps.states(row + 4)), trees[row]
    finally:
        target.close()


@pytest.mark.parametrize("name", MIXERS.values(), ids=MIXERS.keys())
def test_refused_tokens_leave_no_trace(name: str) -> None:
    """A chain of six draft tokens is refused at every position, beside a row that drafts nothing."""
    target = HuggingFaceTarget(hybrid_models.model(name), max_rows=4)
    steps, prompt, chain = Stepper(target), [9, 8, 7], [4, 5, 6, 7, 8, 9, 10]
    try:
        for kept in range(1, 8):
            steps.start(0, prompt)
            steps.start(1, prompt[::-1])
            _, slots = steps.score([(0, chain, list(range(-1, 6))), (1, [3], [-1])])
            steps.commit([0, 1], slots, [list(range(kept)), [7]])
            steps.follow(2, prompt, chain[:kept])
            steps.follow(3, prompt[::-1], [3])
            assert equal(steps.states(0), steps.states(2)), f"{kept - 1} accepted"
            assert equal(steps.states(1), steps.states(3))
    finally:
        target.close()


@pytest.mark.parametrize("name", MIXERS.values(), ids=MIXERS.keys())
def test_a_prompt_may_be_split_anywhere(name: str) -> None:
    target = HuggingFaceTarget(hybrid_models.model(name), max_rows=2)
    steps, prompt = Stepper(target), [9, 8, 7, 6, 5, 4, 3, 2]
    try:
        steps.start(0, prompt)
        for cut in range(1, len(prompt)):
            steps.start(1, prompt[:cut])
            steps.feed(1, prompt[cut:])
            assert equal(steps.states(0), steps.states(1)), f"cut at {cut}"
    finally:
        target.close()


@pytest.mark.parametrize("name", ["qwen3_next", "bamba", "mamba"])
def test_preempted_rows_are_computed_again(name: str) -> None:
    """Pages for one text at a time: the others wait or start again, and nothing changes."""
    expected = [hybrid_models.own_text(name, prompt, COUNT) for prompt in PROMPTS]
    texts = [[*prompt, *text] for prompt, text in zip(PROMPTS, expected)]
    target = HuggingFaceTarget(hybrid_models.model(name), max_rows=5, page_size=4, num_pages=16)
    params = SamplingParams(temperature=0, max_new_tokens=COUNT, ignore_eos=True)
    try:
        engine = Engine(target, drafter=NoisyTree(texts, 0.8, 96))
        found = engine.generate([list(each) for each in PROMPTS], params)
        assert [list(each.tokens) for each in found] == expected
    finally:
        target.close()


def test_closing_gives_the_functions_of_transformers_back() -> None:
    model = tiny_model("olmo_hybrid")  # no target of another test uses the functions of its module
    names = vars(sys.modules[type(model).__module__])
    before = {name: names[name] for name in MIXER_FUNCTIONS if name in names}
    hooks = [len(each._forward_pre_hooks) + len(each._forward_hooks) for each in model.modules()]
    first, second = HuggingFaceTarget(model), HuggingFaceTarget(model)
    assert all(names[name] is not own for name, own in before.items())
    first.lease.lend_attention()
    text = torch.tensor([[3, 4, 5]])
    assert model.generate(text, max_new_tokens=2).shape == (1, 5)  # outside of a pass they are transformers' own
    first.close()
    assert all(names[name] is not own for name, own in before.items())
    second.close()
    second.close()
    assert {name: names[name] for name in before} == before
    assert [len(each._forward_pre_hooks) + len(each._forward_hooks) for each in model.modules()] == hooks


def test_a_failed_load_gives_the_functions_back(monkeypatch: pytest.MonkeyPatch) -> None:
    from specdec_fast.targets import huggingface

    def fail(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    model = tiny_model("granite_hybrid")
    names = vars(sys.modules[type(model).__module__])
    before = {name: names[name] for name in MIXER_FUNCTIONS if name in names}
    monkeypatch.setattr(huggingface, "make_cache", fail)
    with pytest.raises(KeyboardInterrupt):
        HuggingFaceTarget(model)
    assert {name: names[name] for name in before} == before


def test_a_mixer_that_is_not_known_is_refused() -> None:
    class Unknown(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv1d = torch.nn.Conv1d(8, 8, 4, groups=8)

    model = tiny_model("llama")
    model.model.layers[1].mixer = Unknown()
    model._is_stateful = True
    with pytest.raises(UnsupportedModelError, match=r"LlamaForCausalLM: got Unknown at 'model.layers.1.mixer'.*one of"):
        HuggingFaceTarget(model)


def test_a_model_without_known_mixers_is_refused_with_the_name_of_its_blocks() -> None:
    from transformers import AutoModelForCausalLM, RwkvConfig

    config = RwkvConfig(vocab_size=64, hidden_size=32, attention_hidden_size=32, num_hidden_layers=2)
    with pytest.raises(UnsupportedModelError, match=r"recurrent state in RwkvBlock at 'rwkv.blocks.0', but no mixer"):
        HuggingFaceTarget(AutoModelForCausalLM.from_config(config), max_rows=1)


def test_opening_a_model_gives_no_advice_to_install_kernels(caplog: pytest.LogCaptureFixture) -> None:
    """transformers recommends packages for recurrences that a target does not use."""
    logger, model = transformers_logging.get_logger("transformers.integrations.hub_kernels"), tiny_model("qwen3_next")
    verbosity = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_warning()
    transformers_logging.enable_propagation()
    try:
        caplog.clear()
        transformers_logging.warning_once.cache_clear()
        HuggingFaceTarget(model, max_rows=1).close()
        logger.warning("`f` is falling back to its reference PyTorch implementation")
    finally:
        transformers_logging.disable_propagation()
        transformers_logging.set_verbosity(verbosity)
    found = {each.getMessage()[:3] for each in caplog.records if "falling back" in each.getMessage()}
    assert found == {"`f`"}, "others are seen, and this one is seen afterwards"


def test_experts_are_named_as_what_rounds() -> None:
    assert {*EXPERTS} < {*HYBRID_FAMILIES} and {*NAMES} <= {*HYBRID_FAMILIES}
