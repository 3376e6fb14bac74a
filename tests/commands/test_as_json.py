"""`--json`: the same values, lists of tokens on one line."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specdec_fast.commands.json_output import print_json

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
)


@given(value=VALUES)
def test_only_blanks_between_values_change(value: object) -> None:
    with pytest.MonkeyPatch.context() as patch:
        said: list[str] = []
        patch.setattr("builtins.print", said.append)
        print_json(value)
    assert json.loads(said[0]) == value


def test_tokens_take_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    print_json({"tokens": [1, 2, 3], "origins": ["a  b", "c"], "nested": [{"at": [1, 2]}], "empty": []})
    assert capsys.readouterr().out.splitlines() == [
        "{",
        '  "tokens": [1, 2, 3],',
        '  "origins": ["a  b", "c"],',
        '  "nested": [',
        "    {",
        '      "at": [1, 2]',
        "    }",
        "  ],",
        '  "empty": []',
        "}",
    ]
