"""Builds an engine from model names, and refuses parts that do not fit together. Tests: tests/loading/."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from specdec_fast.adaptive.budget import BudgetPolicy, budget_for
from specdec_fast.core.former_names import explain_arguments
from specdec_fast.drafters import (
    BY_DEFAULT,
    NO_DRAFTER,
    check_draft_model,
    check_option_names,
    drafter_names,
    get_drafter,
    make_drafter,
    may_take_draft,
)
from specdec_fast.engine.engine import Engine
from specdec_fast.engine.prompts import Prompt
from specdec_fast.interfaces import Drafter, Rule
from specdec_fast.loading.model_options import ModelOptions
from specdec_fast.loading.model_targets import FoundModel, find_model
from specdec_fast.loading.models import check_device, resolve_dtype
from specdec_fast.loading.quiet_libraries import without_import_warnings
from specdec_fast.loading.sampling_defaults import check_sampling, resolve_defaults
from specdec_fast.loading.tokenizers import check_same_tokenizer, check_tokenizer, eos_ids, load_tokenizer
from specdec_fast.retrieval.tokenizer_fingerprint import vocabulary_size
from specdec_fast.rules import DEFAULT, get_rule, rule_for, rule_origin
from specdec_fast.sampling.params import SamplingParams
from specdec_fast.targets.fused_forward import widen_small_model
from specdec_fast.targets.huggingface import HuggingFaceTarget
from specdec_fast.tune.rule_selection import sample_ways
from specdec_kernels.unknown_names import unknown_name

if TYPE_CHECKING:
    from transformers import PreTrainedModel


log = logging.getLogger("specdec_fast")

SampleOf = Callable[[SamplingParams], Sequence[tuple[Prompt, SamplingParams]]]
"""Makes typical requests from the parameters of requests without any."""


@explain_arguments(SamplingParams)
@without_import_warnings()
def load(
    target: str | Path | PreTrainedModel,
    draft: str | Path | PreTrainedModel | None = None,
    *,
    drafter: str | None = None,
    drafter_options: Mapping[str, Any] | None = None,
    rule: str | Rule = DEFAULT,
    num_draft_tokens: int | None = None,
    tokenizer: Any = None,
    vocab_size: int | None = None,
    dtype: str | torch.dtype = "float32",
    device: str = "cpu",
    device_map: Any = None,
    adapter: str | Path | None = None,
    revision: str | None = None,
    trust_remote_code: bool = False,
    model_options: Mapping[str, Any] | None = None,
    draft_model_options: Mapping[str, Any] | None = None,
    max_rows: int = 8,
    max_length: int | None = None,
    page_size: int = 16,
    num_pages: int | None = None,
    compile: bool = False,
    fused_forward: bool | None = None,
    weights: str | None = None,
    eos_token_ids: int | Sequence[int] | None = None,
    budget: str | BudgetPolicy = "fixed",
    step_mode: str = "auto",
    temperature: float | None = None,
    sample: Sequence[tuple[Prompt, SamplingParams]] | SampleOf = (),
    prefix_sharing: bool = True,
    prefill_chunk: int | None = None,
    sampling: SamplingParams | str | None = None,
) -> Engine:
    """Builds an engine from model names.

    Args:
        target: The target: a bundled name ("demo-target", "demo-draft", "demo-hybrid"), a folder, a GGUF file, a hub
            id, the folder of a PEFT adapter, a loaded transformers model, or a PeftModel. Objects are given back as
            they were when the engine is closed or garbage collected.
        draft: The draft model, in the same form, or None.
        drafter: Name of the drafter, or "none" to decode plainly. Default: "draft_model" if there is a draft model.
            Without one, "auto" on a CPU, under a rule whose texts do not depend on the drafts; else none. The engine's
            `explain` says which, and why.
        drafter_options: Further arguments of the drafter's constructor.
        rule: Verification rule, by name or as an object.
        num_draft_tokens: Draft tokens per step. None for the drafter's default.
        tokenizer: A transformers tokenizer, or a folder, GGUF file or hub id that has one. Default: the target's.
        vocab_size: Token ids that are generated. Default: the tokenizer's; all rows of the embedding without one.
        dtype: Dtype of the models that are loaded here.
        device: Device of the models that are loaded here.
        device_map: Devices of the target's layers, in place of `device`: "auto", a device, or devices by module.
        adapter: Folder or hub id of a PEFT adapter. Its weights are merged into the target's.
        revision: Branch, tag or commit of the target on the hub.
        trust_remote_code: Run Python code that comes with checkpoints. Without it such a checkpoint is refused.
        model_options: Further arguments of from_pretrained for the target, such as `quantization_config`, `token`,
            `subfolder` or `local_files_only`.
        draft_model_options: Such arguments for the draft model, `revision` and `device_map` included.
        max_rows: Most running requests.
        max_length: Most tokens of a request, prompt included. Default: the model's limit, at most 4,096.
        page_size: Tokens of a cache page.
        num_pages: Pages of the cache. Default: enough for `max_rows` requests of full length.
        compile: Run the forward passes through `torch.compile`, but none that are fused.
        fused_forward: Run the target's passes as one operator, `specdec_kernels.fused_forward`. None does so where
            possible, unless `compile` is set; the target's `why_not_fused` says why not. Forward hooks that are
            registered later are not called. Draft models use it wherever they can, and a small one of half precision is
            loaded in float32 for it.
        weights: "int8" rounds the weights of the target's linear layers to int8 with one scale per output, on a CPU.
            The target is then the quantized model, and decoding is lossless with respect to it. None: as loaded.
        eos_token_ids: Token ids that end a text. Default: the target's.
        budget: Policy for the number of draft nodes, as in `Engine`.
        step_mode: Mode of the steps, as in `Engine`.
        temperature: Temperature of all requests if it is known. Rule `best` chooses by it.
        sample: Typical requests, or a function that makes them from the engine's default parameters. Rule `best`
            generates their first tokens to choose how to draft. Without them it chooses by what holds for every draft.
        prefix_sharing: Requests whose texts begin alike share pages of the cache, as in `Engine`.
        prefill_chunk: Most tokens that a step prefills, as in `Engine`.
        sampling: Sampling parameters of requests without any. "model" follows what the model's generation config sets
            (do_sample, temperature, top_k, top_p, min_p, repetition_penalty, max_new_tokens, ...). None keeps the
            neutral defaults of `SamplingParams`, and logs what the generation config would set.

    Returns:
        The engine.

    Raises:
        ValueError: If something cannot be loaded, or if the parts do not fit together.
    """
    _check_flags(compile=compile, prefix_sharing=prefix_sharing, trust_remote_code=trust_remote_code)
    if fused_forward is not None:
        _check_flags(fused_forward=fused_forward)
    _check_mappings(
        drafter_options=drafter_options, model_options=model_options, draft_model_options=draft_model_options
    )
    if temperature is not None:
        SamplingParams(temperature=temperature)  # checks it
    check_device(device)
    wanted = resolve_dtype(dtype)
    check_sampling(sampling)
    if not isinstance(tokenizer, (str, Path, type(None))):
        check_tokenizer(tokenizer)
    selected, policy = get_rule(rule), budget_for(budget)
    name, options = _check_drafter(drafter, draft is not None, {**(drafter_options or {})}, num_draft_tokens)
    files = ModelOptions(revision, trust_remote_code, device_map, adapter, weights, model_options or {})
    draft_files = ModelOptions(trust_remote_code=trust_remote_code, more=draft_model_options or {})
    files.check(device, dtype=wanted)
    draft_files.check(device, "draft_model_options")
    if draft is None and draft_model_options:
        raise ValueError(f"draft_model_options: got {draft_model_options} and no draft model; expected draft=MODEL")
    with ExitStack() as undo:  # a refused engine leaves models as they were
        found = find_model(target, dtype, device, "model", files, with_tokenizer=tokenizer is None)
        tokenizer = found.tokenizer if tokenizer is None else _find_tokenizer(tokenizer, files)
        if vocab_size is None and tokenizer is not None:
            vocab_size = vocabulary_size(tokenizer)
        shape: dict[str, Any] = {"max_rows": max_rows, "page_size": page_size, "compile": compile}
        sizes: dict[str, Any] = {"max_length": max_length, "num_pages": num_pages, "vocab_size": vocab_size}
        fused = False if compile and fused_forward is None else fused_forward
        ours = found.open("model", fused_forward=fused, **sizes, **shape)
        undo.callback(ours.close)
        if max_length is not None and max_length > ours.max_length:
            log.warning("max_length: got %d; the model's limit is %d, and that is used", max_length, ours.max_length)
        # the target generates no other ids
        ends = [token for token in eos_ids(found.model, tokenizer) if 0 <= token < ours.vocab_size]
        if isinstance(eos_token_ids, int):
            eos_token_ids = [eos_token_ids]
        ids = ends if eos_token_ids is None else eos_token_ids
        defaults = resolve_defaults(sampling, getattr(found.model, "generation_config", None), ids, ours.vocab_size)
        why_rule, why_drafter = None, None
        if drafter is None and draft is None and num_draft_tokens is None:
            reason = _why_not_by_default(ours, selected, temperature, policy, step_mode, compile)
            name = BY_DEFAULT if reason is None else None
            why_drafter = f"none was named, and {reason or 'no draft model was given'}"

        def open_draft() -> HuggingFaceTarget:
            assert draft is not None
            small = find_model(draft, dtype, device, "draft", draft_files)
            if small.model is found.model:
                raise ValueError("draft: got the target itself; expected another model (its cache would be shared)")
            own_vocabulary = options.get("tokenizers", "same") != "same"
            return _open_draft(small, ours, tokenizer, vocab_size, own_vocabulary, shape, undo)

        def estimate(made: Drafter) -> Any:
            requests = sample(defaults) if callable(sample) else sample
            sample_budget = policy if hasattr(policy, "configure_drafter") else "fixed"
            return sample_ways(ours, made, requests, tokenizer, sample_budget) if requests else None

        made, drafts = None, list[HuggingFaceTarget]()
        if name is not None:
            open_next = None if draft is None else open_draft
            build = partial(_build_drafter, name, options, ours, tokenizer, open_next, drafts)
            made, selected, why_rule = _fit_drafter(build, selected, temperature, estimate if sample else None)
            if hasattr(policy, "calibrate"):
                policy.calibrate(ours, getattr(made, "num_draft_tokens", 1))
        given: dict[str, Any] = {"tokenizer": tokenizer, "budget": policy, "step_mode": step_mode}
        given |= {"prefix_sharing": prefix_sharing, "prefill_chunk": prefill_chunk, "default_params": defaults}
        engine = Engine(ours, made, rule=selected, eos_token_ids=ids, temperature=temperature, **given)
        origin = rule_origin(rule) if engine.rule is selected else engine.why_rule  # rule best chooses in the engine
        engine.why_rule, engine.why_drafter = why_rule or origin, why_drafter
        for each in drafts:
            engine.on_close(each.close)
        undo.pop_all()
    return engine


def _check_flags(**flags: Any) -> None:
    """Raises ValueError for a flag that is not a bool: every other value counts as True or False without a word."""
    for name, value in flags.items():
        if not isinstance(value, bool):
            raise ValueError(f"{name}: got {value!r}; expected True or False")


def _check_mappings(**options: Any) -> None:
    """Raises ValueError for options that are neither a mapping nor None."""
    for name, value in options.items():
        if not isinstance(value, Mapping | None):
            raise ValueError(f"{name}: got {value!r}; expected a dict of names and values, or None")


def _check_drafter(
    drafter: str | None, has_draft: bool, options: dict[str, Any], num_draft_tokens: int | None
) -> tuple[str | None, dict[str, Any]]:
    """Returns the name of the drafter, None for none, and its options. It checks them before anything is loaded.

    Raises:
        ValueError: If they do not fit together.
    """
    if drafter is not None and drafter not in (NO_DRAFTER, *drafter_names()):
        raise ValueError(unknown_name("drafter", drafter, drafter_names(), or_else=f", or {NO_DRAFTER}"))
    if drafter == NO_DRAFTER and has_draft:
        raise ValueError(f"draft: got a draft model and drafter {drafter!r}; expected only one of them")
    name = None if drafter == NO_DRAFTER else drafter or ("draft_model" if has_draft else None)
    if name is None and options:
        raise ValueError(f"drafter_options: got {options} and no drafter; expected drafter=NAME, which takes them")
    if name is None and num_draft_tokens:
        raise ValueError(
            f"num_draft_tokens {num_draft_tokens}: got no drafter; pass draft=MODEL, or drafter=NAME, such as auto"
        )
    if num_draft_tokens is not None:
        options["num_draft_tokens"] = num_draft_tokens
    if name is not None:
        check_draft_model(name, has_draft)
        check_option_names(name, options)
        if has_draft and not may_take_draft(name):
            takers = " or ".join(each for each in drafter_names() if may_take_draft(each))
            raise ValueError(f"draft: got a draft model and drafter {name!r}; expected {takers}, or no draft")
    return name, options


def _find_tokenizer(tokenizer: Any, files: ModelOptions) -> Any:
    """Returns a tokenizer that is given as it is, or by a folder, GGUF file or hub id."""
    if not isinstance(tokenizer, (str, Path)):
        return tokenizer
    found = load_tokenizer(tokenizer, files.elsewhere())
    if found is None:
        expected = "expected a folder, GGUF file or hub id that has one"
        raise ValueError(f"tokenizer: got {str(tokenizer)!r}, which has none; {expected}")
    return found


def _open_draft(
    small: FoundModel,
    target: HuggingFaceTarget,
    tokenizer: Any,
    vocab_size: int | None,
    own_vocabulary: bool,
    shape: Mapping[str, Any],
    undo: ExitStack,
) -> HuggingFaceTarget:
    """Opens a draft model for a target.

    Args:
        small: The draft model.
        target: The target.
        tokenizer: Tokenizer of the target, or None.
        vocab_size: Size of its vocabulary, or None.
        own_vocabulary: Whether the draft model may have another tokenizer.
        shape: Further arguments of the target, which both models share.
        undo: Closes the draft model if the engine is refused.

    Returns:
        The draft model.

    Raises:
        ValueError: If the models do not fit together.
    """
    if not small.is_given:
        widen_small_model(small.model)
    if not own_vocabulary:
        check_same_tokenizer(tokenizer, small.tokenizer, target.vocab_size)
    elif small.tokenizer is not None:
        vocab_size = vocabulary_size(small.tokenizer)
    opened = small.open("draft", max_length=target.max_length, vocab_size=vocab_size, fused_forward=None, **shape)
    undo.callback(opened.close)
    if opened.max_length < target.max_length:
        log.warning(
            "draft: its context is %d, the engine's %d; longer texts are decoded without drafts",
            opened.max_length,
            target.max_length,
        )
    opened.tokenizer = small.tokenizer
    return opened


def _build_drafter(
    name: str,
    options: Mapping[str, Any],
    target: HuggingFaceTarget,
    tokenizer: Any,
    open_draft: Callable[[], HuggingFaceTarget] | None,
    drafts: list[HuggingFaceTarget],
    prefers: str,
) -> Drafter:
    """Builds a drafter. It takes `drafts`, in the order of opening, before it opens further draft models."""
    numbers = count()

    def next_draft() -> HuggingFaceTarget:
        at = next(numbers)
        if at == len(drafts):
            assert open_draft is not None
            drafts.append(open_draft())
        return drafts[at]

    take = None if open_draft is None else next_draft
    return make_drafter(name, options, target=target, tokenizer=tokenizer, draft=take, prefers=prefers)


def _fit_drafter(
    build: Callable[[str], Drafter],
    rule: Rule,
    temperature: float | None,
    estimate: Callable[[Drafter], Any] | None,
) -> tuple[Drafter, Rule, str | None]:
    """Builds the drafter that picks tokens as the rule prefers. Rule `best` chooses by a sample of requests.

    Args:
        build: Builds a drafter that picks tokens in a given way.
        rule: The verification rule.
        temperature: Temperature of all requests if it is known.
        estimate: Measures ways to draft on a sample, or returns None for an empty one. None if there is no sample.

    Returns:
        The drafter, the rule, and why it verifies if a sample decided.
    """
    prefers = getattr(rule, "prefers", "coupled")
    made = build(prefers)
    preferred = getattr(rule_for(rule, made.needs, temperature, made.name)[0], "prefers", prefers)
    choose: Any = getattr(rule, "choose_rule", None)
    undecided = choose is not None and made.needs.dists and temperature != 0 and estimate is not None
    if undecided and not build("greedy").needs.dists:  # the options do not fix how tokens are picked
        assert estimate is not None
        estimates = estimate(made)
        if estimates is not None:
            rule, why, preferred = choose(made.needs, temperature, estimates)
            return build(preferred), rule, why  # a fresh drafter, which has not seen the sample
    return made if preferred == prefers else build(preferred), rule, None


def _why_not_by_default(
    target: HuggingFaceTarget,
    rule: Rule,
    temperature: float | None,
    budget: BudgetPolicy,
    step_mode: str,
    compile: bool,
) -> str | None:
    """Returns why a target decodes plainly if no drafter is named. None if it drafts with `auto`.

    Drafts by default must not change the text, and must pay off. That was measured for steps on a CPU.
    """
    needs = get_drafter(BY_DEFAULT).needs
    if (ranks := getattr(target, "ranks", None)) is not None:
        return f"{BY_DEFAULT} follows measured times, and {ranks.size} processes compute the model"
    if target.device.type != "cpu":
        return f"{BY_DEFAULT} is the default on a CPU only: its steps are not captured as CUDA graphs"
    if compile or step_mode == "graph":
        return f"the passes of {BY_DEFAULT} differ in size, so they are neither compiled nor captured"
    if budget.name != "fixed":
        return f"{BY_DEFAULT} chooses the number of nodes itself, which the budget {budget.name} does too"
    try:
        chosen, _ = rule_for(rule, needs, temperature)
    except ValueError:
        return f"rule {rule.name} cannot verify the drafts of {BY_DEFAULT}"
    return None if getattr(chosen, "replays", False) else f"texts depend on the drafts under rule {chosen.name}"
