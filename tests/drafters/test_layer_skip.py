"""Self-speculation: what a draft step computes, that committed data is unchanged, when a draft ends."""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest
import torch
from oracles import models
from oracles.automaton import AutomatonTarget, random_logits
from oracles.kv_recompute import holds

from specdec_fast import Engine, HuggingFaceTarget, SamplingParams, get_drafter, load
from specdec_fast.drafters import make_drafter
from specdec_fast.engine.state import DecodeState
from specdec_fast.interfaces import Budget
from specdec_fast.targets.skipped_layers import SkippedLayers, write_layers
from specdec_fast.targets.tiny_models import tiny_model

LAYERS = 4


@functools.cache
def deep() -> Any:
    """A tiny model of four layers with transformers' own attention."""
    model = tiny_model("llama", num_hidden_layers=LAYERS)
    model.set_attn_implementation("sdpa")
    return model


def own() -> HuggingFaceTarget:
    return HuggingFaceTarget(copy.deepcopy(deep()), max_length=160, max_rows=4)


def drafter(target: Any = None, **options: Any) -> Any:
    return get_drafter("layer_skip")(own() if target is None else target, **options)


def automaton(**shape: Any) -> AutomatonTarget:
    return AutomatonTarget(random_logits(23, 8, seed=2), **shape)


def joined(made: Any, texts: list[list[int]], **changes: Any) -> tuple[DecodeState, list[int]]:
    state = DecodeState(4, 160)
    params = [SamplingParams(seed=at, **{"temperature": 0, **changes}) for at in range(len(texts))]
    rows = [state.join(text, each, len(text), ()) for text, each in zip(texts, params, strict=True)]
    made.begin(state, rows, None)
    return state, rows


@torch.inference_mode()
def proposed(made: Any, state: DecodeState, rows: list[int], limits: list[int]) -> list[list[int]]:
    draft = made.propose(state, rows, Budget(limits), state.rng(rows))
    draft.check()
    bounds = draft.offsets.tolist()
    return [draft.tokens.tolist()[start + 1 : stop] for start, stop in zip(bounds, bounds[1:])]


@torch.inference_mode()
def written_out(skip: SkippedLayers, text: list[int], count: int) -> list[int]:
    """Drafts differently: the whole model stores the prefix, and a copy without the sub-blocks' outputs continues."""
    from transformers import DynamicCache

    reduced = copy.deepcopy(deep())
    for index, layer in enumerate(reduced.model.layers):
        if index in skip.attention:
            layer.self_attn.o_proj.weight.zero_()
        if index in skip.mlp:
            layer.mlp.down_proj.weight.zero_()
    cache: Any = DynamicCache(config=reduced.config)
    if len(text) > 1:
        deep()(torch.tensor([text[:-1]]), past_key_values=cache, use_cache=True)
    found, token = [], text[-1]
    for _ in range(count):
        logits = reduced(torch.tensor([[token]]), past_key_values=cache, use_cache=True).logits
        token = int(logits[0, -1].argmax())
        found.append(token)
    return found


@pytest.mark.parametrize(
    ("attention", "mlp"), [((), ()), ((1,), ()), ((), (0, 3)), ((0, 2), (1,)), ((1, 2), (1, 2)), ((0, 1, 2, 3),) * 2]
)
def test_a_draft_is_that_of_the_reduced_model_over_the_exact_prefix(attention: Any, mlp: Any) -> None:
    skip = SkippedLayers.of(attention, mlp)
    made = drafter(skip_attention=attention, skip_mlp=mlp, stop="fixed")
    texts = [models.prompt(length) for length in (9, 1, 30)]
    state, rows = joined(made, texts)
    got = proposed(made, state, rows, [4, 3, 5])
    assert got == [written_out(skip, text, count) for text, count in zip(texts, (4, 3, 5), strict=True)]


def test_with_all_layers_skipped_the_draft_is_the_head_over_the_embedding() -> None:
    made = drafter(exit_after=0, stop="fixed")
    state, rows = joined(made, [models.prompt(5)])
    token, want = models.prompt(5)[-1], []
    for _ in range(3):
        hidden = deep().model.norm(deep().model.embed_tokens(torch.tensor([[token]])))
        token = int(deep().lm_head(hidden)[0, 0].argmax())
        want.append(token)
    assert proposed(made, state, rows, [3]) == [want]


@pytest.mark.parametrize("pick", ["coupled", "sampled", "greedy"])
def test_with_no_layer_skipped_every_token_is_accepted(pick: str) -> None:
    rule = {"coupled": "replay", "sampled": "rejection", "greedy": "greedy"}[pick]
    target = own()
    made = drafter(target, skip_attention=[], pick=pick, stop="fixed", num_draft_tokens=5)
    params = SamplingParams(temperature=0 if pick == "greedy" else 1.0, seed=3, max_new_tokens=24, ignore_eos=True)
    handles = Engine(target, made, rule=rule).generate([models.prompt(9), models.prompt(2)], params)
    assert [handle.stats.steps for handle in handles] == [4, 4] and handles[0].stats.tau == 6


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("options", [{"exit_after": 1}, {"skip_attention": [0, 2], "skip_mlp": [1]}, {"exit_after": 0}])
def test_text_and_committed_keys_are_those_of_plain_decoding(options: dict[str, Any], temperature: float) -> None:
    target = own()
    engine = Engine(target, drafter(target, **options, threshold=0.2))
    texts = [models.prompt(length) for length in (17, 1, 40)]
    params = [
        SamplingParams(temperature=temperature, seed=at, max_new_tokens=14 + at, ignore_eos=True) for at in range(3)
    ]
    handles = [engine.submit(text, each) for text, each in zip(texts, params, strict=True)]
    while not engine.idle:
        engine.step()
        for handle in handles:
            if handle.row is not None:
                holds(target, handle.row, [*handle.prompt, *handle.tokens][:-1], deep())
    plain = Engine(own()).generate(texts, params)
    assert [handle.tokens for handle in handles] == [handle.tokens for handle in plain]
    assert target.cache.pages.num_used == 0 and engine.stats.num_draft_tokens > 20


def test_an_interrupted_draft_leaves_the_cache_unchanged() -> None:
    target = own()
    made = drafter(target, exit_after=2, stop="fixed")
    state, rows = joined(made, [models.prompt(9), models.prompt(4)])
    proposed(made, state, rows, [2, 2])
    extend, calls = target.extend, 0

    def failing(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise RuntimeError("out of memory")
        return extend(*args, **kwargs)

    target.extend = failing  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="out of memory"):
        proposed(made, state, rows, [4, 4])
    target.extend = extend  # type: ignore[method-assign]
    for row in rows:
        holds(target, row, list(state.tokens(row))[:-1], deep())
    whole = own()
    token = torch.tensor([5])
    for each in (target, whole):  # the model is whole again
        each.cache.release([3])
        each.cache.reserve(3, 4)
    start, stop = torch.tensor([3], dtype=torch.int32), torch.tensor([0, 1], dtype=torch.int32)
    with torch.inference_mode():
        got, want = (each.extend(start, token, stop, logits=True).logits for each in (target, whole))
    assert torch.equal(got, want)


def test_each_request_s_threshold_follows_its_own_acceptance() -> None:
    """Thresholds equal a simple computation from the requests' reported steps."""
    target = automaton(max_rows=3)
    made = drafter(target, exit_after=2, threshold=0.3, goal=0.7, num_draft_tokens=4)
    engine, moves = Engine(target, made), set()
    handles = [
        engine.submit([at, 2], SamplingParams(temperature=0.8, seed=at, max_new_tokens=25 + 9 * at)) for at in range(3)
    ]
    rates, thresholds = [0.0] * 3, [0.3] * 3
    while not engine.idle:
        before = [(own.stats.num_draft_tokens, sum(own.stats.accepted_per_position), own.remaining) for own in handles]
        engine.step()
        for at, (own, (drafted, accepted, remaining)) in enumerate(zip(handles, before, strict=True)):
            if own.row is None:
                continue
            drafted, accepted = own.stats.num_draft_tokens - drafted, sum(own.stats.accepted_per_position) - accepted
            if drafted:
                rates[at] = rates[at] / 2 + accepted / drafted / 2
                longest = drafted == min(4, remaining - 1)
                move = 0.01 if rates[at] < 0.7 else 0.0 if longest else -0.01
                thresholds[at] = 0.9 * thresholds[at] + 0.1 * (thresholds[at] + move)
                moves.add(move)
            found = made._thresholds[own.row]
            assert (found.rate, found.threshold) == (pytest.approx(rates[at]), pytest.approx(thresholds[at]))
    assert moves == {0.01, 0.0, -0.01} and len(set(thresholds)) == 3


def sure(target: AutomatonTarget, made: Any, text: list[int]) -> float:
    """The largest probability of the draft's distribution at temperature 1."""
    with target.skip_layers(made.skip):
        return float(torch.softmax(torch.tensor(target.logits_after(text)), 0).max())


@pytest.mark.parametrize("stop", ["adaptive", "fixed", "threshold"])
def test_a_draft_ends_after_the_first_uncertain_token(stop: str) -> None:
    target = automaton()
    made = get_drafter("layer_skip")(target, exit_after=2, stop=stop, threshold=0.45, num_draft_tokens=9)
    texts = [[1, 2], [4], [7, 7, 3], [5, 1]]
    state, rows = joined(made, texts, temperature=0.9)
    lengths = set()
    for _ in range(6):
        for row, tokens in zip(rows, proposed(made, state, rows, [9] * 4), strict=True):
            text = list(state.tokens(row))
            unsure = [sure(target, made, [*text, *tokens[:at]]) < 0.45 for at in range(len(tokens))]
            if stop == "fixed":
                assert len(tokens) == 9
            else:
                assert not any(unsure[:-1]) and (unsure[-1] or len(tokens) == 9)
            lengths.add(len(tokens))
            state.append([row], [[text[0], text[-1]]])
    assert stop == "fixed" or len(lengths) > 2


def test_the_threshold_belongs_to_its_request() -> None:
    """The same drafts and number of passes alone, in a batch, early or late."""
    params = [SamplingParams(temperature=0.8, seed=at, max_new_tokens=30) for at in range(6)]
    texts = [[at % 8, 3, (2 * at) % 8] for at in range(6)]

    def steps(max_rows: int) -> list[tuple[int, int]]:
        target = automaton(max_rows=max_rows)
        made = get_drafter("layer_skip")(target, exit_after=2, threshold=0.4)
        handles = Engine(target, made).generate(texts, params)
        assert not made._thresholds
        return [(handle.stats.steps, handle.stats.num_draft_tokens) for handle in handles]

    assert steps(6) == steps(1) == steps(2)


def test_default_skipped_layers(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPECDEC_DATA", str(tmp_path))
    target = own()
    assert drafter(target).skip == SkippedLayers((1, 2), (1, 2))
    target.model_id = "someone/model"
    place = tmp_path / "layers" / "someone--model.json"
    write_layers(place, SkippedLayers((3,), (0, 1)), LAYERS, {})
    assert drafter(target).skip == SkippedLayers((3,), (0, 1))
    assert drafter(target, layers=str(place)).skip == SkippedLayers((3,), (0, 1))
    assert drafter(target, exit_after=3).skip == SkippedLayers((3,), (3,))
    assert drafter(target, skip_attention=[2, 0]).skip == SkippedLayers((0, 2), ())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"skip_attention": [4]}, r"got attention of layer 4; expected 0\.\.3: the model has 4 layers"),
        ({"skip_mlp": [0, -1]}, "layers to skip, mlp: got -1; expected layer numbers"),
        ({"exit_after": 4}, r"exit_after: got 4; expected 0\.\.3"),
        ({"exit_after": 1, "skip_mlp": [1]}, "got skip_attention/skip_mlp and exit_after; expected one of them"),
        ({"layers": "nowhere.json"}, "layers: got 'nowhere.json', which is no file; make one with `specdec tune"),
        ({"stop": "never"}, "stop: got 'never'; expected one of adaptive, fixed, threshold"),
        ({"pick": "best"}, "pick: got 'best'"),
        ({"threshold": 1.5}, "threshold: got 1.5; expected a number from 0 to 1"),
        ({"goal": "high"}, "goal: got 'high'"),
        ({"num_draft_tokens": 0}, "num_draft_tokens: got 0; expected at least 1"),
    ],
)
def test_bad_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^drafter layer_skip: {message}"):
        make_drafter("layer_skip", options, target=automaton())


def test_a_target_without_parts_is_refused() -> None:
    with pytest.raises(ValueError, match=r"layer_skip: got a target \(object\) that cannot skip layers"):
        get_drafter("layer_skip")(object())


def test_by_name() -> None:
    for rule, pick in (("replay", "coupled"), ("rejection", "sampled"), ("greedy", "greedy")):
        engine = load(copy.deepcopy(deep()), drafter="layer_skip", rule=rule, max_length=64)
        made: Any = engine.drafter
        assert made.pick == pick and made.target is engine.target
