"""Overlays, applied on load: exact cells, and operators with an overlay equal references on processed logits."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles.interpreter import guarded, guarded_case, watched, wrapping
from oracles.launch_cases import SIZES, drafted
from oracles.logits_processor_cases import Request, arguments, batches, int32, words_of
from torch import Tensor

import specdec_fast.sampling.target_distributions as target_distributions_module
from specdec_fast import Draft, Rng, SamplingParams, get_rule
from specdec_fast.sampling.sampling_tensors import SamplingTable
from specdec_fast.sampling.target_distributions import target_distributions
from specdec_kernels import OPS, Overlay, TokenMasks, process_logits, process_logits_overlay, tree_plan, use_backend
from specdec_kernels.dispatch import argument_checks
from specdec_kernels.ops.process_logits_overlay import launch
from specdec_kernels.overlay import PLANES, num_words
from specdec_kernels.testing.agreement import difference, make_sample, map_tensors, tensors_in
from specdec_kernels.testing.samples_attention import Call

HALF_AND_SINGLE = [torch.float32, torch.bfloat16, torch.float16]
FOLDING = {name: op._overlaid for name, op in OPS.items() if op._overlaid is not None}


def processors_of(batch: Any) -> tuple[dict[str, Any], int, int]:
    """Returns the operator's arguments, the rows of logits and the vocabulary of a batch."""
    vocab, many, tail, masks, nodes = batch
    rows = sum(len(request.tokens) for request in many) + tail if nodes is None else len(nodes)
    given_masks = None
    if masks is not None:
        index = [at % (len(masks) + 1) - 1 for at in range(rows)]
        given_masks = TokenMasks(words_of(masks), int32(index))
    return {"masks": given_masks, **arguments(many, tail, nodes)}, rows, vocab


@pytest.mark.parametrize("dtype", HALF_AND_SINGLE, ids=str)
@settings(max_examples=25, deadline=None, derandomize=True)
@given(batch=batches(), seed=st.integers(0, 1000), steps=st.sampled_from([(4, 1), (256, 1024)]))
def test_cells_equal_the_reference_and_give_the_processed_logits(
    dtype: torch.dtype, batch: Any, seed: int, steps: Any
) -> None:
    processors, rows, vocab = processors_of(batch)
    logits = (torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * 3).to(dtype)
    if rows and vocab > 2:
        logits[0, :2] = torch.tensor([torch.nan, -torch.inf])
    before = logits.clone()
    with use_backend("reference"):
        want = process_logits_overlay(logits, **processors)
        dense = process_logits(logits.to(torch.float32, copy=True), **processors)
    copy = guarded(logits, row_stride=vocab + 3)
    with use_backend("triton"), pytest.MonkeyPatch.context() as patched:
        patched.setattr(launch, "ENTRIES", steps[0])
        patched.setattr(launch, "WORDS", steps[1])
        got = process_logits_overlay(copy, **guarded_case(processors))
    planes = PLANES * num_words(vocab)
    assert torch.equal(got.words[:, :planes], want.words[:, :planes])
    values = [cells[:, planes:].contiguous().view(torch.float32) for cells in (got.words, want.words)]
    torch.testing.assert_close(*values, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(copy.nan_to_num(nan=9.0), before.nan_to_num(nan=9.0)), "logits were written"
    torch.testing.assert_close(got.apply(logits), dense, rtol=0, atol=0, equal_nan=True)


def test_a_large_vocabulary_and_a_path_of_64() -> None:
    """More words than one step writes, and distant committed tokens, some of them on the path again."""
    vocab, depth = 200_003, 64
    committed = [3, 9, *range(31, 199_000, 1777), 200_002]
    path = [0, *(1 + step % 40 for step in range(depth))]
    request = Request([3], [9], path, [-1, *range(depth)], (1.2, 0.5, 0.25), {7: 1.5, 31: -2.0}, {9: 400}, {})
    processors = arguments([request], 0, [40, depth])
    ids = torch.zeros(2, 1024, dtype=torch.int32)
    ids[1, : len(committed)] = torch.tensor(committed)
    sizes = torch.tensor([0, len(committed)], dtype=torch.int32)
    processors["penalties"] = replace(processors["penalties"], ids=ids, counts=(ids % 5 == 0).int() * 2, sizes=sizes)
    processors["masks"] = TokenMasks(words_of([(torch.rand(vocab) < 0.5).tolist()]), int32([0, -1]))
    logits = torch.randn(2, vocab).bfloat16()
    with use_backend("reference"):
        dense = process_logits(logits.float(), **processors)
    with use_backend("triton"):
        got = process_logits_overlay(logits, **processors)
    assert torch.equal(got.apply(logits), dense)


def call_of(name: str, dtype: torch.dtype) -> Call:
    """Returns a call of an operator that takes overlays. Draft tokens are sampled if the operator takes draft
    distributions, so that residuals are read.
    """
    sizes = replace(SIZES, dtype=dtype)
    if FOLDING[name] == "target" and name != "typical_verify":
        call = drafted(name)
        place = next(at for at, each in enumerate(call.arguments) if isinstance(each, tuple))
        target = (call.arguments[place][0].to(dtype), *call.arguments[place][1:])
        return replace(call, arguments=(*call.arguments[:place], target, *call.arguments[place + 1 :]))
    return make_sample(name, sizes)


def logits_of(call: Call) -> tuple[int, Tensor]:
    """Returns the place of the processed argument and its logits: the widest float matrix or first distribution."""
    for at, each in enumerate(call.arguments):
        if isinstance(each, tuple) and isinstance(each[0], Tensor) and each[0].ndim == 2:
            return at, each[0]
        if isinstance(each, Tensor) and each.ndim == 2 and each.is_floating_point():
            return at, each
    raise AssertionError("no logits")


def overlay_over(logits: Tensor) -> Overlay:
    """Returns an overlay with all kinds of processors on every row, so that likely tokens change."""
    rows, vocab = logits.shape
    best = logits.float().topk(3, 1).indices
    request = Request([5], best[:, 0].tolist(), [0] * rows, [-1] + [0] * (rows - 1), (1.5, 0.7, 0.3), {}, {}, {})
    request.bias = {int(token): 1.25 for token in best[:, 1].unique()}
    request.banned = {int(token): 10**6 for token in best[::2, 2].unique()}
    processors = arguments([replace(request, generated=request.generated[:14])], 0, list(range(rows)))
    masks = TokenMasks(words_of([[token % 7 != 3 for token in range(vocab)]]), int32([0, -1] * rows)[:rows])
    with use_backend("reference"):
        return process_logits_overlay(logits, **processors, masks=masks)


def with_dists(name: str, call: Call, at: int, logits: Tensor) -> Call:
    """Returns the call with statistics of the processed logits, if it takes any."""
    known, one = call.arguments[at], torch.ones(len(logits))
    with use_backend("reference"):
        inv_t, lse, cut, tie = OPS["distribution_stats"](logits, one, int32([20] * len(logits)), one, one * 0)
    taken = {"replay_sample": (inv_t, cut, tie), "draft_sample": (inv_t, lse, cut, tie)}.get(name, ())
    value = (known[0], inv_t, lse, cut, tie) if isinstance(known, tuple) else known
    arguments = (*call.arguments[:at], value, *taken, *call.arguments[at + 1 + len(taken) :])
    return replace(call, arguments=arguments)


@pytest.mark.parametrize("dtype", HALF_AND_SINGLE, ids=str)
@pytest.mark.parametrize("name", FOLDING)
def test_operators_read_through_an_overlay(name: str, dtype: torch.dtype) -> None:
    call = call_of(name, dtype)
    at, logits = logits_of(call)
    overlay = overlay_over(logits)
    processed = overlay.apply(logits)
    assert not torch.equal(processed, logits.float())
    call = with_dists(name, call, at, processed)
    known = call.arguments[at]
    dense = [
        *call.arguments[:at],
        (processed, *known[1:]) if isinstance(known, tuple) else processed,
        *call.arguments[at + 1 :],
    ]
    with use_backend("reference"):
        want = list(tensors_in(OPS[name](*dense, **call.options)))
        plain = list(tensors_in(OPS[name](*call.arguments, **call.options)))
    for backend in ("reference", "cpu", "triton"):
        with use_backend(backend), watched(*tensors_in(call.arguments), overlay.words):
            got = list(tensors_in(OPS[name](*call.arguments, **call.options, overlay=overlay)))
            assert OPS[name].last_backend == backend
        assert [difference(a, b, 2e-5)[1] for a, b in zip(got, want, strict=True)] == [None] * len(want), backend
    assert any(difference(a, b, 1e-3)[1] for a, b in zip(plain, want, strict=True)), (
        "the processors change nothing here"
    )


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", [*FOLDING, "process_logits_overlay"])
def test_invalid_cells_and_processors_stay_within_the_tensors(
    name: str, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bits, counts and tables that the host does not check lead to no address outside the launch's tensors."""
    monkeypatch.setattr(argument_checks, "can_read_values", lambda value: False)
    source = torch.Generator().manual_seed(seed)

    def wild(tensor: Tensor) -> Tensor:
        numbers = torch.tensor([-1000, -1, 13, 1000, 7])[torch.randint(5, tensor.shape, generator=source)]
        return torch.where(torch.rand(tensor.shape, generator=source) < 0.5, numbers.to(tensor.dtype), tensor)

    if name == "process_logits_overlay":
        call = map_tensors(make_sample(name, SIZES), lambda each: each if each.is_floating_point() else wild(each))
        with use_backend("triton"), watched(*tensors_in(call.arguments)):
            process_logits_overlay(*call.arguments)
        return
    call = call_of(name, torch.bfloat16)
    _, logits = logits_of(call)
    overlay = replace(overlay_over(logits), words=wild(overlay_over(logits).words))
    with use_backend("triton"), watched(*tensors_in(call.arguments), overlay.words):
        OPS[name](*call.arguments, **call.options, overlay=overlay)


def test_an_overlay_that_does_not_fit_is_refused() -> None:
    call = make_sample("distribution_stats", SIZES)
    logits = call.arguments[0]
    cells = overlay_over(logits).words
    bad = {
        r"overlay is Tensor; expected an Overlay": cells,
        r"overlay is torch.int64 \[12, \d+\]; expected an Overlay": Overlay(cells.long(), 130),
        r"overlay is \[11, \d+\] for 130 .*; expected \[12, 15 or more\]": Overlay(cells[1:].contiguous(), 130),
        r"overlay is \[12, 9\] for 130 .*; expected \[12, 15 or more\]": Overlay(cells[:, :9].contiguous(), 130),
        r"overlay is \[12, \d+\] for 129 .* or more\] for 130 on cpu": Overlay(cells, 129),
    }
    for backend in ("triton", "reference"):
        for message, overlay in bad.items():
            with use_backend(backend), pytest.raises(ValueError, match=f"distribution_stats: {message}"):
                OPS["distribution_stats"](*call.arguments, overlay=overlay)


@pytest.mark.parametrize("number", [2**31 - 1, 2**31 - 500, -(2**31)])
def test_numbers_at_the_ends_of_32_bits_stay_within_the_tensors(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(argument_checks, "can_read_values", lambda value: False)
    call = call_of("distribution_stats", torch.bfloat16)
    overlay = overlay_over(call.arguments[0])
    for first in range(4):
        cells = overlay.words.clone()
        cells[:, 0] = -1
        cells[:, first::3] = number
        with use_backend("triton"), wrapping(), watched(*tensors_in(call.arguments), cells):
            OPS["distribution_stats"](*call.arguments, overlay=replace(overlay, words=cells))


def test_other_operators_take_no_overlay() -> None:
    call, overlay = make_sample("exact_match_verify", SIZES), overlay_over(torch.randn(12, 130))
    for each in (overlay, None):
        with pytest.raises(TypeError, match=r"exact_match_verify\(\) takes no argument 'overlay'"):
            OPS["exact_match_verify"](*call.arguments, **call.options, overlay=each)


def test_float64_logits_have_no_overlay() -> None:
    call = make_sample("process_logits_overlay", replace(SIZES, dtype=torch.float64))
    with (
        use_backend("reference"),
        pytest.raises(ValueError, match=r"process_logits_overlay: logits has dtype torch\.float64"),
    ):
        process_logits_overlay(*call.arguments)


class _Chain:
    """The parts of a batch that `process` and rules need: two requests with all kinds of processors, a tree and a
    chain.
    """

    def __init__(self) -> None:
        table = SamplingTable(torch.device("cpu"))
        first = {"repetition_penalty": 1.5, "frequency_penalty": 0.4, "logit_bias": {3: 1.5}, "banned_token_ids": (4,)}
        second = {"presence_penalty": 0.7, "allowed_token_ids": tuple(range(0, 40, 2)), "top_k": 6}
        table.set(0, SamplingParams(seed=5, **first), 2, (), [3, 7, 9])
        table.set(1, SamplingParams(seed=6, **second), 1, (), [2, 8])
        self.sampling, self.roots = table.pack([0, 1]), int32([2, 1])
        self.seeds = torch.tensor([5, 6])

    def verified(self, rule: str, chain: bool, logits: Tensor) -> Any:
        trees = [([9, 3, 5, 7, 3], [-1, 0, 0, 1, 1]), ([8, 2, 6], [-1, 0, 1])]
        draft = Draft.chains([0, 1], [tokens for tokens, _ in trees]) if chain else Draft.trees([0, 1], trees)
        plan = tree_plan(draft.parents, draft.offsets)
        dists = target_distributions(draft, plan, logits, self.sampling, self.roots, whole=True)
        acceptance = get_rule(rule)(draft, plan, dists, Rng(self.seeds, self.roots))
        return acceptance.path, acceptance.num_accepted, acceptance.next_token


@pytest.mark.parametrize(
    "rule", ["replay", "rejection", "block", "recursive_rejection", "traversal", "lossy", "lossy:among=2"]
)
def test_rules_on_kernels_with_overlays_equal_references_on_processed_logits(
    rule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch, chain = _Chain(), rule in ("rejection", "block")
    for seed in range(6):
        logits = 2 * torch.randn(8, 40, generator=torch.Generator().manual_seed(seed)).bfloat16()
        monkeypatch.setattr(target_distributions_module, "uses_overlay", lambda logits: False)
        with use_backend("reference"):
            want = batch.verified(rule, chain, logits.clone())
        monkeypatch.setattr(target_distributions_module, "uses_overlay", lambda logits: True)
        with use_backend("triton", tree_plan="cpu"):
            got = batch.verified(rule, chain, logits)
        for one, other in zip(got, want, strict=True):
            assert torch.equal(one, other), seed
