"""Runs an action right after a module is imported, or at once if it already was.

Tests: tests/integrations/vllm/test_plugin.py.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType

log = logging.getLogger("vllm.specdec")

Action = Callable[[ModuleType], None]


def when_imported(name: str, action: Action) -> None:
    """Runs an action for a module, now or when it is imported.

    An action that raises leaves the import alone and is logged. An action is run once, even if it is given again.

    Args:
        name: Dotted name of the module.
        action: Is called with the module.
    """
    module = sys.modules.get(name)
    if module is not None:
        _run(action, module)
        return
    if not any(isinstance(each, _Finder) and each.name == name for each in sys.meta_path):
        sys.meta_path.insert(0, _Finder(name, action))


def _run(action: Action, module: ModuleType) -> None:
    try:
        action(module)
    except Exception as error:
        log.warning("specdec: %s was not prepared, and vLLM runs without the plugin: %r", module.__name__, error)


class _Finder(MetaPathFinder):
    """Finds one module as the others would, with a loader that runs the action."""

    def __init__(self, name: str, action: Action) -> None:
        self.name, self._action, self._asks_others = name, action, False

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Returns the spec of the module, or None for all others."""
        if fullname != self.name or self._asks_others:
            return None
        self._asks_others = True
        try:
            spec = find_spec(fullname)
        finally:
            self._asks_others = False
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader, self._run)
        return spec

    def _run(self, module: ModuleType) -> None:
        if self in sys.meta_path:
            sys.meta_path.remove(self)
        _run(self._action, module)


class _Loader(Loader):
    """Loads with another loader, then runs the action. Everything else is left to the other loader."""

    def __init__(self, inner: Loader, action: Action) -> None:
        self._inner, self._action = inner, action

    def __getattr__(self, name: str) -> object:
        return getattr(self._inner, name)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        """Creates the module as the other loader does."""
        return self._inner.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        """Executes the module, then runs the action."""
        self._inner.exec_module(module)
        self._action(module)
