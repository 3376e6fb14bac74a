"""`specdec drafters`: all drafters with their needs, their kind of proposals and their options."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from specdec_fast.commands import options
from specdec_fast.commands.json_output import print_json

_TERMS = {
    "chains, trees": "the shape of the drafts",
    "draft model": "a smaller model, named by --draft",
    "auxiliary hidden states": "hidden states of the target: entering:3 is the input of layer 3, "
    "final_norm that of the projection to logits",
    "all prompt states": "these states of every prompt token, also of those that an earlier request has stored",
    "host tokens": "reads the text so far, so its steps are never CUDA graphs",
    "own cache": "keeps keys and values of its own",
    "partial layers": "runs some layers of the target",
    "node choices": "the target's choice after every draft token",
    "logits": "the target's logits of the last step",
    "partial dists": "its distributions cover a part of the vocabulary",
    "excludes siblings": "samples without the deterministic tokens at the same place",
    "follows clock": "decisions depend on measured times, so several processes cannot share it",
    "cross request": "a draft may depend on the texts of other requests",
}
"""Meanings of what `needed` returns."""

_LEGEND = (
    "deterministic: the tokens follow from the text, or, under replay, from the target's noise",
    "sampled: the tokens come from a distribution, which rules such as rejection and recursive_rejection test against",
    "num_draft_tokens=None: as many as the drafter's other options, or its heads, give; --draft-tokens sets it",
)


def drafters(as_json: options.Json = False) -> None:
    """List all drafters with their requirements, their default options and a short description."""
    found = collect()
    if as_json:
        print_json(found, default=str)
        return
    _print(found)


def collect() -> list[dict[str, Any]]:
    """Returns the content of `specdec drafters` as JSON values; drafters that cannot be loaded have an `error`."""
    from specdec_fast.drafters import drafter_names

    return [_describe(name) for name in drafter_names()]


def _describe(name: str) -> dict[str, Any]:
    from specdec_fast.drafters import drafter_options, get_drafter
    from specdec_fast.rules import DEFAULT, get_rule

    try:
        kind = get_drafter(name)
        module = __import__(kind.__module__, fromlist=["__doc__"])
        defaults = {option: each.default for option, each in drafter_options(name).items()}
        if hasattr(kind, "by_rule"):
            defaults |= kind.by_rule(get_rule(DEFAULT).prefers)
    except Exception as error:  # a broken drafter of another package must not hide the others
        return {"name": name, "error": f"{type(error).__name__}: {error}"}
    needs = getattr(kind, "needs", None)
    words = (module.__doc__ or kind.__doc__ or "").strip().splitlines()
    return {
        "name": name,
        "line": words[0] if words else "",
        "takes_draft": bool(getattr(kind, "takes_draft", False)),
        "needs": None if needs is None else asdict(needs),
        "dist": _dist(kind, needs),
        "defaults": defaults,
        "module": kind.__module__,
    }


def _dist(kind: Any, needs: Any) -> str:
    """Describes the proposals: deterministic ones are point masses, sampled ones carry their distribution."""
    if needs is not None and needs.dists:
        return "sampled"
    return "deterministic, or sampled by option" if getattr(kind, "draws", False) else "deterministic"


def needed(entry: dict[str, Any]) -> str:
    """Describes a drafter's needs: the topology of its drafts, then data from the engine."""
    found = ["draft model"] if entry["takes_draft"] else []
    needs = dict(entry["needs"] or {})
    if not (needs.get("aux_hidden_states") or needs.get("prompt_aux_hidden_states")):
        needs.pop("all_prompt_states", None)  # it qualifies these states
    for name, value in needs.items():
        if name == "topology":
            found.insert(0, f"{value}s")
        elif name == "aux_hidden_states" and value:
            found.append(f"auxiliary hidden states {', '.join(value)}")
        elif value is True and name != "dists":
            found.append(name.replace("_", " "))
    return ", ".join(found)


def _print(found: list[dict[str, Any]]) -> None:
    from rich.text import Text

    from specdec_fast.commands.terminal_output import make_console
    from specdec_fast.commands.word_wrap import wrap_words

    out = make_console()

    def line(words: str, *, indent: int, bold: int = 0) -> None:
        text = Text(wrap_words(words, out.file, indent, table=True), "" if bold else "dim")
        text.stylize("bold", 0, bold)
        out.print(text, soft_wrap=True)

    for entry in found:
        name = entry["name"]
        if "error" in entry:
            line(f"{name}: cannot be loaded: {entry['error']}", indent=2, bold=len(name))
            continue
        line(f"{name}  {entry['line']}", indent=2, bold=len(name))
        defaults = " ".join(f"{option}={value}" for option, value in entry["defaults"].items())
        for title, words in (("needs", needed(entry)), ("dist", entry["dist"]), ("options", defaults or "none")):
            line(f"  {title:<8}{words}", indent=10)
    used = " ".join(needed(entry) for entry in found if "error" not in entry)
    terms = [f"{term}: {words}" for term, words in _TERMS.items() if "," in term or term in used]
    out.print()
    for words in (*terms, *_LEGEND):
        line(words, indent=2)
