"""`attach` and `detach`: transformers' `generate` of one model, decoded by an engine.

Tests: tests/integrations/transformers/test_attachment.py.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specdec_fast.engine.engine import Engine
from specdec_fast.engine.request import Handle
from specdec_fast.integrations.transformers.calls import GenerateCall
from specdec_fast.integrations.transformers.model_proxy import make_proxy, proxy_class
from specdec_fast.integrations.transformers.model_record import ModelRecord
from specdec_fast.integrations.transformers.refusals import ATTACH_AGAIN, HandedOnError, why_not_whole_call
from specdec_fast.interfaces import Rule
from specdec_fast.loading import ASSETS, ModelOptions, check_same_tokenizer, load, load_tokenizer
from specdec_fast.rules import DEFAULT
from specdec_fast.sampling.params import SamplingParams
from specdec_kernels.unknown_names import unknown_name

if TYPE_CHECKING:
    from transformers import PreTrainedModel

log = logging.getLogger("specdec_fast")

TRANSFORMERS = "transformers"
_NAME = "specdec"
"""Attribute of an attached model."""
_SET_BY_GENERATE = {
    "sampling": "the settings of generate, or model.generation_config",
    "temperature": "temperature= of generate, or model.generation_config",
    "eos_token_ids": "eos_token_id= of generate, or model.generation_config",
}


class Attachment:
    """An engine behind `model.generate`. `attach` makes one, and `attached(model)` returns it.

    Calling it is calling `model.generate`. In a `with` block it detaches the model at the end.

    Attributes:
        model: The model.
        engine: The engine that decodes. `engine.explain()` says how, and `engine.stats` counts.
        fallback: "transformers" if that decodes what the engine cannot, else None.
        checks_processors: Whether logits processors of users are checked (`attach`).
        last: Requests of the last call that the engine decoded, with texts and statistics, in the order of the rows.
    """

    def __init__(self, model: Any, engine: Engine, fallback: str | None, checks_processors: bool) -> None:
        self.model, self.engine, self.fallback, self.checks_processors = model, engine, fallback, checks_processors
        self.last: list[Handle] = []
        self._kind = proxy_class(type(model))
        own = inspect.signature(type(model).generate)
        self._names = [name for name, at in own.parameters.items() if at.kind is not at.VAR_KEYWORD][1:]
        self.__signature__ = own.replace(parameters=list(own.parameters.values())[1:])
        self.__doc__ = type(model).generate.__doc__
        self._reasons: set[str] = set()
        self._record = ModelRecord(model)
        self.replaced: tuple[bool, Any] | None = None

    def __call__(self, *args: Any, seed: int | list[int] | None = None, **kwargs: Any) -> Any:
        """Generates as `model.generate` of transformers does.

        Args:
            *args: Arguments of `generate`.
            seed: Seed of the noise: one number, to which the row is added, or one for each row. None draws seeds from
                torch's global generator, so that `torch.manual_seed` makes texts reproducible.
            **kwargs: Arguments of `generate`, settings of the generation config, and inputs of the model.

        Returns:
            What `generate` returns.

        Raises:
            RefusedCallError: For what the engine cannot do, without `fallback`.
            TypeError: For more arguments without a name than `generate` has.
            ValueError: For arguments that transformers or the engine refuse.
        """
        if len(args) > len(self._names):
            raise TypeError(f"generate: got {len(args)} arguments without a name; expected at most {len(self._names)}")
        given = {**dict(zip(self._names, args)), **kwargs}
        streamer = given.get("streamer")
        try:
            return self._generate(given, seed)
        except BaseException:
            if streamer is not None:  # its reader would wait for ever
                with suppress(Exception):
                    streamer.end()
            raise

    def _generate(self, given: dict[str, Any], seed: Any) -> Any:
        call = GenerateCall(self, seed, given.get("position_ids") is not None)
        base: Any = type(self.model)
        with self._lending_attention():
            changed, reason = self.find_replaced_part(), why_not_whole_call(given)
            try:
                if changed is not None:
                    call.refuse_whole(changed, ATTACH_AGAIN)
                if reason is not None:
                    call.refuse_whole(reason)
                return base.generate(make_proxy(self._kind, self.model, call), **given)
            except HandedOnError as refused:
                with self.handing_on(refused.reason):
                    return base.generate(self.model, **given)

    def find_replaced_part(self) -> str | None:
        """Returns what was got and expected if a part of the model is not the one that was attached, or None."""
        with self.engine.lock:  # steps of other threads may change modules for a moment
            return self._record.find_change()

    @contextmanager
    def _lending_attention(self) -> Iterator[None]:
        """Gives the model its own attention at the end, unless other threads still generate."""
        try:
            yield
        finally:
            with self.engine.lock:
                if self.engine.idle and not self.engine.closed:
                    self.lend_attention()

    def lend_attention(self) -> None:
        """Gives the model its own attention until the next pass, for its forward outside of the engine."""
        target: Any = self.engine.target
        target.lease.lend_attention()

    @contextmanager
    def handing_on(self, reason: str) -> Iterator[None]:
        """A block in which transformers may use the model, which no thread does through the engine meanwhile.

        Args:
            reason: Why the engine does not decode. It is logged once.
        """
        if reason not in self._reasons:
            self._reasons.add(reason)
            log.warning("generate: got %s; transformers runs such calls instead of the engine", reason)
        with self.engine.lock:
            self.lend_attention()
            yield

    def detach(self) -> None:
        """Restores the model, as `detach` does. Calling it twice is harmless."""
        with ExitStack() as ends:
            ends.callback(self.engine.close)
            own = vars(self.model)
            if own.get(_NAME) is self:
                del own[_NAME]
            if self.replaced is not None and own.get("generate") is self:
                had, before = self.replaced
                if had:
                    own["generate"] = before
                else:
                    del own["generate"]

    def __enter__(self) -> Attachment:
        return self

    def __exit__(self, *_: object) -> None:
        self.detach()

    def __repr__(self) -> str:
        return f"Attachment({type(self.model).__name__}, {self.engine!r})"

    def __deepcopy__(self, memo: Any) -> Any:
        return CopiedAttachment()

    def __reduce__(self) -> Any:
        return CopiedAttachment, ()


class CopiedAttachment:
    """What a copy of an attached model has in place of the engine, which stays with the original."""

    def __call__(self, *_: Any, **__: Any) -> Any:
        """Raises RuntimeError."""
        raise RuntimeError(
            "generate: got a copy of an attached model; expected the original, which has the engine; call "
            "attach(copy), or del copy.generate for that of transformers"
        )


def attach(
    model: PreTrainedModel,
    draft: str | Path | PreTrainedModel | None = None,
    drafter: str | None = None,
    rule: str | Rule = DEFAULT,
    fallback: str | None = None,
    tokenizer: Any = None,
    *,
    check_processors: bool = True,
    **options: Any,
) -> PreTrainedModel:
    """Makes `model.generate` speculative. Its texts keep their distribution, and greedy texts stay as they are.

    Args:
        model: A transformers model with `generate`, on its device and in its dtype.
        draft: The draft model, as in `specdec_fast.load`. One that is loaded here gets the model's device and dtype.
        drafter: Name of the drafter, as in `load`. Default: the draft model, or `auto` on a CPU.
        rule: Verification rule, by name or as an object.
        fallback: "transformers" lets transformers decode what the engine cannot, such as beams, after one warning. None
            refuses such calls with a `RefusedCallError`.
        tokenizer: The model's tokenizer, with which that of a draft model is compared. Default: that of the folder or
            hub id from which the model was loaded, if it is on this machine.
        check_processors: Whether a call tries logits processors of users on its prompts, and refuses those that are no
            functions of one text.
        **options: Further arguments of `load`, such as `num_draft_tokens`, `max_rows`, `max_length` or
            `drafter_options`.

    Returns:
        The same model. `attached(model)` has the engine.

    Raises:
        TypeError: If `load` has no such argument.
        ValueError: If the model is attached already or has no `generate` of transformers, or if the engine cannot be
            built. The model stays as it was.
    """
    found = build_attachment(model, draft, drafter, rule, fallback, tokenizer, check_processors, options)
    own = vars(model)
    before = own.get("generate")
    kept = before is not None and not isinstance(before, CopiedAttachment)
    found.replaced = (kept, before)
    own["generate"] = found
    return model


def build_attachment(
    model: Any,
    draft: Any,
    drafter: str | None,
    rule: str | Rule,
    fallback: str | None,
    tokenizer: Any,
    check_processors: bool,
    options: Mapping[str, Any],
) -> Attachment:
    """Builds the engine of a model and leaves `model.generate` as it is. The arguments are those of `attach`."""
    if fallback not in (None, TRANSFORMERS):
        raise ValueError(f"attach: got fallback {fallback!r}; expected None or {TRANSFORMERS!r}")
    _check_model(model)
    for name, instead in _SET_BY_GENERATE.items():
        if name in options:
            raise ValueError(f"attach: got {name}, which every call decides; expected it elsewhere; use {instead}")
    rows = model.get_input_embeddings().weight.shape[0]  # all ids, as in transformers
    settings: dict[str, Any] = {"device": str(model.device), "dtype": model.dtype, "vocab_size": rows, **options}
    if tokenizer is None and (draft is not None or drafter is not None):
        tokenizer = _find_tokenizer(model)
    shares_tokens = (options.get("drafter_options") or {}).get("tokenizers", "same") == "same"
    if draft is not None and shares_tokens:
        by_load = isinstance(draft, (str, Path))
        own = None if by_load else _find_tokenizer(draft)
        check_same_tokenizer(tokenizer, own, settings["vocab_size"])
        if tokenizer is None:
            _check_sizes(draft, rows, "target", "pass tokenizer= to attach")
        elif own is None and not by_load:
            _check_sizes(draft, rows, "draft", "pass the draft as a folder or hub id")
    neutral = SamplingParams()
    known = [*inspect.signature(load).parameters][1:]
    unknown = next((name for name in options if name not in known), None)
    if unknown is not None:
        raise TypeError(unknown_name("attach: argument", unknown, known))
    engine = load(model, draft, drafter=drafter, rule=rule, tokenizer=tokenizer, sampling=neutral, **settings)
    try:
        found = Attachment(model, engine, fallback, check_processors)
        found.lend_attention()
        vars(model)[_NAME] = found
    except BaseException:
        engine.close()
        raise
    return found


def detach(model: PreTrainedModel) -> PreTrainedModel:
    """Ends an attachment: `generate`, attention, modes and the layout of weights are as before.

    Running calls of other threads end with an error.

    Args:
        model: An attached model.

    Returns:
        The same model.

    Raises:
        ValueError: If the model is not attached.
        RuntimeError: Inside of a step, as in a logits processor.
    """
    attached(model).detach()
    return model


def attached(model: PreTrainedModel) -> Attachment:
    """Returns the attachment of a model, with its engine and statistics.

    Args:
        model: An attached model.

    Raises:
        ValueError: If the model is not attached.
    """
    found = find_attachment(model)
    if found is None:
        raise ValueError(
            f"got {type(model).__name__}, which is not attached; expected a model that is; call attach(model) first"
        )
    return found


def find_attachment(model: Any) -> Attachment | None:
    """Returns the attachment of a model, or None."""
    found = getattr(model, "__dict__", {}).get(_NAME)
    return found if isinstance(found, Attachment) else None


def _check_model(model: Any) -> None:
    """Raises ValueError for what cannot be attached."""
    from transformers import GenerationMixin, PreTrainedModel

    if isinstance(model, PreTrainedModel) and isinstance(model, GenerationMixin):
        if find_attachment(model) is not None:
            raise ValueError("attach: got a model that is attached already; expected another; call detach(model) first")
        return
    remedy = "load one with AutoModelForCausalLM.from_pretrained"
    if hasattr(model, "get_base_model"):  # a PeftModel
        remedy = "attach model.get_base_model(), which the PeftModel generates with"
    elif hasattr(model, "_orig_mod"):  # torch.compile
        remedy = "attach the model before torch.compile, and pass compile=True to attach instead"
    elif isinstance(model, (str, Path)):
        remedy = "load it with AutoModelForCausalLM.from_pretrained, or use specdec_fast.load"
    raise ValueError(f"attach: got {type(model).__name__}; expected a transformers model with generate; {remedy}")


def _check_sizes(draft: Any, rows: int, unknown: str, remedy: str) -> None:
    """Refuses a draft of another size of vocabulary if there are no tokenizers to compare, and warns otherwise."""
    from transformers import AutoConfig

    config: Any = getattr(draft, "config", None)
    if config is None:
        bundled = ASSETS / str(draft)
        with suppress(Exception):  # a hub id whose files are not here yet
            place = bundled if bundled.is_dir() else draft
            config = AutoConfig.from_pretrained(place, local_files_only=True)
    size = None if config is None else getattr(config.get_text_config(), "vocab_size", None)
    if size is not None and max(size, rows) > 1.1 * min(size, rows):  # padding of embeddings stays below
        raise ValueError(
            f"draft: got a vocabulary of {size} tokens, and no tokenizer of the {unknown}; expected about {rows} "
            f"tokens, as the target has; choose a draft of the same model family, or {remedy}"
        )
    log.warning("attach: got no tokenizer of the %s, so the two were not compared; %s", unknown, remedy)


def _find_tokenizer(model: Any) -> Any:
    """The tokenizer beside a model's files on this machine, or None."""
    place = str(getattr(getattr(model, "config", None), "name_or_path", "") or "")
    if not place:
        return None
    try:
        return load_tokenizer(place, ModelOptions(more={"local_files_only": True}))
    except Exception:  # whatever is there is no tokenizer that could be compared
        return None
