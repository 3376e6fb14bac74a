"""Variables that Triton does not carry through a loop although the loop assigns them.

Triton visits a loop's body once to find the variables that change. `last = node` inside of the loop changes nothing on
that visit if `last` and `node` are the same value before the loop. Then the compiled loop does not carry `last`, and
code behind the loop reads the value from before it. The interpreter runs Python, where the variable changes.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from specdec_kernels.inspection import machine_code
from specdec_kernels.triton_shared.aot_config import Variant

triton = pytest.importorskip("triton")
tl = pytest.importorskip("triton.language")

pytestmark = [
    pytest.mark.aot,
    pytest.mark.skipif(machine_code.unavailable_reason() is not None, reason=str(machine_code.unavailable_reason())),
]
Lost = set[tuple[str, str]]


def renamings(loop: ast.AST) -> Iterator[tuple[str, str]]:
    """Yields (target, source) of every assignment of one variable to another inside of a loop."""
    for part in ast.walk(loop):
        if isinstance(part, ast.Assign) and isinstance(part.value, ast.Name):
            yield from ((target.id, part.value.id) for target in part.targets if isinstance(target, ast.Name))
        elif isinstance(part, ast.Assign) and isinstance(part.value, ast.Tuple):
            (targets,) = part.targets
            for target, value in zip(getattr(targets, "elts", ()), part.value.elts):
                if isinstance(target, ast.Name) and isinstance(value, ast.Name):
                    yield target.id, value.id


@pytest.fixture
def lost_variables(monkeypatch: pytest.MonkeyPatch) -> Callable[[Variant], Lost]:
    """Returns a function that generates a variant's code, and returns the variables that a loop loses."""
    from triton._C.libtriton import ir
    from triton.compiler import code_generator
    from triton.compiler.compiler import make_backend

    lost: Lost = set()
    find_carries = code_generator.CodeGenerator._find_carries

    def checked(self: Any, loop: Any, before: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        carried = find_carries(self, loop, before, *args, **kwargs)
        values = {
            name: code_generator.flatten_values_to_ir([value])
            for name, value in before.items()
            if code_generator._is_triton_value(value)
        }
        for target, source in renamings(loop):
            same = target in values and source in values and values[target] == values[source]
            if target != source and same and target not in carried[0]:
                lost.add((target, source))
        return carried

    def generate(source: Any, target: Any, options: dict[str, Any]) -> SimpleNamespace:
        backend = make_backend(target)
        parsed, context = backend.parse_options(dict(options)), ir.context()
        ir.load_dialects(context)
        backend.load_dialects(context)
        functions, modules = backend.get_codegen_implementation(parsed), backend.get_module_map()
        return SimpleNamespace(asm={"ttir": str(source.make_ir(target, parsed, functions, modules, context))})

    monkeypatch.setattr(code_generator.CodeGenerator, "_find_carries", checked)
    monkeypatch.setattr("triton.compiler.compile", generate)

    def find(variant: Variant) -> Lost:
        lost.clear()
        machine_code.compile_variant(variant, "sm_90")
        return set(lost)

    return find


def test_no_loop_of_a_kernel_loses_a_variable(lost_variables: Callable[[Variant], Lost]) -> None:
    different = {(each.kernel, str(sorted(each.constants.items()))): each for each in machine_code.variants()}
    found = {each.name: lost_variables(each) for each in different.values()}
    assert {name: lost for name, lost in found.items() if lost} == {}


@triton.jit
def last_of_chain(out, count):
    node = tl.load(out)
    last = node
    while node < count:
        last = node
        node += 1
    tl.store(out, last)


@triton.jit
def last_of_chain_in_branch(out, count):
    node = tl.load(out)
    last = node
    for step in range(count):
        if step > 3:
            last, node = node, node + 1
        else:
            node += 1
    tl.store(out, last)


@triton.jit
def carried_last(out, count):
    node = tl.load(out)
    last = tl.full((), -1, tl.int32)
    while node < count:
        last = node
        node += 1
    tl.store(out, last)


@pytest.mark.parametrize(
    ("kernel", "lost"),
    [(last_of_chain, {("last", "node")}), (last_of_chain_in_branch, {("last", "node")}), (carried_last, set())],
    ids=["while", "branch", "carried"],
)
def test_a_lost_variable_is_found(
    kernel: Any, lost: Lost, lost_variables: Callable[[Variant], Lost], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine_code, "import_module", lambda _: SimpleNamespace(planted=kernel))
    assert lost_variables(Variant("planted", "planted:planted", {"out": "*i32", "count": "i32"}, {}, 1)) == lost
