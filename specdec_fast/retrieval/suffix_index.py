"""Suffix structures over token texts, compiled or in Python: they find the continuations of a suffix.

- `Automaton`: one growing text.
- `CountedTree`: a changing set of texts.
- `Array` and `look_up`: a token stream with its suffix array.
- `Successors`: the next tokens that a model showed for each token.

All of them grow a tree best-first, by counts or distributions. With `noise` (seed and position of the root) they grow
by the Gumbel-max under the replay noise of each position. They return (tokens, parents, expected, match). Node i + 1 of
a draft has tokens[i] and parents[i], where 0 is the root. `expected` is the sum of the paths' probabilities, and
`match` the length of the suffix that was found.

The code is csrc/suffix; its specification in Python is specdec_fast/retrieval/suffix_index_python.py.
Tests: tests/retrieval/test_suffix_index.py.
"""

from __future__ import annotations

import warnings
from functools import lru_cache
from importlib import import_module
from typing import Any

from specdec_kernels import FallbackWarning

Grown = tuple[list[int], list[int], float, int]
REMEDY = "build it with `pip install -e .` with a C++20 compiler and pybind11 installed"


@lru_cache(maxsize=1)
def structures() -> Any:
    """Returns the module with the structures: compiled if possible, else in Python with one warning."""
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
