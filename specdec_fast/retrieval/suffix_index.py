"""Structures over token texts that answer "what followed this suffix": compiled, or in Python with one warning.

Automaton: one growing text. CountedTree: texts that come and go. Array, look_up: a token stream with its suffix array.
Successors: what a model showed behind each token. All grow a tree best-first, by counts or distributions, or by their
race under the replay noise of a place (`noise`: seed and position of the root), and answer with (tokens, parents,
expected, match): node i + 1 of a draft below its root has tokens[i] and parents[i] (0 is the root); expected is the
sum of the paths' probabilities; match is how many tokens of the suffix were found. The code is csrc/suffix, its
contract in Python specdec_fast/retrieval/suffix_index_python.py.
Tests: tests/retrieval/test_suffix_index.py.
"""

from __future__ import annotations

import warnings
from functools import lru_cache
from importlib import import_module
from typing import Any

from specdec_kernels import FallbackWarning

Grown = tuple[list[int], list[int], float, int]
REMEDY = "build it with `pip install -e .` where a C++20 compiler and pybind11 are there"


@lru_cache(maxsize=1)
def structures() -> Any:
    """The module with Automaton, CountedTree, Array and look_up."""
    try:
        return import_module("specdec_kernels._suffix")
    except ImportError as error:
        reason = "is not built" if isinstance(error, ModuleNotFoundError) else f"does not load ({error})"
        warnings.warn(
            f"suffix structures run in Python, which is slow: extension specdec_kernels._suffix {reason}; {REMEDY}",
            FallbackWarning,
            stacklevel=3,
        )
        return import_module("specdec_fast.retrieval.suffix_index_python")
