"""Suggested commands survive a shell and `-o NAME=VALUE`."""

from __future__ import annotations

import shlex

from specdec_fast.commands.options import read_drafter_options
from specdec_fast.core.shell_commands import PROMPT, generate_command


def test_a_command_is_read_as_it_was_meant() -> None:
    options = {"--model": "my models/it's", "--adapter": None, "--chat": False, "--trust-remote-code": True, "-k": 3}
    own = {"head": "my heads/$HOME", "layers": "7", "depth": 0, "widths": [4, 2], "greedy": True}
    words = shlex.split(generate_command(options, own))
    assert words[:5] == ["specdec", "generate", PROMPT, "--model", "my models/it's"]
    assert words[5:8] == ["--trust-remote-code", "-k", "3"]
    given = words[8:]
    assert given[::2] == ["-o"] * len(own) and read_drafter_options(given[1::2]) == own
