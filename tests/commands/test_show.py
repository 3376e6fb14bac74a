"""Words for numbers: nouns in the singular and plural, shares that add up."""

from __future__ import annotations

import pytest

from specdec_fast.commands.terminal_output import counted, percents


def test_one_is_no_plural() -> None:
    assert [counted(number, "run") for number in (0, 1, 2, 1234)] == ["0 runs", "1 run", "2 runs", "1,234 runs"]


@pytest.mark.parametrize(
    ("parts", "shares"),
    [
        ([0.636, 0.207, 0.157], [63, 21, 16]),  # rounded alone they would be 64, 21 and 16
        ([1, 1, 1], [34, 33, 33]),
        ([0.1, 0.0], [100, 0]),
        ([998, 1, 1], [100, 0, 0]),
        ([], []),
    ],
)
def test_shares_add_up_to_a_hundred(parts: list[float], shares: list[int]) -> None:
    assert percents(parts) == shares
