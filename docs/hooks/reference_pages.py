"""Reference pages from the code: a line `<!-- generate: operators -->` of a page is replaced by what is generated.

Tests: tests/docs/test_reference.py.
"""

from __future__ import annotations

import re

import command_line
import operator_tables
import plugin_lists
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import Files
from mkdocs.structure.pages import Page

GENERATORS = {
    "cli": command_line.reference,
    "drafters": plugin_lists.drafters,
    "interfaces": plugin_lists.interfaces,
    "operator-table": operator_tables.overview,
    "operators": operator_tables.reference,
    "rules": plugin_lists.rules,
    "targets": plugin_lists.targets,
}
_PLACE = re.compile(r"^<!-- generate: ([\w-]+) -->$", flags=re.MULTILINE)


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Fills the places of a page that are generated."""
    return filled(markdown, page.file.src_uri)


def filled(markdown: str, place: str) -> str:
    """A page's text with its generated parts. Raises PluginError for a name that has no generator."""

    def generated(match: re.Match[str]) -> str:
        if match[1] not in GENERATORS:
            raise PluginError(f"{place}: got 'generate: {match[1]}'; expected one of {', '.join(GENERATORS)}")
        return GENERATORS[match[1]]()

    return _PLACE.sub(generated, markdown)
