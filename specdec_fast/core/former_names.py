"""Former names, and the names of other engines, each with the name that it has here.

The tables are data, so a search for a renamed thing ends in this file. Messages about unknown names are made by
`specdec_kernels.unknown_names`.
Tests: tests/core/test_former_names.py.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from functools import wraps
from typing import Any, TypeVar

RENAMED_RULES = {"token": "rejection", "tree": "recursive_rejection", "ordered": "recursive_rejection"}
"""Former name -> name of each verification rule that was renamed."""

RENAMED_PICKS = {"drawn": "sampled", "chosen": "deterministic"}
"""Former name -> name of the values of drafters' option `pick` and of `specdec lab --pick`."""

RENAMED_ARGUMENTS = {"whole_pass": "fused_forward"}
"""Former name -> name of each argument, and option of the command line, that was renamed."""

RENAMED_EXPORTS = {"Laws": "TokenDistributions", "Drawn": "ProposalKind"}
"""Former name -> name of what `specdec_fast` exports."""

FOREIGN_ARGUMENTS = {
    "SamplingParams": {
        "max_tokens": "max_new_tokens",
        "min_tokens": "min_new_tokens",
        "stop_strings": "stop",
        "bad_words_ids": "bad_words",
        "suppress_tokens": "banned_token_ids",
        "logits_processor": "logits_processors",
        "n": "pass the prompt n times to generate, each time with another seed",
        "num_return_sequences": "pass the prompt that often to generate, each time with another seed",
        "best_of": "pass the prompt that often to generate and choose among the texts",
        "do_sample": "set temperature: 0 decodes greedily, numbers above 0 sample",
        "num_beams": "there is no beam search; pass the prompt several times with other seeds, and choose",
        "use_beam_search": "there is no beam search; pass the prompt several times with other seeds, and choose",
        "early_stopping": "there is no beam search, so leave it out",
        "length_penalty": "there is no beam search, so leave it out",
        "diversity_penalty": "there is no beam search, so leave it out",
        "typical_p": "it is not supported; use min_p or top_p",
        "epsilon_cutoff": "it is not supported; use min_p",
        "eta_cutoff": "it is not supported; use min_p",
        "penalty_alpha": "it is not supported; use no_repeat_ngram_size or a penalty",
        "sequence_bias": "set logit_bias, which takes single tokens",
        "force_words_ids": "it is not supported; constrain the text by grammar",
        "encoder_no_repeat_ngram_size": "it is not supported; use no_repeat_ngram_size, which counts the prompt",
        "guided_decoding": "grammar",
        "structured_outputs": "grammar",
        "guided_json": "pass grammar=make_grammar('json_schema', ...) of specdec_fast.integrations.grammars",
        "guided_regex": "pass grammar=make_grammar('regex', ...) of specdec_fast.integrations.grammars",
        "guided_choice": "pass grammar=make_grammar('choice', ...) of specdec_fast.integrations.grammars",
        "guided_grammar": "pass grammar=make_grammar('ebnf', ...) of specdec_fast.integrations.grammars",
        "response_format": "pass grammar=make_grammar('json_schema', ...) of specdec_fast.integrations.grammars",
        "max_length": "set max_new_tokens, which does not count the prompt",
        "min_length": "set min_new_tokens, which does not count the prompt",
        "max_time": "it is not supported; call cancel of the engine when the time is over",
        "eos_token_id": "stop_token_ids",
        "truncate_prompt_tokens": "it is not supported; shorten the prompt before",
        "detokenize": "leave it out: texts are made when they are read",
        "output_kind": "leave it out: generate returns whole texts, and stream their parts",
        "output_scores": "set logprobs",
        "use_cache": "leave it out: the engine always has a cache",
    },
    "Engine.generate": {
        "sampling_params": "params",
        "generation_config": "params",
        "prompt_token_ids": "prompts",
        "input_ids": "prompts",
        "inputs": "prompts",
    },
    "Draft.trees": {
        "drawn": "kinds",
        "proposal_kinds": "kinds",
        "laws": "dists",
        "distributions": "dists",
        "dist_index": "dist_rows",
    },
    "verify": {
        "draft_token_ids": "draft_tokens",
        "target_logits": "logits",
        "generators": "seeds",
        "cu_num_draft_tokens": "call verify_packed, which takes flat draft_token_ids",
    },
    "Engine.encode_chat": {"conversation": "messages", "chat_template_kwargs": "template_options"},
    "load": {
        "model": "target",
        "draft_model": "draft",
        "speculative_model": "draft",
        "assistant_model": "draft",
        "speculative_config": "pass draft, drafter and num_draft_tokens to load",
        "num_speculative_tokens": "num_draft_tokens",
        "num_assistant_tokens": "num_draft_tokens",
        "prompt_lookup_num_tokens": "pass drafter='ngram' and num_draft_tokens to load",
        "max_model_len": "max_length",
        "max_num_seqs": "max_rows",
        "block_size": "page_size",
        "enforce_eager": "pass step_mode='sync' to load",
        "torch_dtype": "dtype",
        "gguf_file": "name the .gguf file as the target",
        "attn_implementation": "leave it out: the engine has an attention of its own",
        "quantization": "pass model_options={'quantization_config': ...} to load",
        "quantization_config": "pass model_options={'quantization_config': ...} to load",
        "load_in_8bit": "pass model_options={'quantization_config': ...} to load",
        "load_in_4bit": "pass model_options={'quantization_config': ...} to load",
        "token": "pass model_options={'token': ...} to load",
        "subfolder": "pass model_options={'subfolder': ...} to load",
        "cache_dir": "pass model_options={'cache_dir': ...} to load",
        "local_files_only": "pass model_options={'local_files_only': True} to load",
        "model_kwargs": "model_options",
        "peft_model_id": "adapter",
        "lora_path": "adapter",
        "enable_lora": "pass adapter, a folder or hub id, to load",
    },
}
"""Where an argument belongs here -> argument of vLLM or transformers -> what takes its place."""

ACCEPTED_PARAMETERS = {
    "max_tokens": (),
    "min_tokens": (),
    "stop_strings": (),
    "bad_words_ids": (),
    "suppress_tokens": (),
    "n": (1,),
    "num_return_sequences": (1,),
    "best_of": (1,),
    "do_sample": (True,),
    "num_beams": (1,),
    "use_beam_search": (False,),
    "early_stopping": (False,),
    "length_penalty": (1.0,),
    "diversity_penalty": (0.0,),
    "typical_p": (1.0,),
    "epsilon_cutoff": (0.0,),
    "eta_cutoff": (0.0,),
    "penalty_alpha": (0.0,),
    "encoder_no_repeat_ngram_size": (0,),
    "detokenize": (True,),
    "use_cache": (True,),
    "output_scores": (False,),
}  # fmt: skip
"""Foreign parameter that `SamplingParams` accepts -> the values that ask for nothing; () if it is another name only.

None asks for nothing in every foreign parameter."""

FOREIGN_ATTRIBUTES = {
    "add_request": "submit",
    "abort_request": "cancel",
    "has_unfinished_requests": "idle, which is true when no request is left",
    "get_num_unfinished_requests": "num_running and num_queued",
}
"""Attribute of vLLM's engines -> what takes its place on `Engine`."""

FOREIGN_EXPORTS = {
    "LLM": "Engine; load(...) makes one",
    "LLMEngine": "Engine; load(...) makes one",
    "AsyncLLMEngine": "Engine; load(...) makes one, which threads may share",
    "EngineArgs": "load, which takes these as arguments",
    "GenerationConfig": "SamplingParams",
}
"""What vLLM or transformers export -> what takes its place in `specdec_fast`."""

_Called = TypeVar("_Called", bound=Callable[..., Any])
_Object = TypeVar("_Object")


def argument_hint(name: str, place: str, known: Iterable[str]) -> str:
    """Returns "; " and what to pass in place of an argument that does not exist, or "".

    Args:
        name: The argument that was passed.
        place: The callable, as a user writes it: "SamplingParams", "load", "Engine.submit".
        known: Arguments that exist there.
    """
    from specdec_kernels.unknown_names import hint  # here, for it loads torch, and the program reads the tables without

    known = list(known)
    if name in RENAMED_ARGUMENTS:
        return hint(name, known, RENAMED_ARGUMENTS)
    homes = [place, *FOREIGN_ARGUMENTS]  # the place itself first
    home = next((home for home in homes if name in FOREIGN_ARGUMENTS.get(home, ())), None)
    if home is None:
        return hint(name, known)
    ours = FOREIGN_ARGUMENTS[home][name]
    words = f"; specdec-fast calls this {ours}" if ours.isidentifier() else f"; {ours}"
    if home == "SamplingParams" and "params" in known:
        return f"{words}; pass params=SamplingParams(...)"
    return f"{words}, an argument of {home}" if ours.isidentifier() and ours not in known else words


def _better(error: TypeError, place: str, signature: inspect.Signature, given: Iterable[str], params: Any) -> TypeError:
    """The error with a hint for the first argument that does not exist; the error itself where all do."""
    if any(each.kind is each.VAR_KEYWORD for each in signature.parameters.values()):
        return error  # the method that takes these arguments has explained it
    known = [name for name in signature.parameters if name != "self"]
    unknown = next((name for name in given if name not in known), None)
    if unknown is None:
        return error
    words = argument_hint(unknown, place, known)
    if params is not None and unknown in inspect.signature(params).parameters:
        words = f"; pass params={params.__name__}({unknown}=...)"
    return TypeError(f"{place}() got an unexpected keyword argument {unknown!r}{words}")


def explain_arguments(params: type | None = None, place: str | None = None) -> Callable[[_Called], _Called]:
    """Decorates a function: an unexpected keyword argument raises a TypeError that says what to pass instead.

    Args:
        params: Class of the function's argument `params`; its own arguments are hinted at too.
        place: The callable, as a user writes it. None: its qualified name.

    Returns:
        The decorator.
    """

    def decorate(call: _Called) -> _Called:
        @wraps(call)
        def explained(*args: Any, **kwargs: Any) -> Any:
            try:
                return call(*args, **kwargs)
            except TypeError as error:
                better = _better(error, name, inspect.signature(call), kwargs, params)
                if better is error:
                    raise
                raise better from None

        name = place or call.__qualname__
        return explained  # type: ignore[return-value]

    return decorate


def explain_names(
    *methods: str, params: type | None = None, attributes: bool = False
) -> Callable[[type[_Object]], type[_Object]]:
    """Decorates a class: wrong names of arguments, and of attributes, raise errors that say what to use instead.

    Args:
        methods: Methods that get `explain_arguments`, besides the constructor.
        params: Class of these methods' argument `params`.
        attributes: Whether attributes that do not exist are explained too.

    Returns:
        The decorator.
    """

    def explained(self: Any, name: str) -> Any:
        if name.startswith("__") or hasattr(type(self), name):  # a property raised: its own error is the one to see
            return object.__getattribute__(self, name)
        raise missing_attribute(f"{type(self).__name__!r} object", name, dir(self))

    def decorate(cls: type[_Object]) -> type[_Object]:
        for method in ("__init__", *methods):
            place = cls.__name__ if method == "__init__" else f"{cls.__name__}.{method}"
            explain = explain_arguments(params if method in methods else None, place)
            setattr(cls, method, explain(getattr(cls, method)))
        if attributes:
            cls.__getattr__ = explained  # type: ignore[attr-defined]
        return cls

    return decorate


def missing_attribute(owner: str, name: str, known: Iterable[str]) -> AttributeError:
    """Returns the error for an attribute that does not exist, with a hint where there is one.

    Args:
        owner: What was asked for it: "'Engine' object", "module 'specdec_fast'".
        name: The attribute.
        known: Attributes that exist.
    """
    from specdec_kernels.unknown_names import hint

    theirs = FOREIGN_EXPORTS if owner.startswith("module") else FOREIGN_ATTRIBUTES
    if name in theirs:
        words = f"; specdec-fast calls this {theirs[name]}"
    else:
        words = "" if name.startswith("_") else hint(name, known, RENAMED_EXPORTS)
    return AttributeError(f"{owner} has no attribute {name!r}{words}")


def accept_foreign_parameters(cls: type[_Object]) -> type[_Object]:
    """Decorates `SamplingParams`: names of other engines that mean the same, or ask for nothing, are accepted."""
    create, table = cls.__init__, FOREIGN_ARGUMENTS["SamplingParams"]

    @wraps(create)
    def accepting(self: Any, *args: Any, **kwargs: Any) -> None:
        for name in [each for each in kwargs if each in table]:
            asks_nothing = kwargs[name] is None or kwargs[name] in ACCEPTED_PARAMETERS.get(name, ())
            if asks_nothing:
                del kwargs[name]
            elif ACCEPTED_PARAMETERS.get(name) == ():
                if table[name] in kwargs:
                    raise TypeError(f"{cls.__name__}() got both {name!r} and {table[name]!r}, which mean the same")
                kwargs[table[name]] = kwargs.pop(name)
        create(self, *args, **kwargs)

    setattr(cls, "__init__", accepting)  # noqa: B010  (a type checker allows no assignment)
    return cls
