"""Checks of a model when a target opens it: attention calls, independence of tokens, and logits.

A packed pass has nodes of many requests and branches. It is exact if nothing but attention mixes tokens, and if every
attention call means what its arguments say. Both are checked in dry runs, in which every attention returns zeros;
`mask_rules` reads the masks of such a run. Real passes are then compared with the model's own logits.
Tests: tests/targets/test_load_checks.py.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from specdec_fast.cache.shapes import LayerShape
from specdec_fast.core.chain_layout import chain_layout
from specdec_fast.core.draft import Draft
from specdec_fast.targets import attention
from specdec_fast.targets.attention import AttentionCall, Probe
from specdec_fast.targets.model_support import UnsupportedModelError
from specdec_fast.targets.recurrent_layers import running

SAMPLE_TOKENS, DRY_TOKENS = 8, 4  # more would lengthen the opening of large models
# arguments of attention that have no meaning in evaluation mode, beside those whose values are None, False or 0
_HARMLESS = {"dropout", "position_ids", "logits_to_keep", "num_items_in_batch"}
# Largest difference of values that should be equal, in units of their spread. Tiny models of 95 architectures have at
# most 7e-6 in float32, and 0.14 in bfloat16 for the median token (experts that flip change few tokens by much more).
_EXACT, _ROUNDED = 1e-3, 0.25


def sample_text(model: Any, count: int) -> Tensor:
    """Returns token ids int64 [count] in which neighbours differ."""
    rows = int(model.get_input_embeddings().weight.shape[0])
    return (torch.arange(count, device=model.device) * 7919 + 5) % rows


@contextmanager
def _explaining(model: Any, what: str) -> Iterator[None]:
    """Turns errors of a model's forward into UnsupportedModelError."""
    try:
        yield
    except (UnsupportedModelError, torch.OutOfMemoryError):
        raise
    except attention.OutsideTargetError:
        raise UnsupportedModelError(
            f"{type(model).__name__}: does not pass keyword arguments on to its attention; expected a model "
            "that does (Llama, Qwen, Mistral, GPT-2, Gemma and most current decoders do)"
        ) from None
    except Exception as error:  # forwards of models fail in more ways than can be listed
        first = next(iter(str(error).splitlines()), "")
        raise UnsupportedModelError(
            f"{type(model).__name__}: {what} raised {type(error).__name__}: {first}; expected a causal language model "
            "that runs on token ids; check that model(input_ids=...) works"
        ) from error


@contextmanager
def _without_kernel_advice() -> Iterator[None]:
    """Hides transformers' advice to install kernels of recurrent layers, whose place the engine's operators take."""

    def is_other(record: logging.LogRecord) -> bool:
        return "is falling back to its reference" not in record.getMessage()

    logger = logging.getLogger("transformers.integrations.hub_kernels")
    logger.addFilter(is_other)
    try:
        yield
    finally:
        logger.removeFilter(is_other)


def own_logits(model: Any, sample: Tensor) -> Tensor:
    """Runs a model with its own attention.

    Args:
        model: A transformers model.
        sample: Token ids int64 [M].

    Returns:
        Logits float32 [M, V].

    Raises:
        UnsupportedModelError: If the model cannot run on token ids, or returns no logits for every token.
    """
    with torch.inference_mode(), _without_kernel_advice(), _explaining(model, "its own forward pass"):
        logits = getattr(model(input_ids=sample[None], use_cache=False), "logits", None)
    if not isinstance(logits, Tensor) or logits.dim() != 3 or logits.shape[1] != len(sample):
        raise UnsupportedModelError(
            f"{type(model).__name__}: got no logits for every token; expected a causal language model, such as "
            "AutoModelForCausalLM loads"
        )
    return logits[0].float()


def observe(model: Any, tokens: Tensor, positions: Tensor) -> Probe:
    """Records the attention calls of a packed pass without its attention.

    Args:
        model: A model with attention `attention.NAME` or `attention.PROBE_NAME`.
        tokens: Token ids int64 [M].
        positions: Their positions int64 [M].

    Returns:
        The probe.

    Raises:
        UnsupportedModelError: If the model cannot run packed passes.
    """
    probe = Probe(num_tokens=len(tokens), device=model.device, positions=positions)
    # projections of large vocabularies would take half of the time, and quantized ones fail without a row
    first = tokens.new_zeros(1)
    with torch.inference_mode(), probe.recording(), running(probe.mixers), _explaining(model, "a packed pass"):
        model.forward(
            input_ids=tokens[None], position_ids=positions[None], use_cache=False, logits_to_keep=first, packed=probe
        )
    return probe


def check_calls(model: Any, calls: Sequence[AttentionCall], has_mixers: bool = False) -> dict[int, LayerShape]:
    """Checks that layers call attention once, with arguments that packed passes apply.

    Args:
        model: The model, for messages.
        calls: Attention calls of a dry run.
        has_mixers: The model has recurrent layers too, so that some have no attention.

    Returns:
        Shapes of keys and values by layer, in the order of layers.

    Raises:
        UnsupportedModelError: If a layer calls attention never or twice, or passes something else.
    """
    name, expected = type(model).__name__, model.config.get_text_config().num_hidden_layers
    found = [call.layer for call in calls]
    wanted = sorted({*found} - {None}) if has_mixers else list(range(expected))
    if None in found or sorted(found) != wanted:
        raise UnsupportedModelError(
            f"{name}: got attention calls from layers {found}; expected one from each of {expected} layers; "
            "models whose layers share, repeat or lack attention are not supported"
        )
    for call in calls:
        if call.key.shape[2] != call.query.shape[2] or call.query.shape[0] != 1:
            raise UnsupportedModelError(
                f"{name}: layer {call.layer} attends from {call.query.shape[2]} tokens to {call.key.shape[2]} keys in "
                "a pass without a cache; expected one key per token; choose another model"
            )
        odd = [
            option
            for option, value in call.options.items()
            if option not in _HARMLESS and (isinstance(value, Tensor) or value not in (None, False, 0))
            if option != "is_causal" or value is not True
        ]
        if call.options.get("is_causal") is False:
            odd.append("is_causal=False")
        if odd:
            raise UnsupportedModelError(
                f"{name}: layer {call.layer} passes {', '.join(odd)} to its attention, which packed passes do not "
                "apply; expected scale, window, soft cap and sinks only; choose another model"
            )
    width = [max(call.key.shape[3], call.value.shape[3]) for call in calls]
    shapes = {call.layer: LayerShape(call.key.shape[1], dim, dim) for call, dim in zip(calls, width, strict=True)}
    return {layer: shapes[layer] for layer in wanted}


def find_decoder(
    model: Any, inner: Sequence[tuple[int, torch.nn.Module]]
) -> tuple[torch.nn.Module, torch.nn.ModuleList] | None:
    """Finds the decoder, whose list of layers contains the modules that mix tokens.

    Args:
        model: The model.
        inner: Attention modules and mixers, each with its layer.

    Returns:
        The decoder and its layers, or None. The list may have more entries than the model uses.
    """
    for owner in model.modules():
        for layers in owner.children():
            if not isinstance(layers, torch.nn.ModuleList) or len(layers) <= max(at for at, _ in inner):
                continue
            if all(any(module is each for each in layers[at].modules()) for at, module in inner):
                return owner, layers
    return None


def check_independence(model: Any, sample: Tensor, calls: Sequence[AttentionCall], last_position: int) -> None:
    """Checks that tokens do not depend on each other outside of attention, nor on their places in a pass.

    The text runs a second time: backwards, with every second token replaced by one at a distant position. Queries, keys
    and values of the other tokens must stay.

    Args:
        model: The model, with attention `attention.NAME`.
        sample: Token ids int64 [M].
        calls: Attention calls of `sample` at positions 0..M - 1.
        last_position: A position that the model supports.

    Raises:
        UnsupportedModelError: If they depend on each other.
    """
    count = len(sample)
    kept = torch.arange(0, count, 2, device=sample.device)
    tokens, positions = sample.roll(1), torch.arange(count, device=sample.device)
    positions[1::2] = last_position - positions[1::2] // 2
    positions.clamp_(min=0)
    tokens[kept] = sample[kept]
    again = observe(model, tokens.flip(0), positions.flip(0)).calls
    place = count - 1 - kept
    for before, after in zip(calls, again, strict=True):
        for what in ("query", "key", "value"):
            first, second = getattr(before, what)[0][:, kept], getattr(after, what)[0][:, place]
            error = _error(model, first.transpose(0, 1).flatten(1), second.transpose(0, 1).flatten(1))
            if error is not None:
                raise UnsupportedModelError(
                    f"{type(model).__name__}: the {what} of a token in layer {before.layer} depends on the other "
                    f"tokens of a pass or on their order (by {error:.2g} of the spread); expected attention alone to "
                    "mix tokens, since a pass holds branches and requests; choose another model"
                )


def _error(model: Any, found: Tensor, expected: Tensor, rounds: bool = False) -> float | None:
    """The difference of tokens' values [N, D] in units of their spread if it is more than rounding, else None."""
    expected = expected.float()
    spread = float(expected.std(correction=0)) or 1.0
    errors = (found.float() - expected).abs().amax(1) / spread
    full = model.dtype in (torch.float32, torch.float64) and torch.get_float32_matmul_precision() == "highest"
    exact = full and not rounds and getattr(model.config, "quantization_config", None) is None
    error = float(errors.max() if exact else errors.median())
    return error if error > (_EXACT if exact else _ROUNDED) else None  # the engine reports NaN


def packed_logits(
    target: Any, sample: Tensor, aux_hidden_states: Sequence[str] = ()
) -> tuple[Tensor, dict[str, Tensor]]:
    """Runs a text through a target: the first half as a prompt, the rest as a branch among other branches.

    Args:
        target: A `HuggingFaceTarget` with an empty row 0.
        sample: Token ids int64 [M].
        aux_hidden_states: Names of hidden states to return.

    Returns:
        Logits float32 [M - M // 2, V] of the second half, and hidden states of the same tokens.
    """
    half, cache = len(sample) // 2, target.cache
    tokens = sample[half:].tolist()
    # every token but the first has a sibling in front of it, if the cache has space for both
    with_siblings = 2 * len(sample) <= min(cache.max_length, (cache.pages.num_pages - 1) * cache.page_size)
    nodes, parents = tokens[:1], [-1]
    for token in tokens[1:]:
        parent = len(nodes) - 1
        added = [(token + 1) % target.num_embeddings, token] if with_siblings else [token]
        nodes, parents = nodes + added, parents + [parent] * len(added)
    draft = Draft.trees([0], [(nodes, parents)], device=target.device)
    cache.reserve(0, half + len(nodes))
    target.begin_row(0, len(sample))
    try:
        with torch.inference_mode():
            if half:
                shape = chain_layout((0,), (half,), target.device)
                target.extend(shape.rows, sample[:half], shape.offsets, logits=False)
            output = target.score(draft, draft.get_plan(), aux_hidden_states)[0]
    finally:
        cache.release([0])
        target.begin_row(0, target.max_length)
    step = 2 if with_siblings else 1
    logits = output.logits[::step].float()
    return logits, {name: states[::step] for name, states in output.aux_hidden_states.items()}


def check_logits(model: Any, packed: Tensor, expected: Tensor) -> None:
    """Compares logits of packed passes with the model's own.

    Args:
        model: The model.
        packed: Packed logits [N, V].
        expected: The model's own [N, V].

    Raises:
        UnsupportedModelError: If they differ by more than rounding.
    """
    # weights of other types may come with activations that are rounded to as few bits
    error = _error(model, packed, expected, any(type(each.data) is not Tensor for each in model.parameters()))
    if error is not None:
        raise UnsupportedModelError(
            f"{type(model).__name__}: got logits that differ from the model's own by {error:.2g} of their spread; "
            "expected the same; its attention or its positions are not the standard ones; choose another model"
        )
