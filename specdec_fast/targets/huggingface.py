"""A transformers causal LM, unmodified, as a target or a draft model.

It owns the model's forward pass and the cache, and knows nothing of drafters or sampling. One packed [1, M] forward
serves prefill, plain decoding and trees. Tests: tests/targets/test_huggingface.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from specdec_fast.cache.hybrid import HybridCache, make_cache
from specdec_fast.cache.recurrent_states import LONGEST_HISTORY
from specdec_fast.core.autocast import without_autocast
from specdec_fast.core.draft import Draft
from specdec_fast.interfaces import Slots, TargetOutput
from specdec_fast.targets import attention, load_checks
from specdec_fast.targets.activations import with_batch_invariant_activations
from specdec_fast.targets.counted_positions import count_by_position
from specdec_fast.targets.fused_forward import FusedForward, build_fused_forward, why_not_fused
from specdec_fast.targets.hidden_states import entered_layer, hook_hidden_state
from specdec_fast.targets.layer_skipping import LayerSkipping
from specdec_fast.targets.linear_layers import align_logits, store_by_input
from specdec_fast.targets.mask_rules import find_mask_rules
from specdec_fast.targets.model_access import ModelAccess
from specdec_fast.targets.model_lease import ModelLease, modules_in_use
from specdec_fast.targets.model_state import unchanged_on_error
from specdec_fast.targets.model_support import check_supported
from specdec_fast.targets.output_scaling import OutputScaling, find_output_scaling
from specdec_fast.targets.packed_forward import build_packed_forward
from specdec_fast.targets.recurrent_layers import MixerPass, MixerUse, find_mixers, running, with_equal_columns
from specdec_fast.targets.rotary_pinning import RotaryPinning, context_limit
from specdec_fast.targets.sharding import find_ranks
from specdec_fast.targets.skipped_layers import SkippedLayers
from specdec_fast.targets.torch_compile import compile_forward
from specdec_fast.targets.weight_changes import WeightChanges
from specdec_kernels import TreePlan

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class HuggingFaceTarget(ModelAccess):
    """Scores packed trees with a transformers causal LM, over a paged cache of its own.

    The model keeps its values, and weights may be changed in place; after replacing a weight, build another target. The
    model's attention function is replaced. On a CPU its linear layers store weights in another order, and multiply by
    `batch_invariant_linear` in float32 (`store_by_input`). Activations become batch-invariant, unless `compile` is
    True. On a GPU, rows of logits begin at multiples of 16 elements (`align_logits`).

    Passes with skipped layers run the model's modules in place of the fused forward, and are never compiled.

    Args:
        model: A transformers model, on its device and in its dtype.
        max_rows: Requests in flight.
        max_length: Context per row. None: the model's, at most 4,096. It never exceeds the model's.
        page_size: Tokens per page.
        num_pages: Size of the pool. None: enough for `max_rows` full rows.
        vocab_size: Valid token ids. None: the rows of the embedding. Pass the tokenizer's size if the embedding is
            padded.
        compile: Run the forward through torch.compile, unless it is fused.
        fused_forward: Run the forward as one operator (`specdec_kernels.fused_forward`; Llama, Mistral, Qwen 2 and 3,
            and Gemma 1 to 3 in float32 or bfloat16 on a CPU).
            True requires it, None uses it if `why_not_fused` is None.

    Attributes:
        cache: The paged cache.
        vocab_size: Valid token ids.
        ranks: The processes that compute the model together. None if this process has it whole.
        num_layers: Decoder layers.
        context_limit: Positions that the model supports.
        has_default_length: Whether `max_length` was not given, so that it is 4,096 at most.
        windows: Window of each layer in tokens, 0 for none. None: those that the model passes with its calls.
        chunks: Chunk of each layer in tokens, 0 for none (`MaskRules`). None: no layer has chunks.
        why_not_fused: Why passes are not fused, or None.
        has_changed_weights: Called, returns whether weights have changed since the last call.

    Raises:
        UnsupportedModelError: If packed passes cannot serve the model exactly. Its class, configuration, placement,
            attention calls, masks and logits are checked; the model stays as it was.
        ValueError: If a capacity is below 1.
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
        check_supported(model)
        length = 4096 if max_length is None else max_length
        capacities = {"max_rows": max_rows, "max_length": length, "page_size": page_size}
        for name, value in capacities.items():
            if isinstance(value, bool) or not hasattr(value, "__index__") or value < 1:
                raise ValueError(f"{name}: got {value!r}; expected at least 1, as an integer")
        self.has_default_length = max_length is None
        attention.register()
        self.ranks = find_ranks(model, compile)
        self.lease = ModelLease(model)
        with self.lease.opening(), unchanged_on_error(model), without_autocast(model.device):
            self._open(model.eval(), capacities, num_pages, vocab_size, compile, fused_forward)

    def close(self) -> None:
        """Gives the model its attention, its modes and the layout of its weights back.

        The model is restored when its last target is closed, and can then be used by transformers as before. The target
        must not be used any more. Calling it twice is harmless.
        """
        self.lease.release()

    def _open(
        self,
        model: PreTrainedModel,
        capacities: dict[str, int],
        num_pages: int | None,
        vocab_size: int | None,
        compile: bool,
        fused_forward: bool | None,
    ) -> None:
        """Checks the model, and prepares it for packed passes. Raises ValueError; the caller restores the model."""
        max_rows, page_size = capacities["max_rows"], capacities["page_size"]
        self.model, self.device = model, model.device
        positions = context_limit(model)
        self.context_limit = positions or 2**31 - 1
        self.max_length = min(self.context_limit, capacities["max_length"])
        self.vocab_size = min(vocab_size or self.num_embeddings, self.num_embeddings)
        self.tokenizer: Any = None  # set if a drafter needs the draft model's own
        self._compile = compile
        # compiled passes, by the names of their auxiliary hidden states
        self._compiled_with_states: dict[tuple[str, ...], Callable[..., Tensor]] = {}
        self._layer_skipping: LayerSkipping | None = None
        self.has_changed_weights = WeightChanges(model)
        self.model_id = str(getattr(model.config, "name_or_path", "") or "")
        if num_pages is None:
            num_pages = max_rows * -(-self.max_length // page_size) + 1
        if attention.is_served(model.config):  # by another target: logits of eager attention round differently
            self.lease.restore_attention()
        count = min(load_checks.SAMPLE_TOKENS, self.max_length, max(num_pages - 1, 1) * page_size)
        sample = load_checks.sample_text(model, count)
        expected = load_checks.own_logits(model, sample)[count // 2 :, : self.vocab_size]
        attention.use_attention(model, attention.PROBE_NAME)
        mixers: list[Any] = find_mixers(model)
        self.lease.before_end(MixerUse(model, mixers).release)
        self.lease.before_end(count_by_position(model))
        self._rotary = RotaryPinning(model, self.max_length, max_rows)
        self.lease.before_end(self._rotary.release)
        self._logits = self._plain_logits = build_packed_forward(model, self._rotary)
        first = sample[: load_checks.DRY_TOKENS]
        with self._rotary.running():
            probe = load_checks.observe(model, first, torch.arange(len(first), device=self.device))
        shapes = load_checks.check_calls(model, probe.calls, bool(mixers))
        self.num_layers = int(model.config.get_text_config().num_hidden_layers)
        self._attending = tuple(shapes)
        inner = [(call.layer, call.module) for call in probe.calls]
        inner += [(int(mixer.layer_idx), mixer) for mixer in mixers]
        self._decoder = load_checks.find_decoder(model, inner)
        layers = None if self._decoder is None else list(self.layers)
        rules = find_mask_rules(model, probe, layers, self.max_length)
        self.windows = None if rules.windows is None else self._by_layer(rules.windows, 0)
        self.chunks = None if rules.chunks is None else self._by_layer(rules.chunks, 0)
        self.lease.serve_attention(model)
        # embeddings of positions may end early if the configuration does not say where; a GPU would not survive that
        far = self.max_length - 1 if positions or self.device.type == "cpu" else count - 1
        with self._rotary.running():
            load_checks.check_independence(model, first, probe.calls, far)
        capacity = {
            "num_pages": num_pages, "page_size": page_size, "max_rows": max_rows, "max_length": self.max_length,
            "dtype": probe.calls[0].key.dtype if probe.calls else model.dtype, "device": self.device,
        }  # fmt: skip
        self._places = {place: at for at, place in enumerate(probe.mixers.shapes)}
        self.cache = make_cache(list(shapes.values()), list(probe.mixers.shapes.values()), **capacity)
        if self.device.type == "cpu" and not compile:
            self._logits = self._plain_logits = with_batch_invariant_activations(model, self._plain_logits)
        names = ("final_norm",) if self._decoder is not None else ()
        packed, states = load_checks.packed_logits(self, sample, names)
        load_checks.check_logits(model, packed, expected)
        self._scaling: OutputScaling | None = None
        if "final_norm" in states:
            self._scaling = find_output_scaling(model, states["final_norm"][-1:], packed[-1:])
        if self.device.type == "cpu":
            store_by_input(model)
            with_equal_columns(mixers)
        else:
            align_logits(model)
        passed = self.windows if self.windows is not None else [call.window for call in probe.calls]
        self._choose_forward(compile, fused_forward, passed, sample, expected)

    def _choose_forward(
        self, compile: bool, fused: bool | None, windows: Sequence[int], sample: Tensor, expected: Tensor
    ) -> None:
        """Chooses the implementation of passes. Fused ones are compared with the model's own logits of a sample."""
        unwanted = "they are compiled" if compile else "it was not requested"
        self.why_not_fused = unwanted if fused is False else why_not_fused(self.model)
        if self.why_not_fused is None:
            try:
                self._logits = build_fused_forward(self.model, self.cache, windows)
                load_checks.check_logits(self.model, load_checks.packed_logits(self, sample)[0], expected)
            except ValueError as error:
                self.why_not_fused, self._logits = str(error), self._plain_logits
        if self.why_not_fused is not None and fused:
            other = "(compile=True serves every model)" if self.ranks is None else "(such a model runs as it is)"
            raise ValueError(f"fused_forward: got True, but {self.why_not_fused}; leave it out {other}")
        if self.why_not_fused is not None and compile:
            self._logits = compile_forward(self._plain_logits)

    def extend(
        self,
        rows: Tensor,
        tokens: Tensor,
        offsets: Tensor,
        *,
        logits: bool | Tensor,
        aux_hidden_states: Sequence[str] = (),
    ) -> TargetOutput:
        """Commits known tokens and stores their keys and values. The caller has reserved pages.

        Args:
            rows: Row of each request, int32 [B].
            tokens: Packed tokens, int64 [M].
            offsets: First token of each request, int32 [B + 1].
            logits: True for the logits [B, V] after the last token of each request, False for none, or the packed
                indices of the tokens whose logits are returned, int64 [N].
            aux_hidden_states: Hidden states to return: "entering:i" or "final_norm".

        Returns:
            Logits [B, V], [N, V] or None, and hidden states [M, hidden] by name.
        """
        slots = self.cache.stage(rows, offsets, tokens.shape[0], advance=True)
        mixers = self._mixer_pass(rows, slots, None, advance=True)
        if isinstance(logits, Tensor):
            return self._run(tokens, rows, slots, logits, aux_hidden_states, mixers)
        # modules compute one row of logits at least
        fewest = tokens.new_zeros(0 if isinstance(self._logits, FusedForward) else 1)
        wanted = (offsets[1:] - 1).long() if logits else fewest
        output = self._run(tokens, rows, slots, wanted, aux_hidden_states, mixers)
        return output if logits else TargetOutput(None, output.aux_hidden_states)

    def score(self, draft: Draft, plan: TreePlan, aux_hidden_states: Sequence[str] = ()) -> tuple[TargetOutput, Slots]:
        """Scores all nodes of a draft in one pass. The caller has reserved pages.

        Args:
            draft: Packed trees of M nodes.
            plan: Depths, ancestors and links of the nodes.
            aux_hidden_states: Hidden states to return: "entering:i" or "final_norm".

        Returns:
            Logits [M, V] and hidden states, and the slots to commit.
        """
        slots = self.cache.stage(draft.rows, draft.offsets, draft.num_nodes, None if draft.is_chain else plan)
        mixers = self._mixer_pass(draft.rows, slots, None if draft.is_chain else draft.parents, advance=False)
        return self._run(draft.tokens, draft.rows, slots, None, aux_hidden_states, mixers), slots

    def begin_row(self, row: int, longest: int) -> None:
        """Notes how long the text of a new request may become, which decides its rotary frequencies.

        Only models with rotary scaling `longrope` or `dynamic` read it. It holds until the next call for this row. A
        row without any is taken for one that may fill the context.

        Args:
            row: A row without tokens.
            longest: Tokens of the prompt, and of the text that may follow.
        """
        self._rotary.begin_row(row, longest)

    def prefix_kind(self, longest: int) -> str:
        """Returns the kind of a text. Texts of different kinds begin with different keys, even if with equal tokens.

        Args:
            longest: Tokens that a text may have.
        """
        return self._rotary.kind_of(longest)

    def why_not_as_generate(self, shortest: int, longest: int) -> str | None:
        """Returns why transformers' `generate` gives other texts than this target, or None.

        Args:
            shortest: Tokens of the shortest prompt of a batch.
            longest: Tokens that the longest text may have.
        """
        return self._rotary.why_not_as_generate(shortest, longest)

    @contextmanager
    def skip_layers(self, skip: SkippedLayers) -> Iterator[None]:
        """Skips sub-blocks in all passes inside the context, for self-speculation.

        Layers whose attention is skipped store no keys and values. The passes are not compiled.

        Args:
            skip: Attention and MLP sub-blocks.

        Raises:
            ValueError: If a layer does not exist, or if a sub-block cannot be skipped.
        """
        if self._layer_skipping is None:
            self._layer_skipping = LayerSkipping(self.model, list(self.layers))
        usual, self._logits = self._logits, self._plain_logits
        try:
            with modules_in_use(self.model), self._layer_skipping.skipping(skip):
                yield
        finally:
            self._logits = usual

    def _mixer_pass(self, rows: Tensor, slots: Slots, parents: Tensor | None, *, advance: bool) -> MixerPass | None:
        """The pass of recurrent layers, or None if the model has none."""
        if not isinstance(self.cache, HybridCache):
            return None
        states = self.cache.recurrent
        if not advance or states.keeps_history:
            states.begin()
        keeps = not advance or (states.keeps_history and len(slots.positions) <= LONGEST_HISTORY)
        return MixerPass(states, self._places, rows, slots.lengths, slots.offsets, parents, advance, keeps)

    def _by_layer(self, parts: list[Any], default: Any = None) -> list[Any]:
        """Places what belongs to attention at the layers that have one."""
        if len(parts) == self.num_layers:
            return parts
        known = dict(zip(self._attending, parts, strict=True))
        return [known.get(layer, default) for layer in range(self.num_layers)]

    def _run(
        self,
        tokens: Tensor,
        rows: Tensor,
        slots: Slots,
        wanted: Tensor | None,
        aux_hidden_states: Sequence[str],
        mixers: MixerPass | None,
    ) -> TargetOutput:
        """Runs one packed pass."""
        # autograd could not record writes to the cache, and autocast would change the dtype of keys
        if torch.is_grad_enabled() or torch.is_autocast_enabled(self.device.type):
            with torch.no_grad(), without_autocast(self.device):
                return self._run(tokens, rows, slots, wanted, aux_hidden_states, mixers)
        if not attention.is_served(self.model.config):  # the model was used elsewhere in between
            self.lease.serve_attention(self.model)
        keys, values = self._by_layer(self.cache.keys), self._by_layer(self.cache.values)
        context = attention.PackedContext(slots, keys, values, self.windows, self.chunks)
        context.longest = self._rotary.longest(rows, slots.offsets, len(tokens))
        if mixers is not None:
            context.hidden_states = mixers.hidden_states
        if aux_hidden_states and isinstance(self._logits, FusedForward):
            entered = [entered_layer(name, self.num_layers) for name in aux_hidden_states]
            logits, found = self._logits.run_with_states(tokens, slots.positions, wanted, context, entered)
            return TargetOutput(logits[:, : self.vocab_size], dict(zip(aux_hidden_states, found, strict=True)))
        with ExitStack() as leaving, running(mixers):
            if not isinstance(self._logits, FusedForward):
                leaving.enter_context(modules_in_use(self.model))
                leaving.callback(self._rotary.stop)
            for name in aux_hidden_states:
                leaving.callback(self._hook_hidden_state(name).remove)
            run = self._forward_with_states(tuple(aux_hidden_states)) if aux_hidden_states else self._logits
            logits = run(tokens=tokens, positions=slots.positions, wanted=wanted, packed=context)
        if mixers is not None:
            mixers.end()
        states = context.hidden_states
        return TargetOutput(logits if logits.shape[1] == self.vocab_size else logits[:, : self.vocab_size], states)

    def _forward_with_states(self, aux_hidden_states: tuple[str, ...]) -> Callable[..., Tensor]:
        """The forward with hooks for hidden states. Compiled code contains its hooks, so each set has its own."""
        if not self._compile or self._logits is self._plain_logits:  # passes with skipped layers are not compiled
            return self._plain_logits
        if aux_hidden_states not in self._compiled_with_states:
            self._compiled_with_states[aux_hidden_states] = compile_forward(self._plain_logits)
        return self._compiled_with_states[aux_hidden_states]

    def _hook_hidden_state(self, name: str) -> Any:
        """Registers a hook that stores a hidden state in the context of its pass."""
        entered_layer(name, self.num_layers)
        return hook_hidden_state(name, self.layers, lambda: self._require_decoder()[0])

    @property
    def fused_forward(self) -> FusedForward | None:
        """The fused forward, or None. It serves `extend` too, unless a subclass overrides that."""
        ours = type(self).extend is HuggingFaceTarget.extend and "extend" not in vars(self)
        return self._logits if ours and isinstance(self._logits, FusedForward) else None
