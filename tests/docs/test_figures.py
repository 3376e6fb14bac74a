"""The committed figures show today's code and results; figures and records that are out of date are noticed."""

from __future__ import annotations

import json
import re
import shutil
import socket
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("matplotlib")

from docs.figures.draw import compare, imports, results, style
from docs.figures.draw.__main__ import DATA, FIGURES, drawers, drawn, main, stale

MODULES = drawers()
LARGEST = 150_000  # bytes of a file


@pytest.fixture(autouse=True)
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*args: object) -> None:
        raise AssertionError("a figure reached for the network")

    monkeypatch.setattr(socket.socket, "connect", refused)
    monkeypatch.setattr(socket, "getaddrinfo", refused)


@cache
def committed(name: str) -> str:
    return (FIGURES / f"{name}.svg").read_text(encoding="utf-8")


@cache
def today(name: str) -> str:
    return drawn(MODULES[name])


@pytest.mark.parametrize("name", MODULES)
def test_a_figure_is_up_to_date(name: str) -> None:
    assert compare.differences(committed(name), today(name)) == [], "run make figures"
    assert len(committed(name)) < LARGEST
    assert f"<title>{MODULES[name].TITLE.replace('&', '&amp;')}</title>" in committed(name)


def test_every_file_has_a_module_that_draws_it() -> None:
    assert sorted(file.stem for file in FIGURES.glob("*.svg")) == sorted(MODULES)
    assert sorted(file.stem for file in DATA.glob("*.json")) == sorted(
        name for name, module in MODULES.items() if hasattr(module, "record")
    )


@pytest.mark.parametrize("name", ["token-tree", "losslessness"])
def test_the_same_drawing_has_the_same_bytes(name: str) -> None:
    assert drawn(MODULES[name]) == today(name)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda text: text.replace("<!-- 723", "<!-- 724"),  # a number
        lambda text: text.replace("#0f62a8", "#00745a"),  # a colour
        lambda text: re.sub(r"<path d=[^>]*style[^>]*/>", "", text, count=1),  # nothing where something was
    ],
)
def test_a_planted_change_of_a_file_is_noticed(tmp_path: Path, spoil: Callable[[str], str]) -> None:
    spoilt = spoil(committed("speedups"))
    assert spoilt != committed("speedups")
    (tmp_path / "speedups.svg").write_text(spoilt, encoding="utf-8")
    assert "speedups.svg is out of date" in (stale("speedups", MODULES["speedups"], tmp_path) or "")


def test_a_missing_file_is_noticed(tmp_path: Path) -> None:
    assert stale("rules", MODULES["rules"], tmp_path) == "rules.svg does not exist; run make figures"


def test_the_program_fails_on_a_figure_that_is_out_of_date(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["rules", "--check"]) == 0
    monkeypatch.setattr(MODULES["rules"], "TITLE", "Another title")
    assert main(["rules", "--check"]) == 1
    assert "rules.svg is out of date (title" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main(["no-such-figure"])
    assert "got no-such-figure; expected some of " in capsys.readouterr().err


def test_a_new_result_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A bar that grows by a tenth, whose number changes with it."""
    result = results.read("rules_cpu.json")
    result["rows"][0]["tau"] *= 1.1
    (tmp_path / "rules_cpu.json").write_text(json.dumps(result))
    monkeypatch.setattr(results, "RESULTS", tmp_path)
    found = compare.differences(committed("rules"), drawn(MODULES["rules"]))
    assert any("3.90" in each and "4.29" in each for each in found) and any(each.startswith("path") for each in found)


@pytest.mark.parametrize("name", ["drafters", "adaptive-budget"])
def test_a_row_of_another_machine_is_marked(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result = results.read("drafters_cpu.json")
    for row in result["rows"]:
        row.pop(results.OWN_RUN, None)
    other = result["environment"] | {"cpu": "Planted CPU", "date": "2030-01-02"}
    found = [row for row in result["rows"] if row["drafter"] == "ngram" and row["workload"] == "mixed"]
    for row in found:
        row[results.OWN_RUN] = other
    (tmp_path / "drafters_cpu.json").write_text(json.dumps(result))
    shutil.copy(results.RESULTS / "goodput_cpu.json", tmp_path)
    monkeypatch.setattr(results, "RESULTS", tmp_path)
    texts = re.findall(r"<!-- (.*?) -->", drawn(MODULES[name]))
    marked = [text for text in texts if text.endswith(" \u00b9")]
    assert len(marked) == (len(found) if name == "drafters" else 1), texts
    (caption,) = (text for text in texts if text.startswith("\u00b9 "))
    assert "Planted CPU" in caption and "2030-01-02" in " ".join(texts)


def test_a_new_import_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A package that begins to import another is drawn with another arrow, or on another level."""
    source = tmp_path / "specdec_fast"
    shutil.copytree(imports.SOURCES["specdec_fast"], source, ignore=shutil.ignore_patterns("assets", "__pycache__"))
    (source / "lab" / "planted.py").write_text("def f():\n    from specdec_fast.drafters import ngram\n")
    monkeypatch.setitem(imports.SOURCES, "specdec_fast", source)
    assert compare.differences(committed("house"), drawn(MODULES["house"]))


def test_a_cycle_of_imports_is_refused() -> None:
    with pytest.raises(ValueError, match="got the cycle a -> b -> a; expected none"):
        imports.levels({"a": {"b"}, "b": {"a"}})


def test_names_of_stages_are_names_of_the_code() -> None:
    assert imports.home("PagedCache") == "specdec_fast/cache/paged"
    with pytest.raises(ValueError, match="NoSuchClass: got 0 modules that define it"):
        imports.home("NoSuchClass")


def test_arrows_that_follow_from_others_are_left_out() -> None:
    edges = {"top": {"middle", "bottom"}, "middle": {"bottom"}, "bottom": set()}
    assert imports.reduced(edges) == {"top": {"middle"}, "middle": {"bottom"}, "bottom": set()}
    assert imports.levels(edges) == {"top": 2, "middle": 1, "bottom": 0}


def recorded(name: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """The record of a figure, and that of the same run now."""
    return json.loads((DATA / f"{name}.json").read_text(encoding="utf-8")), MODULES[name].record()


def test_the_record_of_the_token_tree_is_what_decoding_does() -> None:
    before, now = recorded("token-tree")
    assert before == now
    kinds = [MODULES["token-tree"].verdicts(step) for step in now["steps"]]
    assert kinds[0].count("rejected") and kinds[1].count("accepted") == 3


def test_the_record_of_losslessness_is_what_the_lab_counts() -> None:
    before, now = recorded("losslessness")
    assert before["target"] == pytest.approx(now["target"]) and before["draft"] == pytest.approx(now["draft"])
    assert before["counts"].keys() == now["counts"].keys()
    for rule, counts in before["counts"].items():
        # sums of float32 in another order may decide a draw at the edge of a threshold otherwise
        assert counts == pytest.approx(now["counts"][rule], abs=3), rule
        assert sum(counts) == before["draws"]


def contrast(one: str, other: str) -> float:
    """The ratio of luminances of the Web Content Accessibility Guidelines 2.2."""

    def luminance(colour: str) -> float:
        parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
        linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    dark, light = sorted((luminance(one), luminance(other)))
    return (light + 0.05) / (dark + 0.05)


def test_text_can_be_read() -> None:
    for fill in (style.PAGE, *style.PALE.values()):
        assert contrast(style.INK, fill) > 7 and contrast(style.MUTED, fill) > 4.5
    for colour in style.DARK:
        assert contrast("#ffffff", colour) > 4.5
    for colour in style.BARS:
        assert contrast(style.INK, colour) > 4.5 or colour in style.DARK
    for colour, pale in style.PALE.items():
        assert contrast(colour, pale) > 3.8 and contrast(colour, style.PAGE) > 4.5
