"""Any transformers causal LM that supports the attention interface, unmodified, as a target (or a draft model).

Owns the model's forward pass and its cache; knows nothing of drafts' origin or of sampling. One packed [1, M] forward
serves prefill, plain decoding and trees. Tests: tests/targets/test_huggingface.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from specdec_fast.cache.paged import LayerShape, PagedCache
from specdec_fast.core.chain_layout import chain_layout
from specdec_fast.core.draft import Draft
from specdec_fast.interfaces import Slots, TargetOutput
from specdec_fast.targets import attention
from specdec_fast.targets.fused_forward import FusedForward, why_not_fused
from specdec_fast.targets.fused_forward import build_fused_forward as whole_passes
from specdec_fast.targets.layer_skipping import LayerSkipping
from specdec_fast.targets.linear_layers import align_logits, store_by_input
from specdec_fast.targets.skipped_layers import SkippedLayers
from specdec_fast.targets.torch_compile import compiled
from specdec_kernels import TreePlan

if TYPE_CHECKING:
    from transformers import PreTrainedModel

PINNED_ROPE = ("dynamic", "longrope")  # their frequencies depend on the longest position of the whole pack
ATTENTION_LAYERS = ("full_attention", "sliding_attention", "attention")


class UnsupportedModelError(ValueError):
    """The model cannot be served by the packed forward; the message says why and what to do."""


class HuggingFaceTarget:
    """A transformers causal LM over a paged cache of its own.

    model: an instance, on its device and in its dtype. max_rows: rows in flight; max_length: context per row (default:
    the model's, at most 4,096), cut at the model's; num_pages: size of the pool (default: room for max_rows full rows);
    vocab_size: valid ids (default: the embedding's; the tokenizer's where the embedding is padded); compile: run
    the forward through torch.compile; fused_forward: run it as one operator, `fused_forward`, which computes what the
    model does in fewer steps (Llama in float32 on a CPU): True insists on it, None takes it where `why_not_fused` is
    None. Passes with auxiliary hidden states run the model's modules in place of that operator, compiled or not;
    partial ones are never compiled. Weights may be changed in place; after one was replaced make another target. The
    model keeps its values; its attention function is replaced and, on a CPU, its linear layers store their weights in
    another order and, in float32, multiply by `batch_invariant_linear` (`store_by_input`). On a GPU rows of logits
    begin at multiples of 16 elements (`align_logits`).

    Raises UnsupportedModelError for encoder-decoders, recurrent layers, models without the attention interface and
    rotary scalings that look at the whole batch, ValueError for capacities below 1.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        max_rows: int = 8,
        max_length: int | None = None,
        page_size: int = 16,
        num_pages: int | None = None,
        vocab_size: int | None = None,
        compile: bool = False,
        fused_forward: bool | None = False,
    ) -> None:
        _refuse_unsupported(model)
        wanted = {"max_rows": max_rows, "max_length": 1 if max_length is None else max_length, "page_size": page_size}
        for name, value in wanted.items():
            if value < 1:
                raise ValueError(f"{name}: got {value}; expected at least 1")
        attention.register()
        self.model = model.eval()
        self.device = model.device
        self.context_limit = int(getattr(model.config.get_text_config(), "max_position_embeddings", 2**31 - 1))
        self.max_length = min(self.context_limit, 4096 if max_length is None else max_length)
        weight: Any = model.get_input_embeddings().weight
        embedded = int(weight.shape[0])
        self.vocab_size = min(vocab_size or embedded, embedded)
        self.tokenizer: Any = None  # set where a drafter needs a draft's own
        self._logits = self._plain_logits = packed_logits(model)
        self._compile = compile
        self._tapped: dict[
            tuple[str, ...], Callable[..., Tensor]
        ] = {}  # compiled passes, by their auxiliary hidden states
        self._sub_blocks: LayerSkipping | None = None
        self.model_id = str(getattr(model.config, "name_or_path", "") or "")
        before = model.config._attn_implementation
        if before == attention.NAME:
            before = "eager"
            model.set_attn_implementation(before)
        if num_pages is None:
            num_pages = max_rows * -(-self.max_length // page_size) + 1
        room = min(12, self.max_length, max(num_pages - 1, 1) * page_size)
        sample = torch.arange(room, device=self.device) % embedded
        own = self._own_logits(sample)
        model.set_attn_implementation(attention.NAME)
        try:
            layers = self._probe()
            self.num_layers = len(layers)
            self.cache = PagedCache(
                layers,
                num_pages=num_pages,
                page_size=page_size,
                max_rows=max_rows,
                max_length=self.max_length,
                dtype=model.dtype,
                device=self.device,
            )
            self._compare(sample, own)
        except ValueError:
            model.set_attn_implementation(before)
            raise
        if self.device.type == "cpu":
            store_by_input(model)
        else:
            align_logits(model)
        try:
            self._arrange(compile, fused_forward, lambda: self._compare(sample, own, 1e-3))
        except ValueError:
            model.set_attn_implementation(before)
            raise

    def _arrange(self, compile: bool, whole: bool | None, check: Callable[[], None]) -> None:
        """Chooses what runs passes; `check` compares what they say with the model."""
        self.why_not_fused = "nobody asked" if whole is False else why_not_fused(self.model)
        if self.why_not_fused is None:
            try:
                self._logits = whole_passes(self.model, self.cache)
                check()
            except ValueError as error:
                self.why_not_fused, self._logits = str(error), self._plain_logits
        if self.why_not_fused is not None and whole:
            raise ValueError(
                f"fused_forward: got True, but {self.why_not_fused}; leave it out (compile=True serves every model)"
            )
        if self.why_not_fused is not None and compile:
            self._logits = compiled(self._plain_logits)

    def _probe(self) -> list[LayerShape]:
        probe = attention.Probe()
        token = torch.zeros(1, 1, dtype=torch.int64, device=self.device)
        try:
            with torch.inference_mode():
                self.model(input_ids=token, position_ids=token, use_cache=False, packed=probe)
        except attention.OutsideTargetError:
            raise UnsupportedModelError(
                f"{type(self.model).__name__}: does not hand keyword arguments on to its attention; expected a model "
                "that does (Llama, Qwen, Mistral, GPT-2, Gemma and most current decoders do)"
            ) from None
        expected = self.model.config.get_text_config().num_hidden_layers
        if sorted(probe.layers) != list(range(expected)):
            raise UnsupportedModelError(
                f"{type(self.model).__name__}: got attention calls from layers {sorted(probe.layers)}; expected "
                f"one from each of {expected} layers; models whose layers share or lack attention are not supported"
            )
        return [probe.layers[index] for index in range(expected)]

    def _own_logits(self, sample: Tensor) -> Tensor:
        with torch.inference_mode():
            logits: Tensor = self.model(input_ids=sample[None], use_cache=False).logits
        return logits[0, :, : self.vocab_size].float()

    def _compare(self, sample: Tensor, own: Tensor, most: float = 0.25) -> None:
        """Refuse a model whose attention does something that the attention interface does not tell. most: of the
        logits' spread; rounding, even of half precision, stays far below.
        """
        self.cache.reserve(0, len(sample))
        half = len(sample) // 2
        draft = Draft.chains([0], [sample[half:].tolist()], device=self.device)
        with torch.inference_mode():
            if half:
                shape = chain_layout((0,), (half,), self.device)
                self.extend(shape.rows, sample[:half], shape.offsets, logits=False)
            packed = self.score(draft, draft.get_plan())[0].logits
        self.cache.release([0])
        assert packed is not None
        error, spread = float((packed.float() - own[half:]).abs().mean()), float(own.std())
        if error > most * spread:  # NaN is for the engine to report
            raise UnsupportedModelError(
                f"{type(self.model).__name__}: got logits that differ from the model's own by {error:.2g} on average "
                f"(their spread is {spread:.2g}); expected the same; its attention is not the standard one"
            )

    def extend(
        self,
        rows: Tensor,
        tokens: Tensor,
        offsets: Tensor,
        *,
        logits: bool | Tensor,
        aux_hidden_states: Sequence[str] = (),
    ) -> TargetOutput:
        """Append committed tokens to rows (causal): prefill, and every step of a draft model.

        rows: int32 [B]; tokens: int64 [M]; offsets: int32 [B+1]. logits: True for [B, V] after each row's last token,
        or the packed indices (int64 [N]) of the tokens whose logits [N, V] are wanted.
        The caller has reserved the room.
        """
        slots = self.cache.stage(rows, offsets, tokens.shape[0], advance=True)
        if isinstance(logits, Tensor):
            return self._run(tokens, slots, logits, aux_hidden_states)
        wanted = (offsets[1:] - 1).long() if logits else tokens.new_zeros(1)
        output = self._run(tokens, slots, wanted, aux_hidden_states)
        return output if logits else TargetOutput(None, output.aux_hidden_states)

    def score(self, draft: Draft, plan: TreePlan, aux_hidden_states: Sequence[str] = ()) -> tuple[TargetOutput, Slots]:
        """Logits [M, V] of every node of a draft in one pass, and the slots to commit."""
        slots = self.cache.stage(draft.rows, draft.offsets, draft.num_nodes, None if draft.is_chain else plan)
        return self._run(draft.tokens, slots, None, aux_hidden_states), slots

    @contextmanager
    def skip_layers(self, skip: SkippedLayers) -> Iterator[None]:
        """While entered, passes leave these sub-blocks out (and are not compiled): self-speculation.

        Layers whose attention is left out store no keys and values. Raises ValueError for a layer that is not there and
        for a sub-block that cannot be left out.
        """
        if self._sub_blocks is None:
            self._sub_blocks = LayerSkipping(self.model, list(self.layers))
        whole, self._logits = self._logits, self._plain_logits
        try:
            with self._sub_blocks.skipping(skip):
                yield
        finally:
            self._logits = whole

    def _run(
        self, tokens: Tensor, slots: Slots, wanted: Tensor | None, aux_hidden_states: Sequence[str]
    ) -> TargetOutput:
        if torch.is_grad_enabled():  # keys of a pass that is recorded for backward could not be written into the cache
            with torch.no_grad():
                return self._run(tokens, slots, wanted, aux_hidden_states)
        if not attention.is_served(self.model.config):  # somebody used the model in between
            self.model.set_attn_implementation(attention.NAME)
        context = attention.PackedContext(slots, self.cache.keys, self.cache.values)
        hooks: list[Any] = []
        try:
            for name in aux_hidden_states:
                hooks.append(self._aux_hidden_state(name))
            run = self._passes(tuple(aux_hidden_states)) if aux_hidden_states else self._logits
            logits = run(tokens=tokens, positions=slots.positions, wanted=wanted, packed=context)
        finally:
            for hook in hooks:
                hook.remove()
        caught = context.caught
        return TargetOutput(logits if logits.shape[1] == self.vocab_size else logits[:, : self.vocab_size], caught)

    def _passes(self, aux_hidden_states: tuple[str, ...]) -> Callable[..., Tensor]:
        """What runs passes with auxiliary hidden states. Compiled code has the hooks of the time when it was
        compiled, so each set of auxiliary hidden states has its own.
        """
        if not self._compile or self._logits is self._plain_logits:  # partial passes are not compiled
            return self._plain_logits
        if aux_hidden_states not in self._tapped:
            self._tapped[aux_hidden_states] = compiled(self._plain_logits)
        return self._tapped[aux_hidden_states]

    def _aux_hidden_state(self, name: str) -> Any:
        """A hook that notes a hidden state in the context of its pass, so that it is a part of compiled code."""
        place, _, index = name.partition(":")
        if place == "final_norm":

            def keep_output(_module: Any, _args: Any, kwargs: dict[str, Any], output: Any) -> None:
                kwargs["packed"].caught[name] = output[0][0]

            return self.model.base_model.register_forward_hook(keep_output, with_kwargs=True)
        if place != "entering" or not index.isdigit() or int(index) >= self.num_layers:
            raise ValueError(
                f"auxiliary hidden state: got {name!r}; expected 'final_norm' or 'entering:i' with i < "
                f"{self.num_layers}"
            )

        def keep(_module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            hidden = args[0] if args else kwargs["hidden_states"]
            kwargs["packed"].caught[name] = hidden[0]

        return self.layers[int(index)].register_forward_pre_hook(keep, with_kwargs=True)

    @property
    def fused_forward(self) -> FusedForward | None:
        """Its passes where they are one operator, and `extend` is ours: who has them can have chains of them too."""
        ours = type(self).extend is HuggingFaceTarget.extend and "extend" not in vars(self)
        return self._logits if ours and isinstance(self._logits, FusedForward) else None

    @property
    def hidden_size(self) -> int:
        """Width of the hidden states at the auxiliary hidden states."""
        return int(self.model.config.get_text_config().hidden_size)

    @property
    def dtype(self) -> torch.dtype:
        """Of the model, and so of its auxiliary hidden states."""
        return self.model.dtype

    @property
    def num_embeddings(self) -> int:
        """Rows of the embedding: `vocab_size`, and padding behind it where there is some."""
        return int(self.model.get_input_embeddings().weight.shape[0])

    @property
    def layers(self) -> torch.nn.ModuleList:
        """The decoder layers of the model. Raises UnsupportedModelError when there is no list of them."""
        for module in self.model.base_model.modules():
            if isinstance(module, torch.nn.ModuleList) and len(module) == self.num_layers:
                return module
        raise UnsupportedModelError(
            f"{type(self.model).__name__}: no list of {self.num_layers} layers to auxiliary hidden state"
        )

    def embed(self, tokens: Tensor) -> Tensor:
        """Input embeddings of tokens int64 [...]."""
        return self.model.get_input_embeddings()(tokens)

    def lm_head(self, hidden: Tensor) -> Tensor:
        """Logits [..., vocab_size] of hidden states as tapped at "final_norm"."""
        logits: Tensor = self.model.get_output_embeddings()(hidden)[..., : self.vocab_size]
        softcap = getattr(self.model.config.get_text_config(), "final_logit_softcapping", None)
        return logits if softcap is None else softcap * torch.tanh(logits / softcap)


def packed_logits(model: PreTrainedModel) -> Callable[..., Tensor]:
    """A packed pass of a model: tokens int64 [M] to logits [M, V], or [N, V] of the `wanted` nodes int64 [N].

    One function to compile: what lies around the model's own forward costs a small pass more than some of its layers.
    """

    def run(tokens: Tensor, positions: Tensor, wanted: Tensor | None, packed: attention.PackedContext) -> Tensor:
        output = model.forward(
            input_ids=tokens.unsqueeze(0),
            position_ids=positions.unsqueeze(0),
            use_cache=False,
            logits_to_keep=0 if wanted is None else wanted,
            packed=packed,
        )
        logits: Tensor = output.logits[0]
        return logits

    return run


def _refuse_unsupported(model: PreTrainedModel) -> None:
    name, config = type(model).__name__, model.config.get_text_config()
    if getattr(model.config, "is_encoder_decoder", False):
        raise UnsupportedModelError(f"{name}: got an encoder-decoder; expected a decoder-only causal model; choose one")
    if getattr(model, "_is_stateful", False):
        raise UnsupportedModelError(
            f"{name}: got a model with recurrent state; expected attention layers only, since that state cannot be "
            "rolled back by forgetting slots; choose another model"
        )
    if not getattr(model, "_supports_attention_backend", False):
        raise UnsupportedModelError(
            f"{name}: does not support transformers' attention interface; expected a model whose attention goes "
            "through AttentionInterface (Llama, Qwen, Mistral, GPT-2, Gemma and most current decoders do)"
        )
    odd = sorted({kind for kind in getattr(config, "layer_types", None) or () if kind not in ATTENTION_LAYERS})
    if odd:
        raise UnsupportedModelError(
            f"{name}: got layers of type {', '.join(odd)}; expected full or sliding-window attention only (recurrent "
            "state could not be rolled back by forgetting slots); choose another model"
        )
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    nested = [value for value in rope.values() if isinstance(value, dict)] or [rope]
    for entry in nested:
        kind = entry.get("rope_type", entry.get("type", "default"))
        if kind in PINNED_ROPE:
            raise UnsupportedModelError(
                f"{name}: got rotary scaling '{kind}', whose frequencies depend on the longest row of a batch, so a "
                "row's text would depend on its neighbours; set config.rope_parameters to a fixed type (default, "
                "linear, llama3, yarn) before loading"
            )
