"""What the attention masks of a model allow: windows and chunks, found from the rules that the masks stand for.

A rule is a function of positions, so a window or chunk of any size is found by a short text.
Tests: tests/targets/test_load_checks.py, tests/targets/test_chunked_attention.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from specdec_fast.targets.attention import MaskFunction, Probe
from specdec_fast.targets.layer_skipping import LayerSkipping
from specdec_fast.targets.load_checks import observe, sample_text
from specdec_fast.targets.model_support import UnsupportedModelError
from specdec_fast.targets.skipped_layers import SkippedLayers

_LONG_TEXT = 16_384  # tokens that are embedded, no more, if the rule of a mask depends on the text
_LONGEST_RULE = 2**20  # positions up to which the rule of a mask is evaluated


@dataclass(frozen=True, slots=True)
class MaskRules:
    """The earlier tokens that each attending layer sees.

    Attributes:
        windows: Windows by layer in tokens, 0 for none. None: those that the model passes with its calls.
        chunks: Chunks by layer in tokens, 0 for none. None: no layer has chunks. A token sees its own chunk alone:
            the tokens whose positions give the same quotient.
    """

    windows: list[int] | None
    chunks: list[int] | None


def find_mask_rules(model: Any, probe: Probe, layers: Sequence[torch.nn.Module] | None, max_length: int) -> MaskRules:
    """Derives the window or the chunk of every layer from the rule of its mask.

    Args:
        model: The model, with attention `attention.PROBE_NAME`.
        probe: A dry run of one text from position 0.
        layers: The decoder layers if they are known.
        max_length: Longest text of the target.

    Returns:
        Windows and chunks by layer.

    Raises:
        UnsupportedModelError: If a mask is neither causal nor a sliding window nor made of chunks, or if its rule
            cannot be known.
    """
    name = type(model).__name__
    known: dict[int, tuple[int, int]] = {}  # by the place of a mask in probe.masks
    found: dict[int, tuple[int, int]] = {}
    for call in probe.calls:
        if call.mask is None:
            if call.window:  # its own attention would apply it or not, by implementation
                raise UnsupportedModelError(
                    f"{name}: layer {call.layer} passes a window of {call.window} and no mask; expected both or none; "
                    "choose another model"
                )
            found[call.layer] = 0, 0
            continue
        at = next((at for at, (mask, _) in enumerate(probe.masks) if _is_same_mask(call.mask, mask)), None)
        if at is None:
            raise UnsupportedModelError(
                f"{name}: layer {call.layer} makes or changes its attention mask by itself; expected a mask of "
                "transformers.masking_utils (create_causal_mask, create_sliding_window_causal_mask), since packed "
                "passes have no mask; choose another model"
            )
        if at not in known:
            known[at] = _window_and_chunk(model, probe, at, layers, max_length)
        found[call.layer] = known[at]
    # a window that no text exceeds is none
    passed = all(found[call.layer][0] == (call.window if call.window < max_length else 0) for call in probe.calls)
    windows, chunks = ([found[layer][part] for layer in sorted(found)] for part in (0, 1))
    return MaskRules(None if passed else windows, chunks if any(chunks) else None)


def _is_same_mask(mask: Any, made: Tensor) -> bool:
    """Whether a mask that a layer passed is one that was made, or a view of all of it."""
    if mask is made:
        return True
    return (
        isinstance(mask, Tensor)
        and mask.shape == made.shape
        and mask.dtype == made.dtype
        and mask.data_ptr() == made.data_ptr()
    )


def _window_and_chunk(
    model: Any, probe: Probe, at: int, layers: Sequence[torch.nn.Module] | None, max_length: int
) -> tuple[int, int]:
    """The window and the chunk of a mask, 0 for none. Raises UnsupportedModelError."""
    length, failure, found = min(max_length, _LONGEST_RULE), None, None
    try:
        found = _read_rule(probe.masks[at][1], length, model.device)
    except Exception:  # the rule reads tensors of the text, which end with it
        length = min(length, _LONG_TEXT)
        try:
            found = _read_rule(_masks_of_long_text(model, layers, length)[at], length, model.device)
        except Exception as error:
            failure = error
    if found is None:
        what = "its attention mask is neither causal nor a sliding window nor chunks"
        if failure is not None:
            what = f"its attention mask cannot be tested ({type(failure).__name__}: {failure})"
        raise UnsupportedModelError(
            f"{type(model).__name__}: {what} (for texts up to {length} tokens); expected a causal mask, a sliding "
            "window or chunks; choose a decoder with full, sliding-window or chunked attention"
        ) from failure
    return found


def _read_rule(rule: MaskFunction, length: int, device: torch.device) -> tuple[int, int] | None:
    """The window and the chunk of a mask's rule for texts up to a length, 0 for none. None: it is something else."""
    window = _sliding_window(rule, length, device)
    if window is not None:
        return window, 0
    chunk = _chunk(rule, length, device)
    return None if chunk is None else (0, chunk)


def _allowed(rule: MaskFunction, queries: Tensor, keys: Tensor) -> Tensor:
    """Which keys int64 [K] the queries int64 [Q] see by a rule, bool [Q, K]."""
    zero = torch.zeros(1, 1, 1, 1, dtype=torch.int64, device=keys.device)
    found = torch.as_tensor(rule(zero, zero, queries.view(1, 1, -1, 1), keys.view(1, 1, 1, -1)), device=keys.device)
    return found.bool().expand(1, 1, len(queries), len(keys))[0, 0]


def _sliding_window(rule: MaskFunction, length: int, device: torch.device) -> int | None:
    """The window of a mask's rule for texts up to a length: 0 for none, None if it is no causal window."""
    keys = torch.arange(length, device=device)

    def allowed(query: int) -> Tensor:
        return _allowed(rule, keys[query : query + 1], keys)[0]

    window = int(allowed(length - 1).sum())
    samples = {0, 1, 2, 3, length // 3, length // 2, window - 1, window, window + 1, length - 2, length - 1}
    for query in samples & set(range(length)):
        if not torch.equal(allowed(query), (keys <= query) & (keys > query - window)):
            return None
    return window if window < length else 0


def _chunk(rule: MaskFunction, length: int, device: torch.device) -> int | None:
    """The chunk of a mask's rule for texts up to a length, None if it is not made of causal chunks."""
    keys = torch.arange(length, device=device)
    sees_first = _allowed(rule, keys, keys[:1])[:, 0]
    chunk = int(sees_first.long().cumprod(0).sum())
    if not 0 < chunk < length:
        return None
    edges = {edge + near for edge in (chunk, 2 * chunk, length // chunk * chunk) for near in (-1, 0, 1)}
    for query in (edges | {0, 1, 2, length // 3, length // 2, length - 2, length - 1}) & set(range(length)):
        seen = _allowed(rule, keys[query : query + 1], keys)[0]
        if not torch.equal(seen, (keys <= query) & (keys // chunk == query // chunk)):
            return None
    return chunk


def _masks_of_long_text(model: Any, layers: Sequence[torch.nn.Module] | None, length: int) -> list[MaskFunction]:
    """The rules of the masks for a text of a length. No layer runs. Raises ValueError."""
    if layers is None:
        raise ValueError("got no list of layers")
    with LayerSkipping(model, layers).skipping(SkippedLayers.after(0, len(layers))):
        places = torch.arange(length, device=model.device)
        probe = observe(model, sample_text(model, length), places)
    return [rule for _, rule in probe.masks]
