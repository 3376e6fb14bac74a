"""From model names to an engine: loads target, draft and tokenizer, and refuses pairs that do not fit.

Tests: tests/test_loading.py, tests/test_load_tokenizer.py.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from specdec_fast.adaptive.budget import BudgetPolicy, budget_for
from specdec_fast.core.names import explain_arguments
from specdec_fast.drafters import (
    drafter_names,
    make_drafter,
    may_take_draft,
    refuse_missing_draft,
    refuse_unknown_options,
)
from specdec_fast.engine.engine import Engine
from specdec_fast.engine.request import Prompt
from specdec_fast.interfaces import Drafter, Rule
from specdec_fast.retrieval.tokenizer_fingerprint import vocabulary_size
from specdec_fast.rules import DEFAULT, get_rule, rule_for
from specdec_fast.sampling.params import SamplingParams
from specdec_fast.targets.fused_forward import widened
from specdec_fast.targets.huggingface import HuggingFaceTarget, UnsupportedModelError
from specdec_fast.tune.rule_selection import sample_ways
from specdec_kernels.names import closest, unknown_name

if TYPE_CHECKING:
    from transformers import PreTrainedModel

ASSETS = Path(__file__).parent / "assets"
BUNDLED = {"demo-target": ASSETS / "demo-target", "demo-draft": ASSETS / "demo-draft"}
EXPECTED = f"expected a bundled name ({', '.join(BUNDLED)}), a folder with config.json and weights"
_TOKENIZER_FILE = re.compile(r"tokenizer.*|vocab\..*|merges\.txt|tekken\.json|bpe\.codes|.*\.(model|spm|tiktoken)")
_HUB_FILES = "tokenizer_config.json", "tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "tekken.json"
_HUB_ID = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "float64": torch.float64}


def _dtype(name: str | torch.dtype) -> torch.dtype:
    if isinstance(name, torch.dtype):
        return name
    if name not in DTYPES:
        raise ValueError(unknown_name("dtype", name, DTYPES))
    return DTYPES[name]


def check_device(name: str | torch.device, what: str = "device") -> None:
    """Raise ValueError unless tensors can live on the device. what: it is called so in the message."""
    device: torch.device | None
    try:
        device = torch.device(name)
    except RuntimeError:
        device = None
    if device is None or device.type not in ("cpu", "cuda"):
        raise ValueError(f"{what}: got {str(name)!r}; expected cpu, cuda or cuda:N")
    there = torch.cuda.device_count()
    if device.type == "cuda" and (device.index or 0) >= there:
        raise ValueError(f"{what}: got {str(name)!r}; this machine has {there} CUDA devices; use cpu")


@contextmanager
def _no_bars() -> Iterator[None]:
    """Keeps transformers' progress bars away."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def load_model(
    source: str | Path, dtype: str | torch.dtype = "float32", device: str = "cpu", *, what: str = "model"
) -> PreTrainedModel:
    """A transformers causal LM from a bundled name, a folder or a hub id. what: it is called so in messages.

    Raises ValueError when there is none or when it cannot be loaded.
    """
    from transformers import AutoModelForCausalLM

    place = BUNDLED.get(str(source), source)
    wanted = _dtype(dtype)
    known = place != source or Path(source).exists()
    if not known and _is_bundled_head(str(source)):
        head = str(source).removeprefix("demo-")
        raise ValueError(f"{what}: got {str(source)!r}, a bundled head; it comes with drafter {head}; {EXPECTED}")
    meant = None if known else _meant(source)
    if meant is not None:  # no hub is asked for what is a slip of the pen
        raise ValueError(f"{what}: got {str(source)!r}; {EXPECTED}; did you mean {meant!r}?")
    if not known and not _HUB_ID.fullmatch(str(source)):
        raise ValueError(f"{what}: got {str(source)!r}; {EXPECTED}, or a hub id (owner/name): no such folder")
    try:
        with _no_bars() if place != source else nullcontext():  # the bundled models are there at once
            loaded: Any = AutoModelForCausalLM.from_pretrained(place, dtype=wanted, output_loading_info=True)
    except Exception as error:  # what a config may go wrong by, nobody can list
        other = _other_kind(place) if str(error).startswith("Unrecognized configuration class") else None
        if other is not None:
            expected = "expected a decoder-only causal language model; choose one (Llama, Qwen, Mistral, Gemma, ...)"
            raise UnsupportedModelError(f"{what}: got {str(source)!r}, {other}; {expected}") from error
        hub = ", or a hub id that is reachable from here (to work offline, download it first and name the folder)"
        raise ValueError(f"{what}: got {str(source)!r}; {EXPECTED}{'' if known else hub}: {_reason(error)}") from error
    model, found = loaded
    missing = sorted(found["missing_keys"])
    if missing:
        raise ValueError(
            f"{what} {str(source)!r}: the weights lack {len(missing)} tensors of the architecture (for example "
            f"{missing[0]}); expected a complete checkpoint; these would be random"
        )
    moved: PreTrainedModel = model.to(device).eval()
    return moved


def _meant(source: str | Path) -> str | None:
    """The bundled name that a slip of the pen was meant to be, if it is one."""
    return closest(str(source), BUNDLED, cutoff=0.8)


def _is_bundled_head(name: str) -> bool:
    return name.startswith("demo-") and name not in BUNDLED and (ASSETS / name).is_dir()


def is_hub_id(source: str | Path) -> bool:
    """True for what only the hub can have: spelt like an id, and neither bundled nor here."""
    name = str(source)
    here = name in BUNDLED or _is_bundled_head(name) or Path(name).exists()
    return not here and _meant(name) is None and _HUB_ID.fullmatch(name) is not None


def _other_kind(place: str | Path) -> str | None:
    """What a model is that is no causal language model, in words; None where its config cannot be read."""
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(place)
    except Exception:  # the first error is told
        return None
    name = (getattr(config, "architectures", None) or [config.model_type])[0]
    return f"an encoder-decoder ({name})" if getattr(config, "is_encoder_decoder", False) else f"a {name}"


def _reason(error: Exception) -> str:
    """The first line of what an error says, or its name."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def lacks_tokenizer(source: str | Path) -> bool:
    """True for a folder without a file of a tokenizer."""
    place = Path(BUNDLED.get(str(source), source))
    return place.is_dir() and not any(_TOKENIZER_FILE.fullmatch(file.name) for file in place.iterdir())


def _came_from_hub(source: str) -> bool:
    """Whether files of a tokenizer are here that the hub has: all are, once it was asked."""
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        return any(isinstance(try_to_load_from_cache(source, name), str) for name in _HUB_FILES)
    except HFValidationError:  # no such name on the hub
        return False


def load_tokenizer(source: str | Path) -> Any:
    """The tokenizer beside a model, or None when there is none: no file of one in a folder, or none that the hub has.

    Raises ValueError for files of a tokenizer that cannot be read.
    """
    from transformers import AutoTokenizer

    place = Path(BUNDLED.get(str(source), source))
    there = place.is_dir()
    if lacks_tokenizer(place):
        return None
    try:
        found = AutoTokenizer.from_pretrained(place if there else source)
        # of some kinds of models transformers makes one of nothing, which knows special tokens alone
        special = {*found.all_special_tokens}
        return found if any(token not in special for token in found.get_vocab()) else None
    except Exception as error:
        if not (there or _came_from_hub(str(source))) and isinstance(error, (OSError, ValueError, KeyError, TypeError)):
            return None
        raise ValueError(
            f"tokenizer: got {str(source)!r}, whose tokenizer cannot be read ({type(error).__name__}: "
            f"{_reason(error)}); expected files as transformers writes them; put back what is broken, or take them "
            "away and pass token ids"
        ) from error


def check_same_tokenizer(target: Any, draft: Any) -> None:
    """Raise ValueError unless both tokenizers give the same ids to the same tokens (either may be None)."""
    if target is None or draft is None:
        return
    ours, theirs = target.get_vocab(), draft.get_vocab()
    if ours == theirs:
        return
    different = [token for token in ours.keys() | theirs.keys() if ours.get(token) != theirs.get(token)]
    raise ValueError(
        f"draft: its tokenizer differs from the target's: {len(different)} of {len(ours)} tokens have other ids "
        f"(for example {sorted(different)[0]!r}); expected the same vocabulary; take a draft of the same model family, "
        "or drafter draft_model with its option tokenizers=tli or tokenizers=slem"
    )


@contextmanager
def _called(what: str) -> Iterator[None]:
    """Says which of the models it is that cannot be served."""
    try:
        yield
    except UnsupportedModelError as error:
        raise UnsupportedModelError(f"{what}: {error}") from None


def eos_ids(model: PreTrainedModel, tokenizer: Any) -> tuple[int, ...]:
    """End-of-sequence ids of a model, from its generation config, its config or its tokenizer."""
    for holder in (getattr(model, "generation_config", None), model.config, tokenizer):
        found = getattr(holder, "eos_token_id", None)
        if found is not None:
            return tuple(found) if isinstance(found, (list, tuple)) else (int(found),)
    return ()


@explain_arguments(SamplingParams)
def load(
    target: str | Path | PreTrainedModel,
    draft: str | Path | PreTrainedModel | None = None,
    *,
    drafter: str | None = None,
    drafter_options: Mapping[str, Any] | None = None,
    rule: str | Rule = DEFAULT,
    num_draft_tokens: int | None = None,
    tokenizer: Any = None,
    dtype: str | torch.dtype = "float32",
    device: str = "cpu",
    max_rows: int = 8,
    max_length: int | None = None,
    page_size: int = 16,
    num_pages: int | None = None,
    compile: bool = False,
    fused_forward: bool = False,
    eos_token_ids: Sequence[int] | None = None,
    budget: str | BudgetPolicy = "fixed",
    step_mode: str = "auto",
    temperature: float | None = None,
    sample: Sequence[tuple[Prompt, SamplingParams]] = (),
) -> Engine:
    """An engine for a target and, when given, a draft model or another drafter.

    target, draft: a bundled name ("demo-target", "demo-draft"), folder, hub id or loaded model; drafter: name (default:
    "draft_model" when a draft is given, else none; "draft_tree" takes a draft too); drafter_options: what else its
    constructor takes; tokenizer: a transformers tokenizer, or where one lies; dtype, device: of models that are loaded
    here (a loaded one stays as it is); sample: requests like those to come, with whose first tokens rule `best` weighs
    how to draft (without them it goes by what holds for every draft); fused_forward: the target's passes run as one
    operator (those of a draft model do wherever they can, and a small one of half precision is loaded in float32 for
    that: what they compute changes no distribution); the other arguments as in `HuggingFaceTarget` and `Engine`.

    Raises ValueError when something cannot be loaded or does not fit together.
    """
    check_device(device)
    _dtype(dtype)
    chosen, policy = get_rule(rule), budget_for(budget)
    name = drafter or ("draft_model" if draft is not None else None)
    options: dict[str, Any] = {**(drafter_options or {})}
    if name is None and options:
        raise ValueError(f"drafter_options: got {options} and no drafter; expected drafter=, their name")
    if name is None and num_draft_tokens:
        raise ValueError(f"num_draft_tokens {num_draft_tokens}: got no drafter; pass draft=MODEL or drafter=NAME")
    if num_draft_tokens is not None:
        options["num_draft_tokens"] = num_draft_tokens
    if name is not None:  # before anything is loaded
        refuse_missing_draft(name, draft is not None)
        refuse_unknown_options(name, options)
    if draft is not None and name is not None and not may_take_draft(name):
        takers = [each for each in drafter_names() if may_take_draft(each)]
        raise ValueError(f"draft: got a draft model and drafter {name!r}; expected {' or '.join(takers)}, or no draft")

    def from_any(source: str | Path | PreTrainedModel, what: str) -> PreTrainedModel:
        if isinstance(source, (str, Path)):
            return load_model(source, dtype, device, what=what)
        if not isinstance(source, torch.nn.Module):
            raise ValueError(f"{what}: got {type(source).__name__}; {EXPECTED}, or a loaded transformers model")
        return source

    model = from_any(target, "model")
    if isinstance(tokenizer, (str, Path)):
        place, tokenizer = tokenizer, load_tokenizer(tokenizer)
        if tokenizer is None:
            raise ValueError(f"tokenizer: got {str(place)!r}, where none is; expected a folder or hub id that has one")
    elif tokenizer is None and isinstance(target, (str, Path)):
        tokenizer = load_tokenizer(target)
    vocab_size = None if tokenizer is None else vocabulary_size(tokenizer)
    shape: dict[str, Any] = {"max_rows": max_rows, "page_size": page_size, "compile": compile}
    with _called("model"):
        ours = HuggingFaceTarget(
            model,
            max_length=max_length,
            num_pages=num_pages,
            vocab_size=vocab_size,
            fused_forward=fused_forward,
            **shape,
        )

    def open_draft() -> HuggingFaceTarget:
        assert draft is not None
        small, theirs = from_any(draft, "draft"), None
        if isinstance(draft, (str, Path)):
            small, theirs = widened(small), load_tokenizer(draft)
        size = vocab_size
        if options.get("tokenizers", "same") == "same":
            check_same_tokenizer(tokenizer, theirs)
        elif theirs is not None:
            size = vocabulary_size(theirs)
        if small is model:
            raise ValueError("draft: got the target itself; expected another model (its cache would be shared)")
        with _called("draft"):
            small_one = HuggingFaceTarget(
                small, max_length=ours.max_length, vocab_size=size, fused_forward=None, **shape
            )
        small_one.tokenizer = theirs
        return small_one

    opened: list[HuggingFaceTarget] = []

    def make(prefers: str) -> Drafter:
        """The drafter anew, with the draft models of the one before: the first that it opens, the second, ..."""
        turns = count()

        def next_draft() -> HuggingFaceTarget:
            at = next(turns)
            if at == len(opened):
                opened.append(open_draft())
            return opened[at]

        take = None if draft is None else next_draft
        return make_drafter(name or "", options, target=ours, tokenizer=tokenizer, draft=take, prefers=prefers)

    made, why = None, None
    if name is not None:
        prefers = getattr(chosen, "prefers", "coupled")
        made = make(prefers)
        settled = getattr(rule_for(chosen, made.needs, temperature)[0], "prefers", prefers)
        choose: Any = getattr(chosen, "choose_rule", None)
        undecided = choose is not None and made.needs.dists and temperature != 0 and sample
        if undecided and not make("greedy").needs.dists:  # nobody said how to pick
            of_its_own = policy if hasattr(policy, "settle") else "fixed"
            estimates = sample_ways(ours, made, sample, tokenizer, of_its_own)
            chosen, why, settled = choose(made.needs, temperature, estimates)
            made = make(settled)  # knows nothing of the sample
        elif settled != prefers:  # rule best settled on one that wants tokens picked in another way
            made = make(settled)
    found = [token for token in eos_ids(model, tokenizer) if 0 <= token < ours.vocab_size]  # others never come
    ids = found if eos_token_ids is None else eos_token_ids
    given: dict[str, Any] = {"tokenizer": tokenizer, "budget": policy, "step_mode": step_mode}
    engine = Engine(ours, made, rule=chosen, eos_token_ids=ids, temperature=temperature, **given)
    engine.why_rule = why or engine.why_rule
    return engine


__all__ = ["UnsupportedModelError", "check_same_tokenizer", "eos_ids", "load", "load_model", "load_tokenizer"]
