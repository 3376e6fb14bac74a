"""Multi-token prediction with chains and trees: lengths, distributions and texts."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from oracles import heads, models
from oracles.automaton import AutomatonTarget, random_logits
from oracles.automaton_head import AutomatonHead
from oracles.chi_square import p_value
from oracles.distributions import dist, joint
from oracles.head_drafts import automaton

from specdec_fast import Engine, SamplingParams, get_drafter, load
from specdec_fast.rules import get_rule


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("options", [{}, {"num_draft_tokens": 3}, {"depth": 3, "width": 4}])
def test_a_head_that_is_the_target_gives_four_tokens_per_step(temperature: float, options: dict[str, Any]) -> None:
    """This holds only with true features, tokens one place ahead of them, and the head's own output after the newest
    token.
    """
    target = automaton()
    made = get_drafter("mtp")(target, AutomatonHead(automaton()), **options)
    params = SamplingParams(temperature=temperature, seed=3, max_new_tokens=21)
    for handle in Engine(target, made).generate([[1, 2], [3, 3, 0, 7, 1], [5] * 9], params):
        assert handle.stats.steps == -(-21 // 4) and handle.stats.faults == 0


def test_rules_for_chains_get_chains() -> None:
    def made(**options: Any) -> Any:
        return get_drafter("mtp")(automaton(), AutomatonHead(automaton()), **options)

    for options in ({}, {"how": "sampled"}, {"num_draft_tokens": 7}, {"shape": (-1, 0, 1)}):
        assert get_rule("block").why_not(made(**options).needs) is None, options
    for options in ({"depth": 2}, {"shape": (-1, 0, 0)}, {"how": "hybrid", "shape": (-1, 0, 0)}):
        assert get_rule("block").why_not(made(**options).needs) is not None, options
    assert made(how="sampled").needs.dists and not made().needs.dists
    assert made(how="hybrid", shape=(-1, 0, 0)).needs.excludes_siblings


@pytest.mark.parametrize("rule", ["rejection", "block", "recursive_rejection", "traversal"])
def test_the_distribution_of_three_tokens_is_the_target_s(rule: str) -> None:
    """Sampled chains, from a head whose distribution mixes the target with another table."""
    table = random_logits(7, 4, seed=4)
    believed = AutomatonTarget(0.5 * table + 0.5 * random_logits(7, 4, seed=77), max_rows=500, max_length=16)
    target = AutomatonTarget(table, max_rows=500, max_length=16, page_size=4)
    made = get_drafter("mtp")(target, AutomatonHead(believed), how="sampled")
    engine = Engine(target, made, rule=rule)
    handles = [engine.submit([1, 2], SamplingParams(seed=at, max_new_tokens=5)) for at in range(2000)]
    while not engine.idle:
        engine.step()
    exact = joint(lambda text: dist(target.logits_after([1, 2, *text]), temperature=1.0), 3, 4)
    assert p_value(Counter(tuple(handle.tokens[:3]) for handle in handles), exact) > 1e-3
    assert 0.2 < engine.stats.tau - 1 < 2.5 and engine.stats.faults == 0


def test_the_module_is_found_in_the_target_s_own_checkpoint(tmp_path: Path) -> None:
    """No option names it. transformers ignores keys that are not the target's."""
    model = models.own("llama")
    model.save_pretrained(tmp_path / "own")
    tensors = {key: value.clone() for key, value in model.state_dict().items()} | heads.mtp_tensors("qwen")
    (tmp_path / "own" / "model.safetensors").unlink()
    config = {**model.config.to_dict(), "architectures": ["LlamaForCausalLM"], "mtp_num_hidden_layers": 1}
    heads.write(tmp_path / "own", config, tensors)
    params = SamplingParams(temperature=0.8, seed=2, max_new_tokens=24)
    texts = [models.prompt(17), models.prompt(5)]
    engine = load(tmp_path / "own", drafter="mtp", max_rows=2, max_length=128)
    handles = engine.generate(texts, params)
    plain = load(tmp_path / "own", drafter="none", max_rows=2, max_length=128).generate(texts, params)
    assert [handle.tokens for handle in handles] == [handle.tokens for handle in plain]
    assert engine.stats.num_draft_tokens > 0 and engine.stats.faults == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"head": "/no/such/folder"}, "expected a folder with config.json"),
        ({"how": "best"}, "how: got 'best'"),
        ({"depth": 2, "shape": (-1, 0)}, "depth: got 2 with a shape"),
        ({"num_draft_tokens": 0}, "num_draft_tokens: got 0"),
    ],
)
def test_errors_of_bad_options(options: dict[str, Any], message: str) -> None:
    target: Any = models.target("llama", max_rows=2) if "head" in options else automaton()
    given = options if "head" in options else {"head": AutomatonHead(automaton()), **options}
    with pytest.raises(ValueError, match=message):
        get_drafter("mtp")(target, **given)


def test_a_target_without_a_checkpoint_needs_an_option() -> None:
    with pytest.raises(ValueError, match="mtp head: got none; expected -o head=FOLDER"):
        get_drafter("mtp")(models.target("llama", max_rows=2))
