"""Jacobi decoding of encoder-decoder models, for which it was published (Santilli et al. 2023, section 3).

Translation models (Marian, MBart, T5 and the like) do not go through the packed engine: here every source has an
encoder pass and a decoder cache of its own, so nothing is padded and a row does not know of the others. The model's
generation settings (forced, suppressed and bad tokens, least lengths, repeated n-grams) hold at every position, each
for its own prefix. Tests: tests/targets/test_encoder_decoder.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from specdec_fast.sampling.params import SamplingParams
from specdec_fast.sampling.sampling_tensors import SamplingTable, SamplingTensors

# settings of `generate` that change logits in ways that are not followed here
NOT_FOLLOWED = (
    "begin_suppress_tokens",
    "encoder_no_repeat_ngram_size",
    "encoder_repetition_penalty",
    "exponential_decay_length_penalty",
    "guidance_scale",
    "sequence_bias",
)


@dataclass(frozen=True, slots=True)
class CrossVocab:
    """tokens: with the end-of-sequence token, without the start; passes: of the decoder."""

    tokens: list[int]
    passes: int


class EncoderDecoder:
    """One source of an encoder-decoder model: scores decoder tokens over a cache that can be cut.

    model: a transformers sequence-to-sequence model; source: token ids; start: the decoder's first token (default: the
    model's); max_new_tokens: what a forced end of text refers to.

    Raises ValueError for other models, and for generation settings that are not followed here.
    """

    def __init__(
        self, model: Any, source: Sequence[int], *, start: int | None = None, max_new_tokens: int = 128
    ) -> None:
        if not getattr(model.config, "is_encoder_decoder", False):
            raise ValueError(
                f"{type(model).__name__}: got a model without an encoder; expected an encoder-decoder; decoder-only "
                "models have the drafter jacobi in the engine"
            )
        vocab = int(model.get_input_embeddings().weight.shape[0])
        if not source or any(not 0 <= token < vocab for token in source):
            raise ValueError(f"source: got {list(source)!r:.60}; expected token ids 0..{vocab - 1}, at least one")
        config = model.generation_config
        found = config.decoder_start_token_id if start is None else start
        found = config.bos_token_id if found is None else found
        if found is None:
            raise ValueError("start: got none and the model names none; pass the decoder's first token")
        self.model, self.start = model, int(found)
        self._edits = _settings(config, 1 + max_new_tokens, model.device)
        ids = torch.tensor([list(source)], device=model.device)
        self._seen = torch.ones_like(ids)
        with torch.inference_mode():
            self._encoded = model.get_encoder()(input_ids=ids, attention_mask=self._seen)
        self._cache: Any = None

    def score(self, text: Sequence[int], fed: Sequence[int]) -> Tensor:
        """Logits [len(fed), V] after each token of `fed`, which follow `text`, the tokens that are stored."""
        with torch.inference_mode():
            output = self.model(
                encoder_outputs=self._encoded,
                attention_mask=self._seen,
                decoder_input_ids=torch.tensor([list(fed)], device=self.model.device),
                past_key_values=self._cache,
                use_cache=True,
            )
            self._cache, logits = output.past_key_values, output.logits[0]
            if not self._edits:
                return logits
            whole = torch.tensor([[*text, *fed]], device=self.model.device)
            return torch.cat(
                [self._edits(whole[:, : len(text) + at + 1], logits[at : at + 1].clone()) for at in range(len(fed))]
            )

    def keep(self, length: int) -> None:
        """Forget what is stored behind the first `length` tokens."""
        for layer in self._cache.self_attention_cache.layers:
            layer.keys, layer.values = layer.keys[..., :length, :], layer.values[..., :length, :]

    def stored(self) -> list[tuple[Tensor, Tensor]]:
        """Keys and values of the decoder's own layers, [1, heads, length, dim]."""
        return [(layer.keys, layer.values) for layer in self._cache.self_attention_cache.layers]


def jacobi_translate(
    model: Any,
    sources: Sequence[Sequence[int]],
    params: SamplingParams | None = None,
    *,
    block: int | None = None,
    horizon: int | None = None,
    fill: int | Callable[[Sequence[int], int], Sequence[int]] | None = None,
    start: int | None = None,
) -> list[CrossVocab]:
    """Translate token ids with PJ (no block), PGJ(block) or HGJ(block, horizon); the text is that of plain decoding.

    A pass puts a guess of the rest of the block through the decoder, as far as its positions go; the prefix
    that agrees with the model's choices is final, and the choices behind it are the next guess. params: temperature 0
    (default) is greedy as published, above it the choice is the arg-max with the request's replay noise, and
    max_new_tokens bounds every text; fill: what a guess holds at first, a token id or a function (text, number) ->
    tokens (default: the padding token).

    Raises ValueError for sizes below 1, for a model or settings that do not fit, for a fill beyond the vocabulary, for
    stop strings (here are token ids alone), and for edits of logits in `params` (those of the model's generation config
    are followed).
    """
    for what, size in (("block", block), ("horizon", horizon)):
        if size is not None and (not isinstance(size, int) or size < 1):
            raise ValueError(f"jacobi_translate {what}: got {size!r}; expected a whole number of at least 1, or none")
    params = (params or SamplingParams(temperature=0)).with_seed()
    if params.stop:
        raise ValueError(f"jacobi_translate stop: got {params.stop!r}; expected none; stop_token_ids end texts here")
    config = model.generation_config
    ends = config.eos_token_id
    stops = set(params.stop_token_ids)
    if ends is not None and not params.ignore_eos:
        stops |= set(ends) if isinstance(ends, (list, tuple)) else {int(ends)}
    table = SamplingTable(model.device)
    table.set(0, params, 0, tuple(stops))
    sampling = table.pack([0])
    if sampling.logits_processors is not None:
        raise ValueError(
            "jacobi_translate: got penalties, bias, bans or minimum lengths in params; expected them in "
            "model.generation_config, where generate has them too"
        )
    if fill is None:
        fill = int(config.pad_token_id or 0)
    vocab = int(model.get_input_embeddings().weight.shape[0])
    if not callable(fill) and not 0 <= fill < vocab:
        raise ValueError(f"jacobi_translate fill: got token id {fill}; expected 0..{vocab - 1}")
    limit = params.max_new_tokens
    found = []
    for source in sources:
        row = EncoderDecoder(model, source, start=start, max_new_tokens=limit)
        found.append(_translate(row, sampling, stops, limit, block or limit, min(horizon or limit, limit), fill))
    return found


def _translate(
    row: EncoderDecoder,
    sampling: SamplingTensors,
    stops: set[int],
    limit: int,
    block: int,
    horizon: int,
    fill: int | Callable[[Sequence[int], int], Sequence[int]],
) -> CrossVocab:
    text, passes = [row.start], 0
    places = getattr(row.model.config, "max_position_embeddings", None) or limit + 1
    guess: list[int] = []
    while len(text) - 1 < limit:
        done = len(text) - 1
        room = max(min(block - done % block - 1, horizon - done - 1, limit - done - 1, places - len(text)), 0)
        drafted = guess[:room]
        if len(drafted) < room:
            missing = room - len(drafted)
            drafted += [fill] * missing if isinstance(fill, int) else list(fill([*text, *drafted], missing))[:missing]
        logits = row.score(text[:-1], [text[-1], *drafted])
        passes += 1
        count = len(drafted) + 1
        positions = torch.arange(len(text), len(text) + count, dtype=torch.int32, device=logits.device)
        nodes = sampling.expand_to_nodes((count,), torch.zeros(count, dtype=torch.int64, device=logits.device))
        choice = nodes.sample_replay(logits, positions).tolist()
        accepted = next((at for at, token in enumerate(drafted) if token != choice[at]), len(drafted))
        row.keep(len(text) + accepted)
        for token in choice[: accepted + 1]:
            text.append(token)
            if token in stops:
                return CrossVocab(text[1:], passes)
        guess = choice[accepted + 1 :]
    return CrossVocab(text[1:], passes)


def _settings(config: Any, max_length: int, device: Any) -> Any:
    """The model's generation settings as transformers applies them in greedy search. Raises ValueError."""
    from transformers import LogitsProcessorList
    from transformers.generation import logits_process as those

    for name in NOT_FOLLOWED:
        if getattr(config, name, None) not in (None, 0, 1.0):
            raise ValueError(
                f"generation setting {name}: got {getattr(config, name)}; it is not followed here; unset it"
            )
    eos = config.eos_token_id
    ends = [] if eos is None else [eos] if isinstance(eos, int) else list(eos)
    found: list[Any] = []
    if (config.repetition_penalty or 1.0) != 1.0:
        found.append(those.RepetitionPenaltyLogitsProcessor(config.repetition_penalty))
    if config.no_repeat_ngram_size:
        found.append(those.NoRepeatNGramLogitsProcessor(config.no_repeat_ngram_size))
    if config.bad_words_ids is not None:
        found.append(those.NoBadWordsLogitsProcessor(config.bad_words_ids, torch.tensor(ends) if ends else None))
    if config.min_length and ends:
        found.append(those.MinLengthLogitsProcessor(config.min_length, ends, device=device))
    if config.min_new_tokens and ends:
        found.append(those.MinNewTokensLengthLogitsProcessor(1, config.min_new_tokens, ends, device=device))
    if config.forced_bos_token_id is not None:
        found.append(those.ForcedBOSTokenLogitsProcessor(config.forced_bos_token_id))
    if config.forced_eos_token_id is not None:
        found.append(those.ForcedEOSTokenLogitsProcessor(max_length, config.forced_eos_token_id, device=device))
    if config.suppress_tokens is not None:
        found.append(those.SuppressTokensLogitsProcessor(config.suppress_tokens, device=device))
    return LogitsProcessorList(found)
