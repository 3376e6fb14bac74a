"""Builds an engine from command-line options, with quiet loading and one-line warnings."""

from __future__ import annotations

import logging
import sys
import threading
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specdec_fast.commands.warning_lines import WarningLines
from specdec_fast.commands.word_wrap import wrap_words

if TYPE_CHECKING:
    import typer

    from specdec_fast.engine.engine import Engine

BUNDLED_TARGET, BUNDLED_HYBRID, BUNDLED_DRAFT = "demo-target", "demo-hybrid", "demo-draft"
_PATIENCE = 2.0
"""Seconds of loading after which a terminal shows a note."""
_LARGE_FILE = 2**26
"""Bytes of a GGUF file that takes seconds to load."""


@dataclass(frozen=True, slots=True)
class Setup:
    """Models, drafter and options of an engine. `drafter` None is the default of `load`, and "none" plain decoding."""

    model: str
    draft: str | None
    drafter: str | None
    rule: str
    draft_tokens: int | None
    dtype: str
    device: str
    compile: bool
    fused_forward: bool | None = None
    drafter_options: Mapping[str, Any] = field(default_factory=dict)
    budget: str = "fixed"
    adapter: str | None = None
    revision: str | None = None
    trust_remote_code: bool = False
    device_map: Any = None
    weights: str | None = None

    def describe(self, engine: Engine | None = None) -> dict[str, Any]:
        """Describes the setup as JSON values.

        Args:
            engine: The engine, which knows what is in use where an option was left out. None before it is built.

        Returns:
            The setup.
        """
        from specdec_fast.engine.explanation import is_fused
        from specdec_fast.rules import get_rule

        named = None if self.drafter == "none" else self.drafter
        rule = get_rule(self.rule) if engine is None else engine.rule
        drafter = None if engine is None else engine.drafter
        return {
            "model": self.model,
            "draft": self.draft,
            "drafter": named if drafter is None else drafter.name,
            "drafter_options": dict(self.drafter_options),
            "budget": self.budget,
            "rule": rule.name,
            "lossless": rule.lossless,
            "dtype": self.dtype,
            "device": self.device,
            "compile": self.compile,
            "fused_forward": self.fused_forward if engine is None else is_fused(engine.target),
            "adapter": self.adapter,
            "revision": self.revision,
            "device_map": self.device_map,
            "weights": self.weights,
        }


def resolve_options(ctx: typer.Context) -> Setup:
    """Resolves the options of a command that declares all options of `resolve`, under the same names."""
    return resolve(**{name: ctx.params[name] for name in signature(resolve).parameters})


def resolve(
    *,
    model: str,
    draft: str | None,
    drafter: str | None,
    rule: str,
    draft_tokens: int | None,
    dtype: str,
    device: str,
    compile: bool,
    fused_forward: bool | None = None,
    drafter_option: list[str] | None = None,
    budget: str = "fixed",
    adapter: str | None = None,
    revision: str | None = None,
    trust_remote_code: bool = False,
    device_map: str | None = None,
    weights: str | None = None,
) -> Setup:
    """Resolves options: selects the drafter, and the bundled draft model for the bundled target.

    Args:
        model: Option `--model`.
        draft: Option `--draft`.
        drafter: Option `--drafter`.
        rule: Option `--rule`.
        draft_tokens: Option `--draft-tokens`; 0 is plain decoding.
        dtype: Option `--dtype`.
        device: Option `--device`.
        compile: Option `--compile`.
        fused_forward: Option `--fused-forward`; None where it is possible.
        drafter_option: Options `--drafter-option`.
        budget: Option `--budget`.
        adapter: Option `--adapter`.
        revision: Option `--revision`.
        trust_remote_code: Option `--trust-remote-code`.
        device_map: Option `--device-map`.
        weights: Option `--weights`.

    Returns:
        The setup.

    Raises:
        ValueError: If a name is unknown, or if options contradict each other.
    """
    from specdec_fast.adaptive.budget import budget_for
    from specdec_fast.commands.options import read_device_map, read_drafter_options
    from specdec_fast.drafters import NO_DRAFTER, check_option_names, drafter_names, may_take_draft
    from specdec_fast.rules import get_rule
    from specdec_kernels.unknown_names import unknown_name

    get_rule(rule)  # unknown names are refused before anything is loaded
    budget_for(budget)
    if draft == NO_DRAFTER:
        raise ValueError(f"--draft: got {draft!r}; expected a model; --drafter {NO_DRAFTER} decodes plainly")
    if drafter is not None and drafter not in (NO_DRAFTER, *drafter_names()):
        raise ValueError(unknown_name("--drafter", drafter, drafter_names(), or_else=f", or {NO_DRAFTER}"))
    takes = drafter is None or (drafter != NO_DRAFTER and may_take_draft(drafter))
    if draft is not None and not takes:
        raise ValueError(f"--draft {draft} with --drafter {drafter}: expected only one of them")
    if draft_tokens is not None and draft_tokens < 0:
        raise ValueError(f"--draft-tokens: got {draft_tokens}; expected 0 (plain decoding) or more")
    if model in (BUNDLED_TARGET, BUNDLED_HYBRID) and draft is None and takes:
        draft = BUNDLED_DRAFT
    if drafter is None and draft is not None:
        drafter = "draft_model"
    if draft_tokens and drafter in (None, NO_DRAFTER):
        raise ValueError(f"--draft-tokens {draft_tokens}: got no drafter; pass --draft MODEL or --drafter NAME")
    parsed = read_drafter_options(drafter_option)
    if parsed and drafter in (None, NO_DRAFTER):
        raise ValueError(f"--drafter-option {next(iter(parsed))}: got no drafter; pass --drafter NAME")
    if parsed and drafter is not None:
        check_option_names(drafter, parsed)
    if draft_tokens == 0 or drafter == NO_DRAFTER:
        draft, drafter, parsed = None, NO_DRAFTER, {}
    return Setup(
        model,
        draft,
        drafter,
        rule,
        draft_tokens or None,
        dtype,
        device,
        compile,
        fused_forward,
        parsed,
        budget,
        adapter=adapter,
        revision=revision,
        trust_remote_code=trust_remote_code,
        device_map=read_device_map(device_map),
        weights=weights,
    )


def open_engine(
    setup: Setup,
    *,
    threads: int | None,
    max_rows: int,
    max_length: int | None = None,
    prefill_chunk: int | None = None,
    temperature: float | None = None,
    sample: Any = (),
    sampling: str | None = "neutral",
    chats: bool = False,
) -> Engine:
    """Sets the number of threads and loads the engine of a setup.

    Args:
        setup: The setup.
        threads: Number of CPU threads. None: PyTorch's default.
        max_rows: Most running requests.
        max_length: Most tokens of a request. None: the default of `load`.
        prefill_chunk: Most tokens that a step prefills. None: the default of `load`.
        temperature: Temperature of all requests, None if they differ.
        sample: Requests by which rule `best` chooses, as `load` takes them.
        sampling: Option `--sampling`: "model", "neutral", or None, which is neutral and notes what the model sets.
        chats: Whether the model needs a chat template of its own.

    Returns:
        The engine.

    Raises:
        ValueError: If something cannot be loaded, or if the parts do not fit together.
    """
    import torch

    from specdec_fast.loading import check_device, lacks_tokenizer, load
    from specdec_fast.sampling.params import SamplingParams
    from specdec_kernels.unknown_names import unknown_name

    if sampling not in (None, "model", "neutral"):
        raise ValueError(unknown_name("--sampling", sampling, ("model", "neutral")))
    if threads is not None:
        if threads < 1:
            raise ValueError(f"--threads: got {threads}; expected at least 1")
        torch.set_num_threads(threads)
    if max_length is not None and max_length < 2:
        raise ValueError(f"--max-length: got {max_length}; expected at least 2, one token of prompt and one of text")
    check_device(setup.device, "--device")
    if chats:
        _check_template(setup)
    note_hub(setup.model, setup.draft, setup.adapter)
    _note_conversion(setup.model, setup.dtype)
    with note_if_slow(f"loading {setup.model}"):
        engine = load(
            setup.model,
            setup.draft,
            drafter=setup.drafter,
            drafter_options=setup.drafter_options,
            rule=setup.rule,
            num_draft_tokens=setup.draft_tokens,
            dtype=setup.dtype,
            device=setup.device,
            device_map=setup.device_map,
            weights=setup.weights,
            adapter=setup.adapter,
            revision=setup.revision,
            trust_remote_code=setup.trust_remote_code,
            max_rows=max_rows,
            max_length=max_length,
            prefill_chunk=prefill_chunk,
            compile=setup.compile,
            fused_forward=setup.fused_forward,
            budget=setup.budget,
            temperature=temperature,
            sample=sample,
            sampling="model" if sampling == "model" else SamplingParams(),
        )
    if sampling is None:
        note_unfollowed_settings(engine)
    if setup.draft is not None and engine.tokenizer is not None and lacks_tokenizer(setup.draft):
        print_note(f"--draft {setup.draft} has no tokenizer; the target's is assumed")
    if setup.rule != engine.rule.name:
        print_note(f"rule {setup.rule} is {engine.rule.name} here: {engine.why_rule}")
    return engine


def _check_template(setup: Setup) -> None:
    """Raises ValueError if the model is known to have no chat template. Its weights are not read."""
    from specdec_fast.loading import lacks_chat_template
    from specdec_fast.loading.model_options import ModelOptions

    options = ModelOptions(trust_remote_code=setup.trust_remote_code)
    if setup.adapter is None and lacks_chat_template(setup.model, options):
        raise no_template(setup.model)


def no_template(model: str) -> ValueError:
    """Returns the error for a chat with a model that has no chat template."""
    return ValueError(
        f"--model: got {model!r}, which has no chat template; expected an instruct model; pass another --model, or "
        "--chat-template FILE, or use `specdec generate`, which continues text"
    )


def note_unfollowed_settings(engine: Engine) -> None:
    """Prints what the model's generation config would change, since requests do not follow it."""
    from specdec_fast.loading.sampling_defaults import unfollowed_settings

    model: Any = getattr(engine.target, "model", None)
    settings = unfollowed_settings(getattr(model, "generation_config", None))
    if settings:
        print_note(
            f"the model's generation_config sets {settings}, which is not used; --sampling model follows it, and "
            "--sampling neutral drops this note"
        )


def print_note(words: str) -> None:
    """Prints a note to standard error."""
    print(wrap_words(f"specdec: note: {words}", sys.stderr), file=sys.stderr)


@contextmanager
def note_if_slow(words: str) -> Iterator[None]:
    """Prints a note if a block takes longer than a reader waits in silence. Only a terminal shows it."""
    timer = threading.Timer(_PATIENCE, print_note, (words,))
    timer.daemon = True
    if sys.stderr is not None and sys.stderr.isatty():
        timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _note_conversion(model: str, dtype: str) -> None:
    """Prints that the weights of a large GGUF file are converted, which takes long without any other output."""
    from specdec_fast.loading.gguf_reader import check_gguf
    from specdec_fast.loading.model_sources import resolve_source

    source = resolve_source(model)
    if source.gguf_file is not None and source.is_local:
        path = Path(source.place) / source.gguf_file
        check_gguf(path, "--model")
        size = path.stat().st_size
        if size >= _LARGE_FILE:
            print_note(
                f"converting {source.gguf_file} ({size / 1e6:.0f} MB) to {dtype}; a folder of safetensors loads faster"
            )


def note_hub(*names: str | None) -> None:
    """Prints which models are looked up on the hub, since a timeout may take long."""
    from specdec_fast.loading import is_hub_id

    far = [name for name in names if name is not None and is_hub_id(name)]
    if far:
        print_note(f"looking for {' and '.join(far)} on the hub; without a connection it is tried again for a minute")


def short_context(engine: Engine, before: int, most: int) -> str | None:
    """Returns a note if the context ends before `most` tokens can follow `before`, or None."""
    from specdec_fast.commands.terminal_output import counted

    limit = engine.state.max_length
    if before + most <= limit:
        return None
    prompt = f"a prompt of {counted(before, 'token')}"
    return f"--max-new-tokens {most} after {prompt}: the context of {limit} ends the text before"


def quiet() -> None:
    """Silences libraries, prints warnings as one line, and replaces characters that the output cannot encode."""
    from specdec_fast.loading.quiet_libraries import quiet_libraries

    quiet_libraries()
    ours = logging.getLogger("specdec_fast")
    if not any(isinstance(handler, WarningLines) for handler in ours.handlers):
        ours.addHandler(WarningLines())
    warnings.showwarning = _one_line
    for stream in (sys.stdout, sys.stderr):
        reconfigure = getattr(stream, "reconfigure", None)
        if reconfigure is not None:
            reconfigure(errors="replace")


_PRINTED_REASONS: set[str] = set()
"""Printed reasons for a missing extension, so that one line serves all operators."""


def _one_line(message: Warning | str, *_: Any, **__: Any) -> None:
    from specdec_kernels import FallbackWarning
    from specdec_kernels.dispatch import extension

    words = str(message)
    why = extension.unavailable_reason() if isinstance(message, FallbackWarning) else None
    if why is not None and why in words:
        if why in _PRINTED_REASONS:
            return
        _PRINTED_REASONS.add(why)
        words = f"operators run on their slow PyTorch references: {why}; `specdec info` lists them"
    print(wrap_words(f"specdec: warning: {words}", sys.stderr), file=sys.stderr)


def versions() -> dict[str, str | None]:
    """Returns the versions that a result depends on; None for packages that are not installed."""
    found: dict[str, str | None] = {"python": sys.version.split()[0]}
    for package in ("specdec-fast", "torch", "transformers", "triton"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = None
    return found
