"""Triton's interpreter as a test bed: correct in bfloat16, with checks of integers and memory, and faster.

`install` changes the interpreter of this process. It mends four errors and omissions (triton 3.6 to 3.9):

- bfloat16 numbers are stored as 16 bits, and arithmetic treats them as integers. Here they are
  widened to float32 before every operation and rounded to nearest even after it.
- An int32 overflow wraps without an error. Here it raises, as in a kernel compiled with overflow checks.
- A comparison keeps the type of its operands, so one of scalars cannot be combined with one of blocks. Here its type
  is a bit.
- Every call of a function inside a kernel searches the whole language for functions to replace. Here that is done once
  per launch.

Most of its time goes into the types of blocks, which every operation creates again with all checks of their shapes.
Here this is done once for each shape.

It does not detect a read beyond the end of a tensor. Tensors made by `guarded` end at a protected page, and inside
`watched` every address is compared with the tensors of its launch.
"""

from __future__ import annotations

import ctypes
import dataclasses
import inspect
import mmap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

_BITWISE = (np.bitwise_and, np.bitwise_or, np.bitwise_xor)
_installed = False


def widened(bits: np.ndarray) -> np.ndarray:
    """Returns bfloat16 bits as float32."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def rounded(values: np.ndarray) -> np.ndarray:
    """Returns float32 as bfloat16 bits, rounded to nearest, ties to even; NaN stays NaN."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    half = np.uint32(0x7FFF) + ((bits >> 16) & np.uint32(1))
    short = ((bits.astype(np.uint64) + half) >> 16).astype(np.uint16)
    return np.where(np.isnan(values), np.uint16(0x7FC0), short).reshape(np.shape(values))


def install() -> None:
    """Changes the interpreter of this process for tests. Call it before the first launch; repeated calls have no
    effect.
    """
    global _installed
    if _installed:
        return
    _installed = True
    import triton.runtime.interpreter as interpreter

    interpreter.interpreter_builder.options = dataclasses.replace(interpreter.interpreter_builder.options, debug=True)
    _mend_bfloat16(interpreter)
    _search_once(interpreter)
    _make_types_once(interpreter)
    _look_for_overflows_at_once()


def _mend_bfloat16(interpreter: Any) -> None:
    import triton.language as tl

    builder, handle = interpreter.InterpreterBuilder, interpreter.TensorHandle
    plain = {
        name: getattr(builder, name) for name in ("binary_op", "unary_op", "ternary_op", "cast_impl", "create_dot")
    }

    def is_short(value: Any) -> bool:
        return value.dtype.scalar == tl.bfloat16 and value.data.dtype == np.uint16

    def wide(value: Any) -> Any:
        return handle(widened(value.data), tl.float32) if is_short(value) else value

    def binary_op(self: Any, left: Any, right: Any, op: Any) -> Any:
        if not (is_short(left) and is_short(right)) or op in _BITWISE:
            result = plain["binary_op"](self, left, right, op)
            return handle(result.data, tl.int1) if result.data.dtype == np.bool_ else result
        result = op(wide(left).data, wide(right).data)
        return handle(result, tl.int1) if result.dtype == np.bool_ else handle(rounded(result), tl.bfloat16)

    def unary_op(self: Any, value: Any, op: Any) -> Any:
        if not is_short(value):
            return plain["unary_op"](self, value, op)
        return handle(rounded(op(wide(value).data)), tl.bfloat16)

    def ternary_op(self: Any, first: Any, second: Any, third: Any, op: Any) -> Any:
        if op is np.where or not (is_short(second) and is_short(third)):
            return plain["ternary_op"](self, first, second, third, op)
        return handle(rounded(op(wide(first).data, wide(second).data, wide(third).data)), tl.bfloat16)

    def cast_impl(self: Any, value: Any, to: Any) -> Any:
        if is_short(value) and to.scalar != tl.bfloat16:
            return plain["cast_impl"](self, wide(value), to)
        if to.scalar == tl.bfloat16 and not is_short(value):
            return handle(rounded(value.data.astype(np.float32)), tl.bfloat16)
        return plain["cast_impl"](self, value, to)

    def create_fp_to_fp(self: Any, value: Any, to: Any, rounding: Any) -> Any:
        if tl.bfloat16 in (value.dtype.scalar, to.scalar):
            return cast_impl(self, value, to)
        return plain_fp_to_fp(self, value, to, rounding)

    def create_dot(self: Any, left: Any, right: Any, *others: Any) -> Any:
        return plain["create_dot"](self, wide(left), wide(right), *others)

    plain_fp_to_fp = builder.create_fp_to_fp
    for changed in (binary_op, unary_op, ternary_op, cast_impl, create_fp_to_fp, create_dot):
        setattr(builder, changed.__name__, changed)

    reduce_impl = interpreter.ReduceOps.apply_impl

    def apply_impl(self: Any, given: tuple[Any, ...]) -> Any:
        short = [is_short(each.handle) for each in given]
        if not any(short):
            return reduce_impl(self, given)
        inputs = tuple(
            self.to_tensor(wide(each.handle).data, tl.float32) if s else each for each, s in zip(given, short)
        )
        result = reduce_impl(self, inputs)

        def narrow(value: Any) -> Any:
            if value.dtype != tl.float32:
                return value
            data = rounded(value.handle.data)
            kind = tl.block_type(tl.bfloat16, list(data.shape)) if value.shape else tl.bfloat16
            return tl.core.tensor(handle(data, tl.bfloat16), kind)

        return type(result)(map(narrow, result)) if isinstance(result, (tuple, list)) else narrow(result)

    interpreter.ReduceOps.apply_impl = apply_impl


def _search_once(interpreter: Any) -> None:
    import triton.language as tl

    search = interpreter._patch_lang
    found: set[int] = set()
    used: dict[Any, frozenset[int]] = {}

    def once(function: Any) -> Any:
        modules = used.get(function)
        if modules is None:
            values = function.__globals__.values()
            modules = used[function] = frozenset(
                id(value) for value in values if inspect.ismodule(value) and (value is tl or value is tl.core)
            )
        if modules and modules <= found:
            return None
        scope = search(function)
        found.update(modules)
        put_back = scope.restore

        def restore() -> None:
            put_back()
            found.clear()

        scope.restore = restore
        return scope

    interpreter._patch_lang = once


def _make_types_once(interpreter: Any) -> None:
    """Makes blocks of one shape share a type, checked and wrapped by the interpreter for the first of them."""
    import triton.language as tl
    from triton.language.semantic import TritonSemantic

    block, tensor = tl.core.block_type, tl.core.tensor
    make_block, make_tensor, lower, equal = block.__init__, tensor.__init__, block.to_ir, tl.core.dtype.__eq__
    broadcast, find_kind = TritonSemantic.broadcast_impl_value, interpreter._get_np_dtype
    shapes: dict[tuple[int, ...], Any] = {}
    blocks: dict[tuple[str, tuple[int, ...]], dict[str, Any]] = {}
    scalar: dict[str, Any] = {}
    fields: dict[int, dict[str, Any]] = {}  # by the shape of the type; these live as long as the process
    kinds: dict[str, np.dtype[Any]] = {}

    def init_block(self: Any, element_ty: Any, shape: Any) -> None:
        sizes = tuple([each.value if isinstance(each, tl.constexpr) else each for each in shape])
        rest = blocks.get((element_ty.name, sizes))
        if rest is None:
            make_block(self, element_ty, shape)
            self.shape = shapes.setdefault(sizes, self.shape)
            rest = blocks[element_ty.name, sizes] = {k: v for k, v in vars(self).items() if k != "element_ty"}
        vars(self).update(rest, element_ty=element_ty)

    def init_tensor(self: Any, handle: Any, type: Any) -> None:
        rest = fields.get(id(type.shape)) if type.is_block() else scalar
        if not rest:
            make_tensor(self, handle, type)
            rest = {k: v for k, v in vars(self).items() if k not in ("handle", "type", "dtype")}
            if not type.is_block():
                scalar.update(rest)
            elif any(type.shape is each for each in shapes.values()):
                fields[id(type.shape)] = rest
        vars(self).update(rest, handle=handle, type=type, dtype=type.scalar)

    def to_ir(self: Any, builder: Any) -> Any:
        """Lowers a type to an equal one."""
        if self.__dict__.get("lowered") is None:
            self.lowered = lower(self, builder)
        return self.lowered

    def same(self: Any, other: Any) -> bool:
        return self is other or equal(self, other)

    def broadcast_impl_value(self: Any, left: Any, right: Any) -> Any:
        ones = left.type.is_block(), right.type.is_block()
        if not any(ones) or (all(ones) and left.type.shape is right.type.shape):
            return left, right
        return broadcast(self, left, right)

    def _get_np_dtype(kind: Any) -> Any:
        name = kind.scalar.name
        if name not in kinds:
            kinds[name] = find_kind(kind)
        return kinds[name]

    block.__init__, block.to_ir, tensor.__init__, tl.core.dtype.__eq__ = init_block, to_ir, init_tensor, same
    TritonSemantic.broadcast_impl_value, interpreter._get_np_dtype = broadcast_impl_value, _get_np_dtype


def _look_for_overflows_at_once() -> None:
    """Checks overflows faster. The interpreter's own check takes six more operations, and runs only on an overflow."""
    from triton.language.semantic import TritonSemantic

    complain = TritonSemantic.binary_op_sanitize_overflow_impl
    exact = {"add": np.add, "sub": np.subtract, "mul": np.multiply}

    def binary_op_sanitize_overflow_impl(self: Any, left: Any, right: Any, operation: Any) -> None:
        kind, known = left.dtype, exact.get(operation.__name__)
        if not self.builder.options.sanitize_overflow or kind.int_bitwidth >= 64:
            return
        if known is not None and kind == right.dtype:
            wide = known(left.handle.data.astype(np.int64), right.handle.data.astype(np.int64))
            if kind.get_int_min_value() <= wide.min() and wide.max() <= kind.get_int_max_value():
                return
        complain(self, left, right, operation)

    TritonSemantic.binary_op_sanitize_overflow_impl = binary_op_sanitize_overflow_impl


def guarded(values: Tensor, row_stride: int | None = None) -> Tensor:
    """Copies a CPU tensor into memory that ends with its last element: a read beyond it ends the process.

    values: any dtype. row_stride: elements from row to row of a matrix, at least its width. Elements between rows are
    NaN (integers: the largest number), so that their use is detected.
    """
    if values.numel() == 0:
        return values.clone()
    if row_stride is None:
        count = values.numel()
    else:
        count = (values.shape[0] - 1) * row_stride + values.shape[1]
    size, page = count * values.element_size(), mmap.PAGESIZE
    pages = -(-size // page)
    region = mmap.mmap(-1, (pages + 1) * page)
    start = ctypes.addressof(ctypes.c_char.from_buffer(region))
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mprotect(ctypes.c_void_p(start + pages * page), ctypes.c_size_t(page), 0):
        raise OSError(ctypes.get_errno(), "mprotect")
    flat = torch.frombuffer(memoryview(region)[pages * page - size : pages * page], dtype=values.dtype)
    if row_stride is None:
        return flat.view(values.shape).copy_(values)
    flat.fill_(float("nan") if values.dtype.is_floating_point else torch.iinfo(values.dtype).max)
    return flat.as_strided(values.shape, (row_stride, 1)).copy_(values)


def _bytes_of(tensors: Sequence[Tensor]) -> tuple[np.ndarray, np.ndarray]:
    """Returns begins and ends of the memory of tensors, in order and disjoint."""
    spans: list[list[int]] = []
    for begin, end in sorted(
        (each.data_ptr(), each.data_ptr() + each.element_size() * (1 + sum(
            (size - 1) * stride for size, stride in zip(each.shape, each.stride(), strict=True)
        )))
        for each in tensors if each.numel()
    ):  # fmt: skip
        if spans and begin < spans[-1][1]:
            spans[-1][1] = max(end, spans[-1][1])
        else:
            spans.append([begin, end])
    begins, ends = zip(*([0, 0], *spans), strict=True)
    return np.array(begins, dtype=np.uint64), np.array(ends, dtype=np.uint64)


@contextmanager
def watched(*others: Tensor) -> Iterator[None]:
    """Inside the block, a launch raises before it touches memory of neither its tensors nor `others`."""
    import triton.runtime.interpreter as interpreter

    builder, executor = interpreter.InterpreterBuilder, interpreter.GridExecutor
    load, store, call = builder.create_masked_load, builder.create_masked_store, executor.__call__
    change = builder.create_atomic_rmw
    known = _bytes_of(others)

    def look(pointers: Any, mask: Any, verb: str) -> None:
        wanted = pointers.data[np.broadcast_to(mask.data, pointers.data.shape).astype(bool)]
        last = np.uint64(max(1, pointers.get_element_ty().primitive_bitwidth // 8))
        at = np.searchsorted(known[0], wanted, side="right") - 1
        if not (wanted + last <= known[1][at]).all():
            raise AssertionError(f"{verb} memory of no tensor of the launch")

    def create_masked_load(self: Any, ptrs: Any, mask: Any, *rest: Any) -> Any:
        look(ptrs, mask, "reads")
        return load(self, ptrs, mask, *rest)

    def create_masked_store(self: Any, ptrs: Any, value: Any, mask: Any, *rest: Any) -> Any:
        look(ptrs, mask, "writes")
        return store(self, ptrs, value, mask, *rest)

    def create_atomic_rmw(self: Any, how: Any, ptrs: Any, value: Any, mask: Any, *rest: Any) -> Any:
        look(ptrs, mask, "changes")
        return change(self, how, ptrs, value, mask, *rest)

    def launch(self: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal known
        known = _bytes_of([each for each in (*args, *kwargs.values(), *others) if isinstance(each, Tensor)])
        return call(self, *args, **kwargs)

    builder.create_masked_load, builder.create_masked_store = create_masked_load, create_masked_store
    builder.create_atomic_rmw = create_atomic_rmw
    executor.__call__ = launch
    try:
        yield
    finally:
        builder.create_masked_load, builder.create_masked_store = load, store
        builder.create_atomic_rmw = change
        executor.__call__ = call


@contextmanager
def wrapping() -> Iterator[None]:
    """Inside the block, an int32 overflow wraps without an error, as on a GPU."""
    import triton.runtime.interpreter as interpreter

    builder = interpreter.interpreter_builder
    before = builder.options
    builder.options = dataclasses.replace(before, sanitize_overflow=False)
    try:
        yield
    finally:
        builder.options = before


def guarded_case(case: dict[str, Any]) -> dict[str, Any]:
    """Returns arguments of an operator with every tensor guarded; rows of logits keep a padding of NaN."""

    def one(value: Any) -> Any:
        if isinstance(value, (tuple, list)):
            return tuple(map(one, value))
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            parts = {field.name: one(getattr(value, field.name)) for field in dataclasses.fields(value)}
            return dataclasses.replace(value, **parts)
        if not isinstance(value, Tensor):
            return value
        padded = value.ndim == 2 and not value.is_contiguous()
        return guarded(value, row_stride=value.shape[1] + 3 if padded else None)

    return {name: one(value) for name, value in case.items()}
