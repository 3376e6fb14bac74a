"""verify and verify_packed: exact distributions, replay of plain sampling, layouts, and bad input."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from oracles.markov_texts import DEPTH, ROOT, SETTINGS, VOCAB, logits_of, probs, sampled_chains, table, text_p_value

from specdec_fast import Draft, TokenDistributions, get_rule, verify, verify_packed, verify_trees
from specdec_fast.embedding import emitted_tokens, flat_from_chains
from specdec_kernels import draft_sample, use_backend

ROWS = 100_000


def keys(rows: int, shift: int = 0) -> dict[str, torch.Tensor]:
    return {"seeds": torch.arange(rows) + shift, "positions": torch.arange(rows) % 7 + 3}


def drafts(kind: str, rows: int = ROWS) -> tuple[torch.Tensor, torch.Tensor | None]:
    if kind == "sampled":
        return sampled_chains(probs(table(51), {"temperature": 0.8}), rows, 1)
    first = int(table(5)[ROOT].argmax())
    return torch.tensor([first, int(table(5)[first].argsort()[-2])]).expand(rows, DEPTH), None


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize(
    ("rule", "kind"),
    [("rejection", "sampled"), ("rejection", "deterministic"), ("block", "sampled"), ("replay", "deterministic")],
)
def test_the_joint_distribution_is_exact(rule: str, kind: str, settings: str) -> None:
    target = table(5)
    tokens, q = drafts(kind)
    out = verify(logits_of(target, tokens), tokens, q, rule=rule, **keys(ROWS), **SETTINGS[settings])  # type: ignore[arg-type]
    assert out.dtype == torch.int32 and out.shape == (ROWS, DEPTH + 1)
    assert text_p_value(out, probs(target, SETTINGS[settings])) > 1e-3
    assert 0 < int((out[:, 1] >= 0).sum()) < ROWS  # some drafts are accepted, some are not


def test_drafts_of_draft_sample_keep_the_distribution() -> None:
    """Drafts sampled under the keys that verify them: the noise of each purpose is its own."""
    target, q = table(5), TokenDistributions.of(table(51), temperature=0.8)
    every, tokens = keys(ROWS), torch.full((ROWS, DEPTH + 1), ROOT)
    positions = every["positions"].int()
    for at in range(DEPTH):
        dists = q.select(tokens[:, at])
        numbers = torch.full((ROWS,), at, dtype=torch.int32)
        tokens[:, at + 1] = draft_sample(dists.logits, *dists.stats, every["seeds"], positions, numbers)
    out = verify(logits_of(target, tokens[:, 1:]), tokens[:, 1:], q.probs()[tokens[:, :-1]], **every)
    assert text_p_value(out, probs(target, {})) > 1e-3


@pytest.mark.parametrize("mistake", ["softmax q of an arg-max draft", "other row's q", "shared draws", "cold target"])
def test_mistakes_of_a_caller_show_in_the_distribution(mistake: str) -> None:
    """The test of distributions has the power to see what an adapter gets wrong."""
    target = table(5)
    tokens, q = drafts("sampled")
    assert q is not None
    options: dict[str, Any] = keys(ROWS)
    if mistake == "softmax q of an arg-max draft":
        tokens = torch.stack([torch.full((ROWS,), int(q[0, 0].argmax())), tokens[:, 1]], 1)
    elif mistake == "other row's q":
        q = q.roll(1, 0)
    elif mistake == "shared draws":
        options["seeds"] = torch.arange(ROWS) % 50
    else:
        options["temperature"] = 0.9
    out = verify(logits_of(target, tokens), tokens, q, **options)
    assert text_p_value(out, probs(target, {})) < 1e-6


def test_replay_emits_what_plain_sampling_emits() -> None:
    """With any drafts the text is that of verify without drafts, token by token, under the same seeds."""
    target, rows = table(9), 3000
    settings = {"temperature": torch.rand(rows) + 0.5, "top_k": torch.arange(rows) % 4, "top_p": 0.9}
    plain = torch.full((rows, 1), ROOT)
    for at in range(DEPTH + 1):
        options: dict[str, Any] = settings | {"seeds": torch.arange(rows), "positions": torch.full((rows,), 20 + at)}
        drafted = torch.empty(rows, 0, dtype=torch.long)
        plain = torch.cat([plain, verify(target[plain[:, -1:]], drafted, rule="replay", **options)], 1)
    drafted = plain[:, 1 : DEPTH + 1].clone().long()
    wrong = torch.rand(rows, DEPTH) < 0.3
    drafted = torch.where(wrong, (drafted + 1) % VOCAB, drafted)
    options = settings | {"seeds": torch.arange(rows), "positions": torch.full((rows,), 20)}
    out = verify(logits_of(target, drafted), drafted, rule="replay", **options)
    accepted = (~wrong).cumprod(1).sum(1)
    places = torch.arange(DEPTH + 1)
    assert torch.equal(out.long(), torch.where(places <= accepted[:, None], plain[:, 1:], -1))
    # and at temperature 0 every rule is greedy
    cold = [verify(logits_of(target, drafted), drafted, rule="greedy")]
    cold += [
        verify(logits_of(target, drafted), drafted, rule=rule, temperature=0, **keys(rows))
        for rule in ("block", "replay")
    ]
    assert torch.equal(cold[0], cold[1]) and torch.equal(cold[0], cold[2])
    assert cold[0][:, 0].eq(int(target[ROOT].argmax())).all()


@pytest.mark.parametrize("rule", ["rejection", "block", "replay", "greedy"])
@pytest.mark.parametrize("with_q", [True, False])
def test_every_layout_has_the_same_answer(rule: str, with_q: bool) -> None:
    """Ragged rows, flat rows, one row at a time, and the rule on a Draft agree, whatever padding holds."""
    source = torch.Generator().manual_seed(3)
    rows, width, vocab = 40, 4, 6
    logits = torch.randn(rows, width + 1, vocab, generator=source) * 2
    every_q = torch.randn(rows, width, vocab, generator=source).softmax(-1)
    likely = logits[:, :width].argmax(-1)
    tokens = torch.where(
        torch.rand(rows, width, generator=source) < 0.8, likely, torch.randint(0, vocab, (rows, width))
    )
    lengths = torch.randint(0, width + 1, (rows,), generator=source)
    lengths[:3] = torch.tensor([0, width, 0])
    each: dict[str, torch.Tensor] = keys(rows, 7) | {
        "temperature": torch.zeros(rows) if rule == "greedy" else torch.rand(rows, generator=source) + 0.2,
        "top_p": torch.rand(rows, generator=source) * 0.5 + 0.5,
    }
    options: dict[str, Any] = {"rule": rule, "top_k": 4} | each
    kept = torch.arange(width + 1) <= lengths[:, None]
    unread = ~kept[:, 1:]
    padded = torch.where(unread, likely, tokens)
    padded[:, -1] = tokens[:, -1].masked_fill(unread[:, -1], -1)
    padded_q = every_q.masked_fill(unread[..., None], torch.nan)
    out = verify(logits, padded, padded_q if with_q else None, lengths, **options)
    assert torch.equal(out, verify(logits, padded, padded_q if with_q else None, lengths.tolist(), **options))
    assert bool(((out >= 0).sum(1) <= lengths + 1).all()) and bool((out[:, 0] >= 0).all())

    flat, ends = flat_from_chains(padded, lengths)
    flat_q = every_q[~unread] if with_q else None
    assert torch.equal(verify_packed(logits[kept], flat, ends, flat_q, **options), out)
    wider = verify_packed(logits[kept], flat, ends, flat_q, max_draft_tokens=width + 2, **options)
    assert torch.equal(wider[:, : width + 1], out) and wider[:, width + 1 :].eq(-1).all()

    for row, length in enumerate(lengths.tolist()):
        own = options | {name: value[row : row + 1] for name, value in each.items()}
        own_q = every_q[row : row + 1, :length] if with_q else None
        single = verify(logits[row : row + 1, : length + 1], tokens[row : row + 1, :length], own_q, **own)
        assert single[0].tolist() == out[row, : length + 1].tolist() and out[row, length + 1 :].eq(-1).all()

    chains = [[0, *tokens[row, :length].tolist()] for row, length in enumerate(lengths.tolist())]
    sources: dict[str, Any] = {}
    if with_q and get_rule(rule).uses_q:
        every = TokenDistributions.from_probs(every_q.flatten(0, 1))
        rows_of = [range(row * width, row * width + length) for row, length in enumerate(lengths.tolist())]
        sources = {"dists": every, "dist_rows": rows_of}
    draft = Draft.chains(range(rows), chains, **sources)
    assert torch.equal(emitted_tokens(draft, verify_trees(logits[kept], draft, **options)), out)


@pytest.mark.parametrize("rule", ["rejection", "block", "replay"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_dtypes_agree_with_the_reference(rule: str, dtype: torch.dtype) -> None:
    rows = 50
    logits = (torch.randn(rows, 4, 70, generator=torch.Generator().manual_seed(1)) * 2).to(dtype)
    tokens = logits[:, :3].topk(2, -1).indices[..., 1]
    found = [verify(logits, tokens, rule=rule, **keys(rows))]
    with use_backend("reference"):
        found.append(verify(logits, tokens, rule=rule, **keys(rows)))
    assert torch.equal(*found)


def test_nobody_at_all_and_nothing_drafted() -> None:
    assert verify(torch.empty(0, 3, 9), torch.empty(0, 2, dtype=torch.long), **keys(0)).shape == (0, 3)
    nothing = torch.empty(0, dtype=torch.long)
    assert verify_packed(torch.empty(0, 9), nothing, nothing, **keys(0)).shape == (0, 1)
    assert verify_packed(torch.randn(2, 9), nothing, torch.zeros(2, dtype=torch.int32), **keys(2)).shape == (2, 1)


def test_a_draft_vocabulary_may_be_a_prefix() -> None:
    logits = torch.randn(200, 3, 9)
    q = torch.rand(200, 2, 4).softmax(-1)
    tokens = torch.multinomial(q.flatten(0, 1), 1).view(200, 2)
    whole = torch.cat([q, torch.zeros(200, 2, 5)], -1)
    assert torch.equal(verify(logits, tokens, q, **keys(200)), verify(logits, tokens, whole, **keys(200)))


LOGITS, TOKENS = torch.zeros(2, 3, 9), torch.tensor([[1, 2], [3, 4]])
GOOD: dict[str, Any] = {"logits": LOGITS, "draft_tokens": TOKENS, "seeds": [1, 2], "positions": [4, 5]}
BAD = [
    ({"rule": "token"}, "is now called 'rejection'"),
    ({"rule": "typical"}, "expected one of rejection, block, replay, greedy"),
    ({"seeds": None}, "seeds: got None; expected 2 integers, one for each request, since rule rejection draws"),
    ({"seeds": [1, 2, 3]}, r"seeds: got \[3\] values; expected 2 integers from 0 to 9223372036854775807, one for each"),
    ({"seeds": 7}, "seeds: got 7 for all rows; expected 2 integers from 0 .*; pass a list"),
    ({"seeds": torch.tensor(7)}, r"seeds: got \[\] values"),
    ({"seeds": [1, -1]}, "seeds: got -1; expected 2 integers"),
    ({"seeds": [1.7, 2]}, "seeds: got 1.7; expected 2 integers"),
    ({"seeds": [True, 2]}, "seeds: got True; expected 2 integers"),
    ({"seeds": [1, 2**63]}, "seeds: got 9223372036854775808; expected 2 integers"),
    ({"seeds": torch.tensor([1.0, 2.0])}, "seeds: got a tensor of torch.float32; expected 2 .* with .long()"),
    ({"positions": [-3, 1]}, "positions: got -3; expected 2 integers from 0 to 2147483647"),
    ({"positions": torch.tensor([1, 2**31])}, "positions: got 2147483648; expected 2 integers"),
    ({"positions": None, "rule": "replay"}, "positions: got None"),
    ({"logits": LOGITS[0]}, "pass flat rows to verify_packed"),
    ({"logits": LOGITS[:, :2]}, r"expected \[B, K \+ 1, V\] and \[B, K\]"),
    ({"draft_tokens": torch.tensor([[1, -1], [3, 4]])}, r"got -1 at \[0, 1\].*pass lengths= for padded rows"),
    ({"draft_tokens": torch.tensor([[1, 9], [3, 4]])}, "expected ids from 0 to 8"),
    ({"draft_tokens": TOKENS.float()}, "expected integers"),
    ({"lengths": [1, 3]}, r"lengths: got \[1, 3\]; expected 2 numbers from 0 to 2"),
    ({"lengths": [1]}, "lengths: got"),
    ({"draft_probs": torch.zeros(2, 9)}, r"draft_probs: got \[2, 9\]; expected \[2, 2, V\] with V at most 9"),
    ({"draft_probs": torch.randn(2, 2, 9)}, "pass logits.softmax"),
    ({"temperature": -1.0}, "temperature: got -1.0; expected 0"),
    ({"temperature": float("nan")}, "temperature: got nan"),
    ({"top_p": 0.0}, "top_p: got 0.0; expected a number above 0"),
    ({"top_k": -2}, "top_k: got -2"),
    ({"min_p": torch.tensor([0.0, 2.0])}, "min_p: got 2.0"),
    ({"rule": "greedy", "temperature": 0.5}, "rule greedy: got temperature 0.5"),
    ({"rule": "traversal"}, "got rule 'traversal', which is none for chains; .*; call verify_trees"),
    ({"logits": LOGITS.index_fill(2, torch.tensor([4]), torch.nan)}, r"logits\[0, 0\]: got nan as the largest number"),
    ({"logits": torch.full_like(LOGITS, -torch.inf)}, r"logits\[0, 0\]: got -inf"),
    ({"logits": LOGITS.index_fill(2, torch.tensor([4]), torch.inf), "rule": "replay"}, r"logits\[0, 0\]: got inf"),
]


@pytest.mark.parametrize(
    ("change", "words"), BAD, ids=lambda value: None if isinstance(value, str) else str(list(value))
)
def test_bad_input_is_explained(change: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        verify(**GOOD | change)
    assert verify(**GOOD).shape == (2, 3)


def test_logits_of_padding_may_be_anything() -> None:
    logits = LOGITS.clone()
    logits[0, 2] = torch.nan
    found = verify(**GOOD | {"logits": logits, "lengths": [1, 2]})
    assert torch.equal(found, verify(**GOOD | {"lengths": [1, 2]}))


def test_other_objects_than_tensors_are_named() -> None:
    with pytest.raises(TypeError, match="verify: got draft_tokens of type list; expected a tensor"):
        verify(**GOOD | {"draft_tokens": TOKENS.tolist()})


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int32, torch.int64])
def test_integers_of_every_width_are_keys(dtype: torch.dtype) -> None:
    narrow = {name: torch.tensor(GOOD[name], dtype=dtype) for name in ("seeds", "positions")}
    assert torch.equal(verify(**GOOD | narrow), verify(**GOOD))


def test_bad_flat_input_is_explained() -> None:
    flat, ends = torch.tensor([1, 2, 3]), torch.tensor([2, 3])
    with pytest.raises(ValueError, match="a row of logits for every draft token and one for every request"):
        verify_packed(torch.zeros(4, 9), flat, ends, **keys(2))
    with pytest.raises(ValueError, match=r"cu_num_draft_tokens: got \[0, 2\] and 3 tokens"):
        verify_packed(torch.zeros(5, 9), flat, torch.tensor([0, 2]), **keys(2))
    with pytest.raises(ValueError, match="max_draft_tokens: got 1 and a chain of 2"):
        verify_packed(torch.zeros(5, 9), flat, ends, max_draft_tokens=1, **keys(2))


def test_parameters_of_rows_are_their_own() -> None:
    """A greedy row beside a hot one."""
    rows = 400
    logits = torch.randn(1, 2, 30, generator=torch.Generator().manual_seed(2)).expand(rows, 2, 30)
    tokens = logits[:, :1].argmax(-1)
    temperature = torch.tensor([0.0, 2.0]).repeat(rows // 2)
    out = verify(logits, tokens, temperature=temperature, **keys(rows)).numpy()
    assert (out[::2, 0] == tokens[0, 0].item()).all() and (out[::2, 1] == logits[0, 1].argmax().item()).all()
    assert len(np.unique(out[1::2, 0])) > 5
