"""Samplers for the V2 runner on tensors such as it has, against the V1 layout on the same drafts."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from specdec_fast.core.request_seeds import request_seed
from specdec_fast.integrations.vllm import v2_sampler
from specdec_fast.integrations.vllm.chain_verification import Chains, step_layout, verify_chains, with_empty_row
from specdec_kernels import distribution_stats

V, K = 30, 3
COUNTS = (4, 1, 3)
STATES = [5, 0, 2]
"""Places of the requests in the persistent state of 6."""


def tensors(generator: torch.Generator) -> dict[str, Any]:
    """Arguments of vLLM's `rejection_sample`: chains of 3, 0 and 2 draft tokens."""
    states, counts = torch.tensor(STATES, dtype=torch.int32), torch.tensor(COUNTS)
    local = torch.cat([torch.arange(count) for count in COUNTS])
    return {
        "draft_logits": torch.randn(6, K, V, generator=generator),
        "draft_sampled": torch.randint(V, (8,), generator=generator, dtype=torch.int32),
        "cu_num_logits": torch.tensor([0, 4, 5, 8], dtype=torch.int32),
        "pos": local + torch.tensor([9, 20, 30]).repeat_interleave(counts),
        "idx_mapping": states, "expanded_idx_mapping": states.repeat_interleave(counts),
        "expanded_local_pos": local.to(torch.int32),
        "temperature": torch.tensor([0.0, 9.0, 1.3, 9.0, 9.0, 0.7]), "seeds": torch.tensor([50, 51, 52, 53, 54, 55]),
        "num_speculative_steps": K,
    }  # fmt: skip


@pytest.mark.parametrize("rule", ["replay", "rejection", "block"])
@pytest.mark.parametrize("drafts", ["sampled", "deterministic"])
def test_a_step_is_that_of_the_v1_layout(rule: str, drafts: str, generator: torch.Generator) -> None:
    given = tensors(generator)
    if drafts == "deterministic":
        given["draft_logits"] = None
    logits = torch.randn(8, V, generator=generator)
    emitted, count = v2_sampler.verify_step(rule, logits, **given)
    temperature = given["temperature"][given["expanded_idx_mapping"].long()]
    one = torch.ones(8)
    sampling = ((temperature > 0).float(), one.int() * 0, one, one * 0)
    chains = Chains(given["draft_sampled"].long(), step_layout(COUNTS, torch.device("cpu")))
    if drafts == "sampled" and rule != "replay":
        states = given["expanded_idx_mapping"].tolist()
        rows = torch.stack(
            [given["draft_logits"][state, max(at - 1, 0)] for state, at in zip(states, given["expanded_local_pos"])]
        )
        dists = (rows, *distribution_stats(rows, temperature, *sampling[1:]))
        chains.sampled, chains.dist_index = with_empty_row(dists), torch.arange(8, dtype=torch.int32)
    seeds, roots = torch.tensor([55, 50, 52]), torch.tensor([9, 20, 30], dtype=torch.int32)
    expected, accepted = verify_chains(rule, chains, logits, sampling, seeds, roots)
    assert torch.equal(emitted, expected) and torch.equal(count, accepted + 1)
    assert emitted[1, 0] == logits[4].argmax(), "temperature 0"


@pytest.mark.parametrize("rule", ["replay", "rejection", "block"])
def test_invalid_drafts_are_rejected(rule: str, generator: torch.Generator) -> None:
    given = tensors(generator)
    given["draft_sampled"][1] = -1
    emitted, count = v2_sampler.verify_step(rule, torch.randn(8, V, generator=generator), **given)
    assert count[0] == 1 and emitted[0, 1:].tolist() == [-1] * 3


class Sampler:
    """vLLM's sampler."""

    def __init__(self, states: Any) -> None:
        self.sampling_states = states

    def add_request(self, req_idx, sampling_params):
        self.sampling_states.seeds.np[req_idx] = sampling_params.seed

    def apply_sampling_params(
        self, logits, expanded_idx_mapping, idx_mapping, idx_mapping_np, pos, input_ids, expanded_local_pos=None,
        seq_lens_upper_bound_np=None, skip_top_k_top_p=False,
    ):  # fmt: skip
        return logits * 2

    def sample(
        self, logits, expanded_idx_mapping, idx_mapping, idx_mapping_np, pos, input_ids, expanded_local_pos,
        seq_lens_upper_bound_np, return_logprobs=False,
    ):  # fmt: skip
        raise AssertionError("the plugin samples")


class RejectionSampler:
    """vLLM's rejection sampler."""

    def __init__(self, sampler: Any, spec_config: Any, device: Any) -> None:
        self.sampler, self.num_speculative_steps = sampler, spec_config.num_speculative_tokens

    def _verify(
        self, logits, draft_logits, draft_sampled, pos, cu_num_logits, idx_mapping, idx_mapping_np,
        expanded_idx_mapping, expanded_local_pos, seq_lens_upper_bound_np, verify_draft_sampled,
    ):  # fmt: skip
        raise AssertionError("the plugin verifies")


STATE = SimpleNamespace(device="cpu")


def test_an_error_leaves_vllm_s_sampler_as_it_was() -> None:
    sampler = Sampler(None)
    before = dict(vars(sampler))
    with pytest.raises(AttributeError):
        v2_sampler.make_samplers(config(), sampler, RejectionSampler, "block", object())
    with pytest.raises(AttributeError):
        v2_sampler.make_samplers(config(method="suffix"), sampler, RejectionSampler, "block", STATE)
    assert vars(sampler) == before


def config(**speculation: Any) -> Any:
    found = {"num_speculative_tokens": K, "rejection_sample_method": "standard", **speculation}
    return SimpleNamespace(speculative_config=SimpleNamespace(**found), watermark_config=None)


def test_samplers_have_vllm_s_interfaces(generator: torch.Generator) -> None:
    given = tensors(generator)
    states = SimpleNamespace(**{name: SimpleNamespace(gpu=given[name]) for name in ("temperature", "seeds")})
    sampler, rejection = v2_sampler.make_samplers(config(), Sampler(states), RejectionSampler, "replay", STATE)
    assert isinstance(rejection, RejectionSampler)
    logits = torch.randn(8, V, generator=generator)
    rows, roots = given["idx_mapping"], torch.tensor([9, 20, 30])
    tokens, processed = sampler.sample(
        logits[[0, 4, 5]], rows, rows, rows.numpy(), roots, None, None, None, return_logprobs=True
    )
    assert torch.equal(processed, logits[[0, 4, 5]] * 2)
    named = {name: given[name] for name in ("draft_logits", "draft_sampled", "pos", "cu_num_logits", "idx_mapping")}
    processed, sampled, count = rejection._verify(
        logits, **named, idx_mapping_np=None, expanded_idx_mapping=given["expanded_idx_mapping"],
        expanded_local_pos=given["expanded_local_pos"], seq_lens_upper_bound_np=None,
        verify_draft_sampled=torch.full_like(given["draft_sampled"], -1),
    )  # fmt: skip
    assert torch.equal(processed, logits * 2) and count.tolist() == [1, 1, 1]
    assert sampled[:, 0].tolist() == tokens.tolist(), "a rejected draft gives the token of a step without drafts"
    assert v2_sampler.make_samplers(
        SimpleNamespace(speculative_config=None), Sampler(states), RejectionSampler, "block", STATE
    )[1] is None  # fmt: skip


@pytest.mark.parametrize(("rule", "method", "own"), [
    ("rejection", "suffix", False), ("block", "custom_class", False), ("replay", "suffix", True),
    ("rejection", "eagle3", True),
])  # fmt: skip
def test_keys_name_the_request_if_drafts_come_from_others(
    rule: str, method: str, own: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = SimpleNamespace(RejectionSampler=RejectionSampler)
    monkeypatch.setitem(sys.modules, "vllm.v1.worker.gpu.spec_decode.rejection_sampler", module)  # type: ignore[misc]
    for parent in ("vllm", "vllm.v1", "vllm.v1.worker", "vllm.v1.worker.gpu", "vllm.v1.worker.gpu.spec_decode"):
        monkeypatch.setitem(sys.modules, parent, ModuleType(parent))
    seeds, added = np.zeros(6, dtype=np.int64), []
    state = SimpleNamespace(
        device="cpu", vllm_config=config(method=method), add_request=lambda *args: added.append(args)
    )
    state.vllm_config.additional_config = {"specdec": {"rule": rule}}
    sampler, _ = v2_sampler.samplers_for(state, Sampler(SimpleNamespace(seeds=SimpleNamespace(np=seeds))))  # type: ignore[misc]
    for place, name in ((4, "a"), (1, "b"), (4, "c")):
        state.add_request(place, SimpleNamespace(req_id=name))
        sampler.add_request(place, SimpleNamespace(seed=3))
        known = request_seed(3, 0, name, with_id=not own)
        assert seeds[place] == known
    assert [place for place, _ in added] == [4, 1, 4]


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"num_speculative_tokens": 129}, "got 129; expected at most 128"),
        ({"rejection_sample_method": "synthetic"}, "got rejection_sample_method 'synthetic'"),
        ({"enable_adaptive_verification": True}, "got enable_adaptive_verification"),
    ],
)
def test_what_cannot_be_served_is_refused(asked: dict[str, Any], words: str) -> None:
    assert words in str(v2_sampler.why_not(config(**asked), Sampler(None), RejectionSampler))
    assert v2_sampler.why_not(config(), Sampler(None), RejectionSampler) is None
    assert "Sampler.sample is missing" in str(v2_sampler.why_not(config(), object(), RejectionSampler))


def test_the_hook_is_inert_unless_asked(caplog: pytest.LogCaptureFixture) -> None:
    class ModelState:
        def __init__(self, asked: Any) -> None:
            self.vllm_config = SimpleNamespace(additional_config=asked)

        def custom_sampler(self, sampler: Any) -> Any:
            return None

    module = SimpleNamespace(ModelState=ModelState)
    v2_sampler.prepare(module)
    wrapped = ModelState.custom_sampler
    v2_sampler.prepare(module)
    assert ModelState.custom_sampler is wrapped
    assert ModelState({}).custom_sampler("stock") is None and caplog.text == ""
    assert ModelState({"specdec": {"rule": "fast"}}).custom_sampler("stock") is None
    assert "got 'fast'" in caplog.text and "specdec is off, and vLLM's own sampler runs" in caplog.text
