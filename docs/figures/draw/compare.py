"""Comparison of two SVG files by what they show: texts, shapes and places.

Bytes are too strict: another release of matplotlib may write the same letter by other curves. Letters are compared as
the texts that they spell, which matplotlib writes beside them as comments.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from xml.etree import ElementTree

NUMBER = re.compile(r"-?\d+(?:\.\d+)?(?:e-?\d+)?")
TOLERANCE = 0.6  # points
SHAPES = "d", "style", "x", "y", "width", "height", "viewBox"

Item = tuple[str, tuple[float, ...]]


def items(source: str) -> Iterator[Item]:
    """The items of a file in their order: a text, or a shape with its numbers."""
    parser = ElementTree.XMLParser(target=ElementTree.TreeBuilder(insert_comments=True))
    yield from _items(ElementTree.fromstring(source, parser))


def _items(element: ElementTree.Element) -> Iterator[Item]:
    if element.tag is ElementTree.Comment:
        yield f"text {(element.text or '').strip()!r}", ()
        return
    name = str(element.tag).rpartition("}")[2]
    if name == "defs":
        return
    if name in ("title", "desc"):
        yield f"{name} {(element.text or '').strip()!r}", ()
    if name in ("path", "rect", "svg"):
        shown = [f"{key}={element.attrib[key]}" for key in SHAPES if key in element.attrib]
        numbers = tuple(float(each) for each in NUMBER.findall(re.sub(r"#\w+", "", " ".join(shown))))
        colours = sorted(re.findall(r"#[0-9a-f]{6}\b", " ".join(shown)))
        yield f"{name} {' '.join(colours)}", numbers
    children = list(element)
    spelled = bool(children) and children[0].tag is ElementTree.Comment  # a text and its letters
    for child in children[:1] if spelled else children:
        yield from _items(child)
    if spelled:
        yield "at", _place(element)


def _place(element: ElementTree.Element) -> tuple[float, ...]:
    """Where a text begins."""
    for each in element.iter():
        if "translate" in each.attrib.get("transform", ""):
            return tuple(float(number) for number in NUMBER.findall(each.attrib["transform"])[:2])
    return ()


def differences(old: str, new: str) -> list[str]:
    """What the first file shows otherwise than the second, a line for each item; empty if they agree."""
    before, after = list(items(old)), list(items(new))
    found = []
    for (name, numbers), (wanted, places) in zip(before, after):
        if name != wanted:
            found.append(f"{name} should be {wanted}")
        elif len(numbers) != len(places) or any(abs(a - b) > TOLERANCE for a, b in zip(numbers, places)):
            found.append(f"{name} is at {numbers[:6]}; it should be at {places[:6]}")
    if len(before) != len(after):
        found.append(f"{len(before)} items should be {len(after)}")
    return found
