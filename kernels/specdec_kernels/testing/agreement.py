"""Agreement of the backends of this machine: sample calls of every operator, compared with the reference."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..dispatch.backend_request import use_backend
from ..dispatch.operator import REFERENCE
from ..dispatch.registry import OPS
from ..ops.fused_forward import DecoderTable
from ..ops.kv_commit import CacheTable
from ..triton_shared.triton_backend import INTERPRETED
from .samples_attention import CACHE_SAMPLES, Call, Sample, Sizes
from .samples_linear import LINEAR_SAMPLES
from .samples_options import OPTIONS
from .samples_recurrent import RECURRENT_SAMPLES
from .samples_verify import VERIFY_SAMPLES

SAMPLES: dict[str, Sample] = {**CACHE_SAMPLES, **LINEAR_SAMPLES, **RECURRENT_SAMPLES, **VERIFY_SAMPLES}
"""Samples of `specdec kernels check`, `explain` and `bench`. Every run makes a new call, as some write in place."""

TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3, torch.float64: 1e-12}
"""Largest accepted difference of floating-point results, relative to 1 + their absolute value."""
_WHOLE_MODELS = {"fused_forward", "draft_chain"}
"""Operators that round after every layer. Each backend errs up to the tolerance, so two differ up to twice as much."""
INTERPRETER_UNRELIABLE = (
    "TRITON_INTERPRET=1 is set; Triton's interpreter has errors, and only the tests correct them; "
    "run `make lane-interpreter`"
)


@dataclass(frozen=True)
class Agreement:
    """Comparison of one backend with the reference on one sample.

    Attributes:
        op: Name of the operator.
        backend: Name of the backend.
        dtype: Data type of the sample, such as "bfloat16".
        ran: Whether the backend ran.
        agrees: Whether no result differs. True for a backend that did not run.
        worst: Largest difference relative to 1 + the absolute value of the expected result.
        reason: Why the backend did not run, or how its results differ. None if they agree.
        case: Name of the sample in `OPTIONS`; "" for the plain call.
    """

    op: str
    backend: str
    dtype: str
    ran: bool
    agrees: bool
    worst: float
    reason: str | None = None
    case: str = ""


def cases(op: str) -> tuple[str, ...]:
    """Returns the names of an operator's sample calls: "" for the plain call, then those of `OPTIONS`."""
    return ("", *OPTIONS.get(op, ()))


def make_sample(op: str, sizes: Sizes, device: torch.device | str = "cpu", case: str = "") -> Call:
    """Makes a sample call of an operator.

    Args:
        op: Name of the operator.
        sizes: Sizes of the sample.
        device: Device of the tensors.
        case: Name of the sample; see `cases`.

    Returns:
        The call.

    Raises:
        ValueError: If the operator has no such sample.
    """
    if op not in SAMPLES:
        raise ValueError(
            f"agreement: got operator {op!r} without a sample; expected one of {', '.join(sorted(SAMPLES))}"
        )
    if case not in cases(op):
        known = ", ".join(filter(None, cases(op)))
        raise ValueError(f"agreement: got sample {case!r} of {op}; expected one of {known}, or none for the plain call")
    call = OPTIONS[op][case](sizes) if case else SAMPLES[op].make(sizes)
    return call if torch.device(device).type == "cpu" else map_tensors(call, lambda tensor: tensor.to(device))


def make_timed_sample(device: torch.device | str, op: str, sizes: Sizes) -> Call:
    """Makes the call that benchmarks time, with tensors allocated on the device.

    Large tensors are therefore not copied from the host. The numbers are those of `make_sample`, except inputs that
    operators compute: these operators run on the device.

    Args:
        device: Device of the tensors.
        op: Name of an operator with a sample.
        sizes: Sizes of the sample.

    Returns:
        The call.
    """
    with torch.device(device):
        return (SAMPLES[op].timed or SAMPLES[op].make)(sizes)


def map_tensors(call: Call, change: Callable[[Tensor], Tensor]) -> Call:
    """Returns the call with every tensor replaced. A tensor that occurs twice is changed once."""
    moved: dict[int, Tensor] = {}

    def move(value: Any) -> Any:
        if isinstance(value, Tensor):
            if id(value) not in moved:
                moved[id(value)] = change(value)
            return moved[id(value)]
        if isinstance(value, CacheTable):
            return CacheTable([move(each) for each in value])
        if isinstance(value, DecoderTable):
            made, (parts, *numbers) = value.__reduce__()
            return made(move(parts), *numbers)
        if isinstance(value, (tuple, list)):
            return type(value)(move(each) for each in value)
        if isinstance(value, dict):
            return {name: move(each) for name, each in value.items()}
        if is_dataclass(value) and not isinstance(value, type):
            return type(value)(**{each.name: move(getattr(value, each.name)) for each in fields(value)})
        return value

    return replace(call, arguments=move(call.arguments), options=move(call.options), writes=move(call.writes))


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Yields all tensors of a result or of arguments, also those in sequences, cache tables and dataclasses."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (tuple, list, CacheTable)):
        for each in value:
            yield from tensors_in(each)
    elif is_dataclass(value) and not isinstance(value, type):
        for each in fields(value):
            yield from tensors_in(getattr(value, each.name))


def run_sample(op: str, call: Call) -> list[Tensor]:
    """Runs the operator. Returns its results, then the tensors that it writes in place."""
    return [*tensors_in(OPS[op](*call.arguments, **call.options)), *call.writes]


def comparable_results(op: str, got: list[Tensor], want: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """Removes the parts of results in which backends may differ.

    Backends of `rejection_verify_logits` may omit the distribution after a fully accepted chain. Backends of
    `tree_plan` that know no bound add ancestor words without bits.

    Args:
        op: Name of the operator.
        got: Results of a backend.
        want: Results of the reference.

    Returns:
        The comparable parts of both.
    """
    if op == "tree_plan":
        missing = want[2].shape[1] - got[2].shape[1]
        wide = pad(got[2], (0, max(0, missing))), pad(want[2], (0, max(0, -missing)))
        return [*got[:2], wide[0], *got[3:]], [*want[:2], wide[1], *want[3:]]
    if op != "rejection_verify_logits":
        return got, want
    (path, accepted), omitted = want[:2], [torch.isposinf(each[4]) for each in (got, want)]
    ends = path.gather(1, accepted[:, None].long())
    optional = torch.zeros_like(omitted[0]).index_fill_(0, ends[ends >= 0].long(), True)
    rows = ~optional | (omitted[0] == omitted[1])
    return [*got[:3], *(each[rows] for each in got[3:])], [*want[:3], *(each[rows] for each in want[3:])]


def difference(got: Tensor, want: Tensor, tolerance: float) -> tuple[float, str | None]:
    """Returns the largest difference relative to 1 + |want|, and how the tensors differ or None."""
    if got.shape != want.shape or got.dtype != want.dtype:
        return float("inf"), f"{got.dtype} {list(got.shape)}; expected {want.dtype} {list(want.shape)}"
    got, want = got.cpu(), want.cpu()
    if not want.dtype.is_floating_point:
        wrong = int((got != want).sum())
        return float(wrong), f"{wrong} of {want.numel()} integers differ" if wrong else None
    got, want = got.double(), want.double()
    same = (got == want) | (got.isnan() & want.isnan())
    off = torch.where(same, 0.0, (got - want).abs() / (1 + want.abs())).nan_to_num(torch.inf)
    worst = float(off.max()) if off.numel() else 0.0
    return worst, f"differs by {worst:.2g}; expected at most {tolerance:.2g}" if worst > tolerance else None


def check(
    ops: Iterable[str] | None = None,
    dtypes: Iterable[torch.dtype] = (torch.float32, torch.bfloat16),
    device: torch.device | str = "cpu",
    sizes: Sizes | None = None,
    only: Sequence[str] | None = None,
) -> Iterator[Agreement]:
    """Compares every backend of the operators with the reference on sample calls.

    Args:
        ops: Names of operators; None for all.
        dtypes: Data types of the samples.
        device: Device of the samples.
        sizes: Sizes of the samples.
        only: Names of `cases`; None for all.

    Yields:
        One `Agreement` per operator, data type, case and backend.
    """
    for name in ops if ops is not None else OPS:
        for dtype in dtypes:
            if dtype != torch.float32 and "dtype" not in SAMPLES[name].names:
                continue
            here = replace(sizes or Sizes(), dtype=dtype)
            for case in cases(name) if only is None else only:
                yield from _check_case(name, case, here, device)


def _check_case(name: str, case: str, sizes: Sizes, device: torch.device | str) -> Iterator[Agreement]:
    """Compares all backends on one sample."""
    with use_backend(REFERENCE):
        known = make_sample(name, sizes, device, case)
    want: list[Tensor] | None = None
    for backend in OPS[name].backends:
        if backend.name == REFERENCE:
            continue
        reason = _why_not(name, backend.name, known)
        if reason is not None:
            short = str(sizes.dtype).removeprefix("torch.")
            yield Agreement(name, backend.name, short, False, True, 0.0, reason, case)
            continue
        if want is None:  # the reference runs only if there is a backend to compare
            with use_backend(REFERENCE):
                want = run_sample(name, known)
        yield _compare(name, backend.name, case, sizes, device, want)


def _why_not(name: str, backend: str, call: Call) -> str | None:
    """Returns why a backend is not compared on a call, or None."""
    options = {
        key: value for key, value in call.options.items() if key != "overlay"
    }  # every backend accepts it: see Op
    with use_backend(backend):
        reason = next(row.reason for row in OPS[name].explain(*call.arguments, **options) if row.backend == backend)
    return INTERPRETER_UNRELIABLE if reason is None and backend.startswith("triton") and INTERPRETED else reason


def _compare(
    name: str, backend: str, case: str, sizes: Sizes, device: torch.device | str, want: list[Tensor]
) -> Agreement:
    """Runs a backend on a new sample call and compares its results."""
    short = str(sizes.dtype).removeprefix("torch.")
    with use_backend(REFERENCE):  # the arguments must not depend on the backend
        call = make_sample(name, sizes, device, case)
    with use_backend(backend):
        try:
            got = run_sample(name, call)
        except Exception as error:  # reported; the other backends and operators still run
            words = f"{type(error).__name__}: {error}"
            return Agreement(name, backend, short, True, False, float("inf"), words, case)
    pairs = zip(*comparable_results(name, got, want), strict=True)
    tolerance = TOLERANCE[sizes.dtype] * (2 if name in _WHOLE_MODELS else 1)
    found = [difference(a, b, tolerance) for a, b in pairs]
    words = "; ".join(text for _, text in found if text)
    worst = max((each for each, _ in found), default=0.0)
    return Agreement(name, backend, short, True, not words, worst, words or None, case)
