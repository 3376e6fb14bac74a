"""The report: an HTML page with embedded figures, the same numbers as JSON, and the figures as PNG files.

Tests: tests/lab/test_run.py.
"""

from __future__ import annotations

import json
import math
import re
from base64 import b64encode
from collections.abc import Collection, Mapping
from itertools import takewhile
from pathlib import Path
from typing import Any

from specdec_fast.lab.rule_acceptance import by_shape
from specdec_fast.lab.run import LEVEL, Figure, Lab

TEMPLATE = Path(__file__).with_name("report.html.jinja")
ARTICLE = 9.694e-5
"""Standard deviation that the article reports at 1,000,000 draws."""


def write_report(lab: Lab) -> Path:
    """Writes index.html, report.json and figures/ into the run's folder.

    It replaces an earlier report: figures of that report are removed, other files stay.

    Args:
        lab: A finished run.

    Returns:
        Path of the page.
    """
    folder = lab.out / "figures"
    folder.mkdir(parents=True, exist_ok=True)
    for name in _earlier(lab.out).get("figures", []):
        if isinstance(name, str) and re.fullmatch(r"figures/[a-z0-9-]+\.png", name):
            (lab.out / name).unlink(missing_ok=True)
    for figure in (*lab.figures, *lab.proof):
        (folder / f"{figure.name}.png").write_bytes(figure.png)
    text = json.dumps(finite(lab.as_dict()), indent=1, ensure_ascii=False, allow_nan=False)
    (lab.out / "report.json").write_text(text, "utf-8")
    page = lab.out / "index.html"
    page.write_text(render(lab), "utf-8")
    return page


def other_settings(folder: Path, header: Mapping[str, Any], besides: Collection[str] = ()) -> list[str]:
    """Lists differences between the settings of the report in `folder` and `header`, as "name theirs, now ours".

    Numbers of draws and versions are not compared.

    Args:
        folder: Folder of the earlier report; without one the list is empty.
        header: Settings of this run.
        besides: Further names that are not compared.

    Returns:
        One line for each difference.
    """
    theirs = dict(takewhile(lambda field: field[0] != "level", _earlier(folder).items()))
    ours: dict[str, Any] = json.loads(json.dumps(finite(dict(header))))
    names = [name for name in {**theirs, **ours} if name not in ("versions", "draws", *besides)] if theirs else []
    return [f"{name} {theirs.get(name)}, now {ours.get(name)}" for name in names if theirs.get(name) != ours.get(name)]


def _earlier(folder: Path) -> dict[str, Any]:
    """Reads the report of a folder; empty if there is none."""
    try:
        found = json.loads((folder / "report.json").read_text("utf-8"))
    except (OSError, ValueError):
        return {}
    ours = isinstance(found, dict) and {"level", "figures", "holds", "tests"} <= found.keys()
    return found if ours and isinstance(found["figures"], list) else {}


def finite(value: Any) -> Any:
    """Replaces infinities and NaN by None, because JSON cannot express them."""
    if isinstance(value, dict):
        return {key: finite(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def render(lab: Lab) -> str:
    """Returns the HTML page of a run."""
    from jinja2 import Environment, StrictUndefined

    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters |= {"image": image, "short": short, "share": share}
    template = environment.from_string(TEMPLATE.read_text("utf-8"))
    return template.render(
        lab=lab,
        failures=lab.failures,
        level=LEVEL,
        exact=exact_table(lab),
        article=article_words(lab),
        bars=bars_words(lab),
        lowest=min((each.test.p_value for each in lab.judged), default=1.0),
        accepted=by_shape(lab.acceptances),
        slowest=max((row.seconds for row in lab.planted), default=0.0),
    )


def image(figure: Figure) -> str:
    """Returns a figure as a data URL."""
    return "data:image/png;base64," + b64encode(figure.png).decode("ascii")


def short(value: float | None) -> str:
    """Formats a number with few digits."""
    if value is None:
        return "\u2013"
    if math.isinf(value):
        return "\u221e"
    if value == int(value) and abs(value) < 1e9:
        return f"{int(value):,}"
    return f"{value:.3g}" if abs(value) < 1e-3 or abs(value) >= 1e5 else f"{value:.4f}".rstrip("0").rstrip(".")


def share(value: float | None) -> str:
    """Formats a probability in percent."""
    return "\u2013" if value is None else f"{100 * value:.2f}%"


def exact_table(lab: Lab) -> dict[str, Any]:
    """Returns largest errors and numbers of cases, by rule and proposal, then by policy."""
    policies = list(dict.fromkeys(each.policy for each in lab.exact))
    rows: dict[tuple[str, str], dict[str, tuple[float, int]]] = {}
    for each in lab.exact:
        row = rows.setdefault((each.rule, each.proposal), {})
        error, count = row.get(each.policy, (0.0, 0))
        row[each.policy] = (max(error, each.error), count + 1)
    return {"policies": policies, "rows": rows, "worst": max((each.error for each in lab.exact), default=0.0)}


def bars_words(lab: Lab) -> str:
    """Counts bars outside of their bands, next to the number that chance explains."""
    if not lab.bars:
        return ""
    from scipy.stats import binom

    alone = "A single red bar is therefore no evidence"
    if binom.sf(lab.bars_outside - 1, lab.bars, 1e-3) < LEVEL:
        alone = "Chance does not explain this number"
    return (
        f"Bars outside of their 99.9% bands, in red: {lab.bars_outside:,} of {lab.bars:,} in these panels; by chance "
        f"alone about {lab.bars / 1000:.2g} are expected. {alone}; the tests below decide, which use all tokens of a "
        "position and share one level."
    )


def article_words(lab: Lab) -> str:
    """Compares the standard deviation that the article reports with ours."""
    if not lab.spreads or not lab.drawings:
        return ""
    name, own = next(iter(lab.spreads.items()))
    mean = ARTICLE**2 * 1e6
    return (
        "The standard deviation over bars is sqrt(mean p (1 - p) / n). If the distribution holds, it depends only on "
        f"the number of draws and on the set of bars. At {name}, with {own.bars} bars and {own.draws:,} draws, "
        f"{own.expected:.3e} is expected and {own.observed:.3e} is observed. The article that the experiments follow "
        "(Will Speculative Decoding Harm LLM Inference Accuracy?) reports 9.694e-05 at 1,000,000 draws. The mean of "
        f"p (1 - p) over its bars was therefore about {mean:.4f}, for example {0.5 / mean:.0f} small bars that add up "
        "to one half. Without the set of bars the number can neither be confirmed nor refuted; a wrong sampler may "
        "show it too."
    )
