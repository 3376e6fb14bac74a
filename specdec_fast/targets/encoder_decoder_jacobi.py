"""Jacobi decoding of encoder-decoder models, for which it was published (Santilli et al. 2023, section 3).

Translation models (Marian, MBart, T5 and others) do not use the packed engine. Every source has an encoder pass and a
decoder cache of its own, so nothing is padded and rows are independent. The model's generation settings (forced,
suppressed and bad tokens, minimum lengths, repeated n-grams) apply at every position, each for its own prefix.
Tests: tests/targets/test_encoder_decoder_jacobi.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from specdec_fast.sampling.params import SamplingParams
from specdec_fast.sampling.sampling_tensors import SamplingTable, SamplingTensors

# settings of `generate` that change logits and are not supported here
UNSUPPORTED_SETTINGS = (
    "begin_suppress_tokens",
    "encoder_no_repeat_ngram_size",
    "encoder_repetition_penalty",
    "exponential_decay_length_penalty",
    "guidance_scale",
    "sequence_bias",
)


@dataclass(frozen=True, slots=True)
class TranslationResult:
    """A translated text.

    Attributes:
        tokens: Token ids, with the end-of-sequence token and without the start token.
        passes: Decoder passes.
    """

    tokens: list[int]
    passes: int


class EncoderDecoder:
    """One source text of an encoder-decoder model: scores decoder tokens over a cache that can be truncated.

    Args:
        model: A transformers sequence-to-sequence model.
        source: Token ids.
        start: First decoder token. None: the model's.
        max_new_tokens: Length to which a forced end of text refers.

    Raises:
        ValueError: If the model is no encoder-decoder, or if a generation setting is not supported here.
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
        self._processors = _build_logits_processors(config, 1 + max_new_tokens, model.device)
        ids = torch.tensor([list(source)], device=model.device)
        self._mask = torch.ones_like(ids)
        with torch.inference_mode():
            self._encoded = model.get_encoder()(input_ids=ids, attention_mask=self._mask)
        self._cache: Any = None

    def score(self, text: Sequence[int], fed: Sequence[int]) -> Tensor:
        """Scores tokens that follow the stored text.

        Args:
            text: Stored tokens.
            fed: Tokens behind them.

        Returns:
            Logits [len(fed), V] after each fed token.
        """
        with torch.inference_mode():
            output = self.model(
                encoder_outputs=self._encoded,
                attention_mask=self._mask,
                decoder_input_ids=torch.tensor([list(fed)], device=self.model.device),
                past_key_values=self._cache,
                use_cache=True,
            )
            self._cache, logits = output.past_key_values, output.logits[0]
            if not self._processors:
                return logits
            whole = torch.tensor([[*text, *fed]], device=self.model.device)
            return torch.cat(
                [
                    self._processors(whole[:, : len(text) + at + 1], logits[at : at + 1].clone())
                    for at in range(len(fed))
                ]
            )

    def truncate(self, length: int) -> None:
        """Drops stored tokens beyond the first `length`."""
        for layer in self._cache.self_attention_cache.layers:
            layer.keys, layer.values = layer.keys[..., :length, :], layer.values[..., :length, :]


def jacobi_translate(
    model: Any,
    sources: Sequence[Sequence[int]],
    params: SamplingParams | None = None,
    *,
    block: int | None = None,
    horizon: int | None = None,
    fill: int | Callable[[Sequence[int], int], Sequence[int]] | None = None,
    start: int | None = None,
) -> list[TranslationResult]:
    """Translates token ids by Jacobi decoding. The text equals plain decoding's.

    A pass scores a guess of the rest of the block. The prefix that agrees with the model's choices is final, and the
    choices behind it are the next guess. Without `block` this is PJ, with it PGJ, with `horizon` too HGJ.

    Args:
        model: A transformers sequence-to-sequence model.
        sources: Token ids of each source.
        params: Sampling parameters. None: temperature 0, greedy as published. Above 0, a choice is the arg-max under
            the request's replay noise. `max_new_tokens` bounds every text.
        block: Tokens per block. None: no blocks.
        horizon: Tokens after which plain decoding takes over. None: never.
        fill: Initial content of a guess: a token id, or a function (text, number) -> tokens. None: the padding token.
        start: First decoder token. None: the model's.

    Returns:
        A result per source.

    Raises:
        ValueError: If a size is below 1, if the model or a setting is not supported, or if `params` has stop strings or
            logits processors (those of the model's generation config apply).

    Source:
        Santilli et al. 2023, section 3, algorithms 1 to 3.
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
) -> TranslationResult:
    """Decodes one text."""
    text, passes = [row.start], 0
    max_positions = getattr(row.model.config, "max_position_embeddings", None) or limit + 1
    guess: list[int] = []
    while len(text) - 1 < limit:
        done = len(text) - 1
        count = max(min(block - done % block - 1, horizon - done - 1, limit - done - 1, max_positions - len(text)), 0)
        drafted = guess[:count]
        if len(drafted) < count:
            missing = count - len(drafted)
            drafted += [fill] * missing if isinstance(fill, int) else list(fill([*text, *drafted], missing))[:missing]
        logits = row.score(text[:-1], [text[-1], *drafted])
        passes += 1
        nodes_fed = len(drafted) + 1
        positions = torch.arange(len(text), len(text) + nodes_fed, dtype=torch.int32, device=logits.device)
        nodes = sampling.expand_to_nodes((nodes_fed,), torch.zeros(nodes_fed, dtype=torch.int64, device=logits.device))
        choice = nodes.sample_replay(logits, positions).tolist()
        accepted = next((at for at, token in enumerate(drafted) if token != choice[at]), len(drafted))
        row.truncate(len(text) + accepted)
        for token in choice[: accepted + 1]:
            text.append(token)
            if token in stops:
                return TranslationResult(text[1:], passes)
        guess = choice[accepted + 1 :]
    return TranslationResult(text[1:], passes)


def _build_logits_processors(config: Any, max_length: int, device: Any) -> Any:
    """The model's generation settings as transformers applies them in greedy search. Raises ValueError."""
    from transformers import LogitsProcessorList
    from transformers.generation import logits_process as those

    for name in UNSUPPORTED_SETTINGS:
        if getattr(config, name, None) not in (None, 0, 1.0):
            raise ValueError(
                f"generation setting {name}: got {getattr(config, name)}; it is not supported here; unset it"
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
