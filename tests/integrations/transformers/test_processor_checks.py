"""Which logits processors of users are no functions of one text, and what remains of them when they are refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from specdec_fast.integrations.transformers import RefusedCallError, attach
from specdec_fast.integrations.transformers.processor_checks import why_no_function_of_text
from specdec_fast.targets.tiny_models import tiny_model

IDS = torch.tensor([[0, 0, 5, 6], [3, 4, 5, 7]])


class Pure:
    """Works on each row, remembers what it computed once, and changes its scores in place."""

    def __init__(self) -> None:
        self.table: torch.Tensor | None = None
        self.prepared = False
        self.name = "pure"

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if not self.prepared:
            self.table, self.prepared = torch.arange(scores.shape[-1]) % 3, True
        assert self.table is not None
        scores += torch.where(self.table == input_ids[:, -1:] % 3, -2.0, 0.0)
        return scores


class Counts(Pure):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return scores


class Remembers(Pure):
    def __init__(self) -> None:
        super().__init__()
        self.history: list[Any] = ["before"]

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.history.append(scores)
        return scores


class KnowsRows(Pure):
    """Has another ban for each row of the batch, by its place."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        for row in range(len(input_ids)):
            scores[row, row] = -torch.inf
        return scores


class Mixes(Pure):
    """Looks at the other rows."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores - scores.mean(0, keepdim=True)


class Draws(Pure):
    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores + torch.randn_like(scores)


class FollowsOneText(Pure):
    """Expects that every call brings the next token, as matchers of grammars do."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[int] = []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if self.seen and self.seen[-1] != input_ids.shape[1] - 1:
            raise AssertionError
        self.seen.append(input_ids.shape[1])
        return scores


REFUSED = {
    FollowsOneText: "FollowsOneText, which raises AssertionError if it is called again, on row 0 alone",
    Counts: "Counts, whose attribute 'calls' changes when it is called",
    Remembers: "Remembers, whose attribute 'history' changes when it is called",
    KnowsRows: "KnowsRows, whose scores of row 1 differ if it is called on that row alone",
    Mixes: "Mixes, whose scores of row 0 differ",
    Draws: "Draws, whose scores of row 0 differ",
}


def plain_state(processor: Any) -> dict[str, Any]:
    return {name: value for name, value in vars(processor).items() if not isinstance(value, torch.Tensor)}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_is_no_function_of_a_text_is_named(kind: type) -> None:
    processor = kind()
    before = repr(plain_state(processor))
    found = why_no_function_of_text(processor, IDS, 12)
    assert found is not None and REFUSED[kind] in found
    assert repr(plain_state(processor)) == before, "transformers would go on with the state of the trial"


def test_functions_of_a_text_pass() -> None:
    for rows in (1, 2):
        assert why_no_function_of_text(Pure(), IDS[:rows], 12) is None
        assert why_no_function_of_text(lambda input_ids, scores: scores, IDS[:rows], 12) is None


def test_a_processor_that_raises_in_the_trial_is_refused_or_handed_on() -> None:
    greedy = {"max_new_tokens": 4, "do_sample": False}
    expected = tiny_model("llama").generate(IDS, **greedy)
    with pytest.raises(RefusedCallError, match="which raises AssertionError if it is called again"):
        attach(tiny_model("llama")).generate(IDS, **greedy, logits_processor=[FollowsOneText()])
    model, processor = attach(tiny_model("llama"), fallback="transformers"), FollowsOneText()
    assert torch.equal(model.generate(IDS, **greedy, logits_processor=[processor]), expected)
    assert processor.seen == [4, 5, 6, 7], "as without an engine"


def test_the_processor_of_xgrammar_is_handed_on() -> None:
    xgrammar = pytest.importorskip("xgrammar")
    from xgrammar.contrib.hf import LogitsProcessor

    words = ["</s>", *(chr(33 + at) for at in range(95))]
    info = xgrammar.TokenizerInfo(words, vocab_size=96, stop_token_ids=[0])
    grammar = xgrammar.GrammarCompiler(info).compile_grammar("root ::= [a-f]+")
    given = {"max_new_tokens": 4, "do_sample": False}
    expected = tiny_model("llama").generate(IDS, **given, logits_processor=[LogitsProcessor(grammar)])
    model = attach(tiny_model("llama"), fallback="transformers")
    assert torch.equal(model.generate(IDS, **given, logits_processor=[LogitsProcessor(grammar)]), expected)


def test_generate_refuses_or_hands_on() -> None:
    expected = tiny_model("llama").generate(IDS, max_new_tokens=4, do_sample=False, logits_processor=[Counts()])
    for fallback in (None, "transformers"):
        model, processor = attach(tiny_model("llama"), fallback=fallback), Counts()
        given = {"max_new_tokens": 4, "do_sample": False, "logits_processor": [processor]}
        if fallback is None:
            with pytest.raises(RefusedCallError, match=r"changes when it is called; .*check_processors=False"):
                model.generate(IDS, **given)
        else:
            assert torch.equal(model.generate(IDS, **given), expected)
            assert processor.calls == 4, "as without an engine"


def test_the_check_can_be_left_out() -> None:
    model = attach(tiny_model("llama"), check_processors=False)
    assert model.generate(IDS, max_new_tokens=4, do_sample=False, logits_processor=[Counts()]).shape == (2, 8)


def test_a_processor_that_wants_more_arguments_is_refused_as_in_transformers() -> None:
    class WantsMore:
        def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, text: str) -> torch.Tensor:
            return scores

    for model in (tiny_model("llama"), attach(tiny_model("llama"))):
        with pytest.raises(ValueError, match="Make sure that all the required parameters"):
            model.generate(IDS, max_new_tokens=4, do_sample=False, logits_processor=[WantsMore()])


def forgets_to_return(input_ids: torch.Tensor, scores: torch.Tensor) -> None: ...


class CutsAtNight(Pure):
    """Works on prompts, and returns too few scores later."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores if input_ids.shape[1] <= IDS.shape[1] + 1 else scores[:, 1:]


def test_what_is_no_tensor_of_scores_is_named() -> None:
    model = attach(tiny_model("llama"))
    for check in (True, False):
        attach_again = attach(tiny_model("llama"), check_processors=check)
        with pytest.raises(Exception, match=r"forgets_to_return.* returned NoneType; expected scores \[[12], 96\]"):
            attach_again.generate(IDS, max_new_tokens=3, logits_processor=[forgets_to_return])
    with pytest.raises(ValueError, match=r"CutsAtNight returned \[1, 95\]; expected scores \[1, 96\]"):
        model.generate(IDS, max_new_tokens=9, logits_processor=[CutsAtNight()])
