"""The sampler of the V1 runner on fakes of vLLM's runner: layouts, seeds, processors, drafts of unknown origin."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from oracles.fake_vllm import Drafter, SamplerOutput, runner, sampling_metadata

from specdec_fast.integrations.vllm import draft_sampling
from specdec_fast.integrations.vllm.draft_sampling import DraftSampling, why_not_sampled
from specdec_fast.integrations.vllm.logits_processing import needs_processing, temper_logits
from specdec_fast.integrations.vllm.v1_sampler import V1Sampler
from specdec_kernels import distribution_stats, replay_sample

V = 40
SEEDS = [3, 4, 5]
LENGTHS = [7, 20, 11]
TEMPERATURES = [0.9, 0.0, 1.4]


def plain_choice(logits: torch.Tensor, row: int, depth: int) -> int:
    """The token that plain decoding takes at a node of a request."""
    one = torch.ones(1)
    parameters = (one * TEMPERATURES[row], one.int() * 0, one, one * 0)
    inv_t, _, cut, tie_id = distribution_stats(logits[None], *parameters)
    at = torch.tensor([LENGTHS[row] + depth], dtype=torch.int32)
    return int(replay_sample(logits[None], inv_t, cut, tie_id, torch.tensor([SEEDS[row]]), at))


def step(rule: str, drafts: Any, logits: torch.Tensor, **changes: Any) -> tuple[torch.Tensor, Any]:
    """What a step emits, and the runner."""
    made, described = runner(SEEDS, sampling_metadata(TEMPERATURES), LENGTHS, drafts, **changes)
    return V1Sampler(made, rule, SamplerOutput).sample(logits, described).sampled_token_ids, made


def right_drafts(logits: torch.Tensor, counts: list[int]) -> list[list[int]]:
    """Drafts that plain decoding would take."""
    drafts, start = [], 0
    for row, count in enumerate(counts):
        drafts.append([plain_choice(logits[start + depth], row, depth) for depth in range(count)])
        start += count + 1
    return drafts


def test_replay_takes_the_tokens_of_plain_decoding(generator: torch.Generator) -> None:
    counts = [3, 1, 0]
    logits = torch.randn(sum(counts) + 3, V, generator=generator) * 2
    drafts = right_drafts(logits, counts)
    emitted, made = step("replay", drafts, logits)
    starts = [0, 4, 6]
    expected = [
        [*drafts[row], plain_choice(logits[starts[row] + count], row, count), *[-1] * (3 - count)]
        for row, count in enumerate(counts)
    ]
    assert emitted.tolist() == expected and emitted.dtype == torch.int32
    assert made.input_batch.updates == 1
    drafts[0][1] = (drafts[0][1] + 1) % V
    broken = step("replay", drafts, logits)[0].tolist()
    assert broken[0] == [expected[0][0], expected[0][1], -1, -1] and broken[1:] == expected[1:]


def test_a_step_without_drafts_takes_the_same_tokens(generator: torch.Generator) -> None:
    logits = torch.randn(3, V, generator=generator) * 2
    emitted, _ = step("replay", None, logits)
    assert emitted.tolist() == [[plain_choice(logits[row], row, 0)] for row in range(3)]
    for rule in ("rejection", "block"):
        plain, _ = step(rule, None, logits)
        assert plain.tolist() == step(rule, [[], [], []], logits)[0].tolist() and plain.shape == (3, 1)
        assert plain[1, 0] == logits[1].argmax()


@pytest.mark.parametrize("rule", ["replay", "rejection", "block"])
def test_negative_ids_are_no_proposals(rule: str, generator: torch.Generator) -> None:
    logits = torch.randn(8, V, generator=generator) * 2
    emitted, _ = step(rule, [[-1, 5], [int(logits[3].argmax()), -1], [2]], logits)
    assert emitted[0, 1:].tolist() == [-1, -1], "the chain ends before it"
    assert emitted[1].tolist() == [int(logits[3].argmax()), int(logits[4].argmax()), -1]


def test_seeds_belong_to_requests_and_not_to_places(generator: torch.Generator) -> None:
    logits = torch.randn(3, V, generator=generator) * 2
    made, _ = runner(SEEDS, sampling_metadata(TEMPERATURES), LENGTHS)
    order = [2, 0, 1]
    moved, _ = runner([SEEDS[at] for at in order], sampling_metadata([TEMPERATURES[at] for at in order]), [
        LENGTHS[at] for at in order
    ])  # fmt: skip
    first = V1Sampler(made, "rejection", SamplerOutput).sample(logits, None).sampled_token_ids
    second = V1Sampler(moved, "rejection", SamplerOutput).sample(logits[order], None).sampled_token_ids
    assert first[order].tolist() == second.tolist()


@pytest.mark.parametrize(("rule", "method", "own"), [
    ("rejection", "suffix", False), ("block", "custom_class", False), ("replay", "suffix", True),
    ("rejection", "ngram", True),
])  # fmt: skip
def test_keys_name_the_request_if_drafts_come_from_others(rule: str, method: str, own: bool) -> None:
    speculation = SimpleNamespace(draft_sample_method="greedy", method=method)
    made, _ = runner([3, 3], sampling_metadata([1.0, 1.0]), [4, 4], speculative_config=speculation)
    first, second = V1Sampler(made, rule, SamplerOutput).batch_of(made.input_batch.sampling_metadata).host_seeds
    assert (first == second == 3) is own and (first != second) is not own


def test_batches_are_made_again_when_vllm_makes_another_metadata(generator: torch.Generator) -> None:
    logits = torch.randn(3, V, generator=generator)
    made, _ = runner(SEEDS, sampling_metadata(TEMPERATURES), LENGTHS)
    sampler = V1Sampler(made, "replay", SamplerOutput)
    sampler.sample(logits, None)
    batch = sampler._batch
    sampler.sample(logits, None)
    assert sampler._batch is batch
    made.input_batch.sampling_metadata = sampling_metadata(TEMPERATURES)
    sampler.sample(logits, None)
    assert sampler._batch is not batch


def test_generators_and_async_tokens_are_handled_as_vllm_does(generator: torch.Generator) -> None:
    logits = torch.randn(4, V, generator=generator)
    made, described = runner(
        SEEDS, sampling_metadata(TEMPERATURES), LENGTHS, [[1], [], []], use_async_scheduling=True,
        _draft_token_req_ids=["a"], _get_draft_token_ids_cpu=lambda: ([[1]], ["a"]),
    )  # fmt: skip
    made.input_batch.generators[0] = torch.Generator()
    V1Sampler(made, "replay", SamplerOutput).sample(logits, described)
    assert made.input_batch.spec_token_ids == [[1]] and made.input_batch.generators == {}


def test_processors_work_on_copies_and_logprobs_on_what_the_model_said(generator: torch.Generator) -> None:
    logits = torch.randn(8, V, generator=generator)
    kept = logits.clone()
    metadata = sampling_metadata(TEMPERATURES, no_penalties=False, max_num_logprobs=1)
    made, described = runner(SEEDS, metadata, LENGTHS, [[9, 9], [9, 9], [9]])
    made.sampler.bias = made.rejection_sampler.bias = torch.zeros(V).index_fill_(0, torch.tensor([9]), 100.0)
    output = V1Sampler(made, "replay", SamplerOutput).sample(logits, described)
    assert output.sampled_token_ids.tolist() == [[9, 9, 9], [9, 9, 9], [9, 9, -1]]
    assert torch.equal(logits, kept)
    expected = kept[[0, 1, 2, 3, 4, 5, 6, 7]].log_softmax(-1)[:, 9]
    assert torch.allclose(output.logprobs_tensors[:8, 0], expected)


def test_only_vllm_s_own_processors_may_count_as_inactive(generator: torch.Generator) -> None:
    class Own:
        """A processor of a user that happens to have an attribute of vLLM's."""

        biases: tuple[int, ...] = ()

        def apply(self, logits: torch.Tensor) -> torch.Tensor:
            return logits.index_fill(1, torch.tensor([9]), 100.0)

    made, _ = runner(SEEDS, sampling_metadata(TEMPERATURES), LENGTHS)
    processors = made.input_batch.sampling_metadata.logitsprocs
    processors.argmax_invariant = [Own()]
    emitted = V1Sampler(made, "replay", SamplerOutput).sample(torch.randn(3, V, generator=generator), None)
    assert emitted.sampled_token_ids.tolist() == [[9], [9], [9]]
    processors.non_argmax_invariant = [Own()]
    assert needs_processing(made.input_batch.sampling_metadata)
    built_in = type("LogitBias", (Own,), {"__module__": "vllm.v1.sample.logits_processor.builtin"})
    processors.non_argmax_invariant = [built_in()]
    assert not needs_processing(made.input_batch.sampling_metadata)


def test_a_request_does_not_notice_the_min_p_of_its_neighbour(generator: torch.Generator) -> None:
    """The kernel gets its own logits and temperature: divided logits would differ by rounding."""

    class MinP:
        """Masks the first request, as vLLM's own would."""

        def apply(self, logits: torch.Tensor) -> torch.Tensor:
            logits[0] = logits[0].masked_fill(logits[0] < logits[0].max() - 0.1, -torch.inf)
            return logits

    logits = torch.randn(3, V, generator=generator).bfloat16()
    metadata = sampling_metadata(TEMPERATURES)
    metadata.logitsprocs.argmax_invariant = [MinP()]
    processed, temperature = temper_logits(logits, metadata) or ()
    assert torch.equal(processed[1:], logits[1:].float()) and torch.isinf(processed[0]).any()
    assert temperature.tolist() == pytest.approx([1, 0, TEMPERATURES[2]])
    emitted = V1Sampler(runner(SEEDS, metadata, LENGTHS)[0], "replay", SamplerOutput).sample(logits, None)
    assert emitted.sampled_token_ids[1:, 0].tolist() == [plain_choice(logits[row].float(), row, 0) for row in (1, 2)]


@pytest.mark.parametrize("reads_states", [False, True])
def test_coupled_drafts_use_the_noise_of_their_positions(reads_states: bool, generator: torch.Generator) -> None:
    drafter = Drafter(reads_states)
    made, _ = runner(SEEDS, sampling_metadata(TEMPERATURES), LENGTHS, drafter=drafter)
    V1Sampler(made, "replay", SamplerOutput)
    fed = torch.tensor(LENGTHS, dtype=torch.int32) - (2 if reads_states else 1)
    drafter.set_inputs_first_pass(fed)
    for depth in range(2):
        logits = torch.randn(3, V, generator=generator)
        tokens, probs = drafter._sample_draft_tokens(logits, made.input_batch.sampling_metadata)
        assert tokens.tolist() == [plain_choice(logits[row], row, depth) for row in range(3)] and probs is None


def test_a_drafter_that_cannot_be_joined_stays_as_it_was() -> None:
    class Failing(Drafter):
        def join_runner(self, made: Any) -> None:
            raise RuntimeError("planted")

    class Closed(Drafter):
        def __setattr__(self, name: str, value: Any) -> None:
            if name == "_sample_draft_tokens":
                raise RuntimeError("planted")
            super().__setattr__(name, value)

    for drafter in (Failing(), Closed()):
        before = dict(vars(drafter))
        made, _ = runner(SEEDS, sampling_metadata(TEMPERATURES), LENGTHS, drafter=drafter)
        with pytest.raises(RuntimeError, match="planted"):
            V1Sampler(made, "replay", SamplerOutput)
        assert vars(drafter) == before


def sampled_step(generator: torch.Generator) -> tuple[Any, Any, V1Sampler, torch.Tensor]:
    """A runner whose draft model has sampled two tokens for each request, and the target's logits."""
    speculation = SimpleNamespace(draft_sample_method="probabilistic", method="draft_model")
    made, _ = runner(SEEDS, sampling_metadata(TEMPERATURES), LENGTHS, drafter=Drafter(), speculative_config=speculation)
    sampler = V1Sampler(made, "rejection", SamplerOutput)
    target = torch.randn(9, V, generator=generator) * 2
    made.drafter.set_inputs_first_pass(torch.tensor(LENGTHS) - 1)
    chains = [
        made.drafter._sample_draft_tokens(target[depth::3].clone(), made.input_batch.sampling_metadata)[0]
        for depth in range(2)
    ]
    drafts = torch.stack(chains, 1).tolist()
    after, described = runner(SEEDS, made.input_batch.sampling_metadata, LENGTHS, drafts)
    made.positions, made.input_ids = after.positions, after.input_ids
    return made, described, sampler, target


def test_drafts_from_the_target_s_own_distribution_are_all_accepted(generator: torch.Generator) -> None:
    """q = p, so only a wrong row of the draft distributions can reject anything."""
    _, described, sampler, target = sampled_step(generator)
    assert (sampler.sample(target, described).sampled_token_ids >= 0).all()


def test_drafts_of_another_step_are_no_proposals(generator: torch.Generator) -> None:
    made, described, sampler, target = sampled_step(generator)
    sampler.sample(target, described)
    again = sampler.sample(target, described).sampled_token_ids
    assert (again[:, 1:] == -1).all(), "their distributions are gone"
    made, described, sampler, target = sampled_step(generator)
    made.input_batch.req_ids = ["a", "z", "c"]
    made.requests["z"] = made.requests["b"]
    emitted = sampler.sample(target, described).sampled_token_ids
    assert (emitted[[0, 2]] >= 0).all()
    made, described, sampler, target = sampled_step(generator)
    made.input_ids.gpu[1] = (made.input_ids.gpu[1] + 1) % V
    emitted = sampler.sample(target, described).sampled_token_ids
    assert emitted[0, 1:].tolist() == [-1, -1] and (emitted[1:] >= 0).all(), "another token than was sampled"


def test_drafters_that_draft_in_another_way_are_left_alone() -> None:
    for name in ("parallel_drafting", "constant_draft_positions", "use_heterogeneous_vocab", "uses_mrope"):
        drafter = Drafter()
        setattr(drafter, name, True)
        assert why_not_sampled(drafter) == f"it has {name}"
    assert why_not_sampled(object()) == "it runs no draft model" and why_not_sampled(Drafter()) is None


def test_other_probabilities_of_vllm_are_used_or_nothing_is_proposed(generator: torch.Generator) -> None:
    drafter = Drafter()
    drafter.uses_mrope = True  # type: ignore[attr-defined]
    speculation = SimpleNamespace(draft_sample_method="probabilistic", method="draft_model")
    target = torch.randn(6, V, generator=generator) * 2
    drafts = [[1], [int(target[2].argmax())], [3]]
    for probs in (target[::2].div(torch.tensor([0.9, 1.0, 1.4])[:, None]).softmax(-1), None):
        made, described = runner(
            SEEDS, sampling_metadata(TEMPERATURES), LENGTHS, drafts, drafter=drafter, speculative_config=speculation,
            _get_spec_decode_draft_probs=lambda drafts, probs=probs: probs,
        )  # fmt: skip
        emitted = V1Sampler(made, "rejection", SamplerOutput).sample(target, described).sampled_token_ids
        assert (emitted[[0, 2], 1] >= 0).all() if probs is not None else (emitted[:, 1] == -1).all()


# -- mistakes, planted one at a time -----------------------------------------------------------------------------------


def distributions_of_other_rows(patch: pytest.MonkeyPatch) -> None:
    """Draft tokens are verified against the distributions of their neighbours."""
    find = draft_sampling._index
    patch.setattr(draft_sampling, "_index", lambda places, *rest: find((*places[1:], places[0]), *rest))


def bonus_at_the_next_position(patch: pytest.MonkeyPatch) -> None:
    """Roots are one position further."""
    sample = V1Sampler._verify
    patch.setattr(V1Sampler, "_verify", lambda self, *args: sample(self, *args[:-1], args[-1] + 1))


def seeds_of_places(patch: pytest.MonkeyPatch) -> None:
    """The seed of a request is its place in the batch."""
    patch.setattr(V1Sampler, "_seed_of", lambda self, name: self._runner.input_batch.req_ids.index(name))


def coupling_one_position_off(patch: pytest.MonkeyPatch) -> None:
    """A draft model couples with the noise of the root."""
    start = DraftSampling._start

    def broken(self: DraftSampling, *args: Any) -> Any:
        found = start(self, *args)
        self._roots = self._roots - 1  # type: ignore[operator]
        return found

    patch.setattr(DraftSampling, "_start", broken)


def stale_drafts_count(patch: pytest.MonkeyPatch) -> None:
    """Distributions are kept after the step that they belong to."""

    def broken(self: DraftSampling) -> Any:
        drafts = draft_sampling.SampledDrafts(self._ids, self._tokens, self._logits, self._stats)
        return drafts, frozenset()

    patch.setattr(DraftSampling, "take", broken)


MUTANTS = [
    (distributions_of_other_rows, test_drafts_from_the_target_s_own_distribution_are_all_accepted),
    (bonus_at_the_next_position, test_replay_takes_the_tokens_of_plain_decoding),
    (seeds_of_places, test_seeds_belong_to_requests_and_not_to_places),
    (
        coupling_one_position_off,
        lambda generator: test_coupled_drafts_use_the_noise_of_their_positions(False, generator),
    ),
    (stale_drafts_count, test_drafts_of_another_step_are_no_proposals),
]


@pytest.mark.parametrize(("plant", "check"), MUTANTS, ids=[plant.__name__ for plant, _ in MUTANTS])
def test_a_planted_mistake_is_noticed(
    plant: Any, check: Any, monkeypatch: pytest.MonkeyPatch, generator: torch.Generator
) -> None:
    plant(monkeypatch)
    with pytest.raises(AssertionError):
        check(generator)
