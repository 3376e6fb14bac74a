"""The folder `custom_generate/` with which a repository of the hub brings its own `generate`.

transformers runs `custom_generate/generate.py` with `trust_remote_code=True`. Ours attaches an engine to the model at
the first call.

Tests: tests/integrations/transformers/test_hub_folder.py, tests/integrations/transformers/test_serve.py.
"""

from __future__ import annotations

import ast
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from specdec_fast.integrations.transformers.attachment import TRANSFORMERS, build_attachment, find_attachment
from specdec_fast.rules import DEFAULT

TEMPLATE = Path(__file__).parent / "custom_generate"
_LINE = "OPTIONS: dict[str, Any] = {}"
_attaching = threading.Lock()


def write_custom_generate(folder: str | Path, **options: Any) -> Path:
    """Writes `custom_generate/` into the folder of a model, so that it generates speculatively.

    Load the model with `AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)`, serve it with
    `transformers serve --trust-remote-code`, or pass `custom_generate=folder` to `generate`. Files are replaced.

    Args:
        folder: Folder of a model, or any other.
        **options: Arguments of `attach` that are plain values: draft (a hub id or an absolute path), drafter, rule,
            num_draft_tokens, ... `fallback` is "transformers" unless it is given.

    Returns:
        The folder `custom_generate`.

    Raises:
        ValueError: If an option is no plain value.
    """
    given = {name: str(value) if isinstance(value, Path) else value for name, value in options.items()}
    try:
        plain = ast.literal_eval(repr(given)) == given
    except (ValueError, SyntaxError):
        plain = False
    if not plain:
        raise ValueError(f"options: got {given!r:.120}; expected numbers, texts, lists and dicts; pass names of models")
    target = Path(folder) / TEMPLATE.name
    target.mkdir(parents=True, exist_ok=True)
    program = (TEMPLATE / "generate.py").read_text(encoding="utf-8")
    (target / "generate.py").write_text(program.replace(_LINE, _LINE.replace("{}", repr(given))), encoding="utf-8")
    requirements = (TEMPLATE / "requirements.txt").read_text(encoding="utf-8")
    (target / "requirements.txt").write_text(requirements, encoding="utf-8")
    return target


def generate_attached(model: Any, options: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
    """Generates with an engine that is attached to a model at the first call. `custom_generate/generate.py` calls it.

    `detach(model)` ends the engine.

    Args:
        model: A transformers model, attached or not.
        options: Arguments of `attach` for a model that is not. `fallback` is "transformers" unless it is given.
        *args: Arguments of `generate`.
        **kwargs: Arguments of `generate`.

    Returns:
        What `generate` returns.

    Raises:
        ValueError: If the model cannot be attached.
    """
    with _attaching:
        found = find_attachment(model)
        if found is None:
            rest = dict(options)
            draft, drafter, rule = rest.pop("draft", None), rest.pop("drafter", None), rest.pop("rule", DEFAULT)
            fallback, tokenizer = rest.pop("fallback", TRANSFORMERS), rest.pop("tokenizer", None)
            checks = rest.pop("check_processors", True)
            found = build_attachment(model, draft, drafter, rule, fallback, tokenizer, checks, rest)
    return found(*args, **kwargs)
