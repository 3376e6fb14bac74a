"""One call of `generate`: what transformers prepared becomes requests of an engine, and their texts become its result.

Tests: tests/integrations/transformers/test_calls.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from specdec_fast.core.ranks import Ranks
from specdec_fast.integrations.transformers.decoding import Decoding, Row
from specdec_fast.integrations.transformers.processor_checks import why_no_function_of_text
from specdec_fast.integrations.transformers.refusals import (
    REMEDY,
    HandedOnError,
    RefusedCallError,
    is_of_transformers,
    why_not_arguments,
    why_not_length,
    why_not_method,
    why_not_processor,
    why_not_prompts,
)
from specdec_fast.integrations.transformers.row_processors import RowLayout, RowProcessor, split_processors
from specdec_fast.sampling.params import SamplingParams

if TYPE_CHECKING:
    from specdec_fast.integrations.transformers.attachment import Attachment

_SEED_LIMIT = 2**63


class GenerateCall:
    """One call of an attached model, which its proxy reports to.

    Args:
        attachment: The attachment.
        seed: One seed, one for each row, or None to draw them.
        gives_positions: Whether the caller passed position ids.
    """

    def __init__(self, attachment: Attachment, seed: Any, gives_positions: bool = False) -> None:
        self._attachment, self._seed, self._gives_positions = attachment, seed, gives_positions
        self.skipped_cache: tuple[Any, ...] | None = None

    def refuse_whole(self, reason: str, remedy: str = REMEDY) -> None:
        """Refuses a call of which nothing has happened yet.

        Args:
            reason: What was got and expected.
            remedy: What the user can do.

        Raises:
            HandedOnError: If transformers shall run the call.
            RefusedCallError: If it shall not.
        """
        raise HandedOnError(reason) if self._attachment.fallback else RefusedCallError(reason, remedy)

    def decode_otherwise(self, base: Any, method: str, model: Any, *args: Any, **prepared: Any) -> Any:
        """Lets transformers decode a prepared call.

        Args:
            base: Class of the model.
            method: Name of the decoding method.
            model: The proxy.
            *args: Arguments of the method.
            **prepared: Arguments of the method.

        Returns:
            What `generate` returns.

        Raises:
            RefusedCallError: Without a fallback.
        """
        return self._hand_on(why_not_method(method, prepared), base, method, model, *args, **prepared)

    def _hand_on(self, reason: str, base: Any, method: str, model: Any, *args: Any, **prepared: Any) -> Any:
        if not self._attachment.fallback:
            raise RefusedCallError(reason)
        if self.skipped_cache is not None:
            config, mode, *sizes = self.skipped_cache
            base._prepare_cache_for_generation(model, config, prepared, mode, *sizes)
        with self._attachment.handing_on(reason):
            return getattr(base, method)(model, *args, **prepared)

    def sample(self, base: Any, model: Any, input_ids: Tensor, **prepared: Any) -> Any:
        """Decodes greedily or by sampling.

        Args:
            base: Class of the model.
            model: The proxy.
            input_ids: Prompts, with padding, int64 [B, n].
            **prepared: What transformers passes to its own method.

        Returns:
            What `generate` returns.

        Raises:
            RefusedCallError: For what the engine cannot do, without a fallback.
        """
        reason = self._why_not(input_ids, prepared)
        if reason is not None:
            return self._hand_on(reason, base, "_sample", model, input_ids, **prepared)
        config, criteria, streamer = (prepared[name] for name in ("generation_config", "stopping_criteria", "streamer"))
        keeps = bool(config.return_dict_in_generate and (config.output_scores or config.output_logits))
        rows = self._rows(input_ids, keeps, prepared)
        pad = getattr(config, "_pad_token_tensor", None)
        decoding = Decoding(
            self._attachment.engine,
            rows,
            input_ids,
            criteria,
            _longest(config, criteria, input_ids),
            None if pad is None else int(pad),
            streamer,
            bool(keeps and config.output_scores),
        )
        sequences = decoding.run()
        self._attachment.last = decoding.handles
        if streamer is not None:
            streamer.end()
        if not config.return_dict_in_generate:
            return sequences
        from transformers.generation import GenerateDecoderOnlyOutput

        columns = decoding.read_scores() if keeps else []
        device = input_ids.device
        make: Any = GenerateDecoderOnlyOutput
        return make(
            sequences=sequences,
            scores=tuple(scores.to(device) for _, scores in columns) if config.output_scores else None,
            logits=tuple(raw.to(device) for raw, _ in columns) if config.output_logits else None,
        )

    def _why_not(self, input_ids: Tensor, prepared: dict[str, Any]) -> str | None:
        """Returns why the engine cannot decode a prepared call, or None."""
        prepared.setdefault("streamer", None)
        ours = ("logits_processor", "stopping_criteria", "generation_config", "synced_gpus", "streamer")
        inputs = {name: value for name, value in prepared.items() if name not in ours}
        config, engine = prepared["generation_config"], self._attachment.engine
        target: Any = engine.target
        longest = _longest(config, prepared["stopping_criteria"], input_ids)
        mask = inputs.get("attention_mask")
        positions = inputs.get("position_ids") if self._gives_positions else None
        hidden, most_hidden = (0, 0) if mask is None else (int(each) for each in (mask == 0).sum(-1).aminmax())
        reason = (
            why_not_arguments(config, bool(prepared.get("synced_gpus")), inputs)
            or why_not_prompts(input_ids, mask, positions)
            or why_not_length(longest - hidden, target.max_length, target.context_limit)
            or target.why_not_as_generate(input_ids.shape[1] - most_hidden, longest - hidden)
        )
        for processor in prepared["logits_processor"]:
            reason = reason or why_not_processor(processor)
        if reason is not None or not self._attachment.checks_processors:
            return reason
        for processor in prepared["logits_processor"]:
            if not is_of_transformers(type(processor)):
                found = why_no_function_of_text(processor, input_ids, target.vocab_size)
                if found is not None:
                    return found
        return None

    def _rows(self, input_ids: Tensor, keeps_scores: bool, prepared: dict[str, Any]) -> list[Row]:
        """Makes the requests of all rows."""
        config, criteria = prepared["generation_config"], prepared["stopping_criteria"]
        count, vocab = input_ids.shape[0], self._attachment.engine.target.vocab_size
        ends = [int(token) for each in criteria if _is_eos(each) for token in each.eos_token_id.tolist()]
        stop_ids = [token for token in dict.fromkeys(ends) if 0 <= token < vocab]
        most = _longest(config, criteria, input_ids) - input_ids.shape[1]
        mask = prepared.get("attention_mask")
        shown = torch.ones_like(input_ids, dtype=torch.bool) if mask is None else mask.to(input_ids.device) != 0
        seeds = self._seeds(count) if config.do_sample else [0] * count
        rows = []
        for index in range(count):
            row = RowLayout(index, count, input_ids[index], shown[index])
            processors, params = list(prepared["logits_processor"]), {"temperature": float(bool(config.do_sample))}
            if not keeps_scores:
                found = split_processors(
                    processors,
                    row,
                    do_sample=bool(config.do_sample),
                    stop_ids=stop_ids,
                    max_new_tokens=most,
                    vocab=vocab,
                )
                params, processors = found
            own = RowProcessor(processors, row, vocab, keeps_scores) if processors or keeps_scores else None
            sampling = SamplingParams(
                seed=seeds[index],
                max_new_tokens=most,
                stop_token_ids=tuple(stop_ids),
                ignore_eos=True,
                logits_processors=[] if own is None else [own],
                **params,  # type: ignore[arg-type]
            )
            rows.append(Row(row.prompt, sampling, own, []))
        return rows

    def _seeds(self, count: int) -> Sequence[int]:
        """The seed of each row. Raises ValueError for seeds that are none, or not as many as rows."""
        seed = self._seed
        if seed is None:
            own: list[int] = torch.randint(2**62, (count,), device="cpu").tolist()
            ranks: Ranks | None = getattr(self._attachment.engine.target, "ranks", None)
            return own if ranks is None else ranks.gather(own)[0]
        expected = f"expected a number from 0 to 2**63 - 1, or one for each of {count} rows"
        seeds = list(seed) if isinstance(seed, (list, tuple)) else [seed] * count
        if len(seeds) != count or any(type(each) is not int or not 0 <= each < _SEED_LIMIT for each in seeds):
            raise ValueError(f"generate: got seed {seed!r:.80}; {expected}")
        return seeds if isinstance(seed, (list, tuple)) else [(seed + row) % _SEED_LIMIT for row in range(count)]


def _is_eos(criterion: Any) -> bool:
    """Whether a criterion is that of transformers for end-of-sequence ids."""
    return type(criterion).__name__ == "EosTokenCriteria" and is_of_transformers(type(criterion))


def _longest(config: Any, criteria: Any, input_ids: Tensor) -> int:
    """Length of prompt and text at which a row ends, whatever it says."""
    lengths = [
        each.max_length
        for each in criteria
        if type(each).__name__ == "MaxLengthCriteria" and is_of_transformers(type(each))
    ]
    return max(min(lengths, default=config.max_length), input_ids.shape[1] + 1)
