"""Do the backends of this machine agree? Sample calls of every operator, run on each backend, against the reference."""

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
from .samples_options import OPTIONS
from .samples_verify import VERIFY_SAMPLES

SAMPLES: dict[str, Sample] = {**CACHE_SAMPLES, **VERIFY_SAMPLES}
"""What `specdec kernels check`, `explain` and `bench` call operators with. Calls are made anew: some write in place."""

TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3, torch.float64: 1e-12}
"""Largest difference of floating-point results, relative to 1 + their size."""
NO_JUDGE = (
    "TRITON_INTERPRET=1 is set, and Triton's interpreter alone is not to be trusted: it has errors that tests mend; "
    "run `make lane-interpreter`"
)


@dataclass(frozen=True)
class Agreement:
    """One backend on one sample: `reason` says why it was not run, or how it differs; `worst`: largest difference;
    `case`: its name in `OPTIONS`, "" for the plain call.
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
    """Names of the sample calls of an operator: "" is the plain one, the others are those of `OPTIONS`."""
    return ("", *OPTIONS.get(op, ()))


def make_sample(op: str, sizes: Sizes, device: torch.device | str = "cpu", case: str = "") -> Call:
    """A call of an operator with tensors on a device. Raises: ValueError for an operator without such a sample."""
    if op not in SAMPLES:
        raise ValueError(f"agreement: no sample of operator {op!r}; there are {', '.join(sorted(SAMPLES))}")
    if case not in cases(op):
        raise ValueError(f"agreement: no sample {case!r} of {op}; there are {', '.join(filter(None, cases(op)))}")
    call = OPTIONS[op][case](sizes) if case else SAMPLES[op].make(sizes)
    return call if torch.device(device).type == "cpu" else map_tensors(call, lambda tensor: tensor.to(device))


def make_timed_sample(device: torch.device | str, op: str, sizes: Sizes) -> Call:
    """The call that is timed. Its tensors are made on the device, so that large ones need not cross from the host.

    Its numbers are those of `make_sample`, but for what operators compute for it: they run where the tensors are.

    Args:
        device: Where the call's tensors lie.
        op: Name of an operator with a sample.
        sizes: Its sizes.
    """
    with torch.device(device):
        return (SAMPLES[op].timed or SAMPLES[op].make)(sizes)


def map_tensors(call: Call, change: Callable[[Tensor], Tensor]) -> Call:
    """The call with other tensors; one that occurs twice is changed once."""
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
    """All tensors of a result or of arguments: alone, in tuples and tables of caches, or in a dataclass."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (tuple, list, CacheTable)):
        for each in value:
            yield from tensors_in(each)
    elif is_dataclass(value) and not isinstance(value, type):
        for each in fields(value):
            yield from tensors_in(getattr(value, each.name))


def run_sample(op: str, call: Call) -> list[Tensor]:
    """Runs the operator: what it returns, then what it wrote."""
    return [*tensors_in(OPS[op](*call.arguments, **call.options)), *call.writes]


def comparable_results(op: str, got: list[Tensor], want: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """The results without what backends may differ in: the distribution after a whole chain, which may be left out
    (`rejection_verify_logits`), and ancestor words without a bit, which a backend that knows no bound adds
    (`tree_plan`).
    """
    if op == "tree_plan":
        missing = want[2].shape[1] - got[2].shape[1]
        wide = pad(got[2], (0, max(0, missing))), pad(want[2], (0, max(0, -missing)))
        return [*got[:2], wide[0], *got[3:]], [*want[:2], wide[1], *want[3:]]
    if op != "rejection_verify_logits":
        return got, want
    (path, accepted), left_out = want[:2], [torch.isposinf(each[4]) for each in (got, want)]
    ends = path.gather(1, accepted[:, None].long())
    optional = torch.zeros_like(left_out[0]).index_fill_(0, ends[ends >= 0].long(), True)
    rows = ~optional | (left_out[0] == left_out[1])
    return [*got[:3], *(each[rows] for each in got[3:])], [*want[:3], *(each[rows] for each in want[3:])]


def difference(got: Tensor, want: Tensor, tolerance: float) -> tuple[float, str | None]:
    """(largest difference relative to 1 + |want|, how the tensors differ or None)."""
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
    """Every backend of the operators on sample calls, one after the other; only: names of `cases`, all by default."""
    for name in ops if ops is not None else OPS:
        for dtype in dtypes:
            if dtype != torch.float32 and "dtype" not in SAMPLES[name].names:
                continue
            here = replace(sizes or Sizes(), dtype=dtype)
            for case in cases(name) if only is None else only:
                yield from _check_case(name, case, here, device)


def _check_case(name: str, case: str, sizes: Sizes, device: torch.device | str) -> Iterator[Agreement]:
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
        if want is None:  # nobody to compare it with is nothing to wait for
            with use_backend(REFERENCE):
                want = run_sample(name, known)
        yield _compare(name, backend.name, case, sizes, device, want)


def _why_not(name: str, backend: str, call: Call) -> str | None:
    """Why a backend is not compared on a call, or None."""
    options = {key: value for key, value in call.options.items() if key != "overlay"}  # any backend: see Op
    with use_backend(backend):
        reason = next(row.reason for row in OPS[name].explain(*call.arguments, **options) if row.backend == backend)
    return NO_JUDGE if reason is None and backend == "triton" and INTERPRETED else reason


def _compare(
    name: str, backend: str, case: str, sizes: Sizes, device: torch.device | str, want: list[Tensor]
) -> Agreement:
    short = str(sizes.dtype).removeprefix("torch.")
    with use_backend(REFERENCE):  # what the operator is called with must not depend on the backend
        call = make_sample(name, sizes, device, case)
    with use_backend(backend):
        try:
            got = run_sample(name, call)
        except Exception as error:  # of any kind, and the other backends and operators go on
            words = f"{type(error).__name__}: {error}"
            return Agreement(name, backend, short, True, False, float("inf"), words, case)
    pairs = zip(*comparable_results(name, got, want), strict=True)
    found = [difference(a, b, TOLERANCE[sizes.dtype]) for a, b in pairs]
    words = "; ".join(text for _, text in found if text)
    worst = max((each for each, _ in found), default=0.0)
    return Agreement(name, backend, short, True, not words, worst, words or None, case)
