"""Triton backends of state_commit and window_commit: argument checks, launches, variants."""

from __future__ import annotations

from torch import Tensor

from ...dispatch import argument_checks
from ...triton_shared.aot_config import Variant
from .._recurrence.cpu_inputs import in_one_piece
from .._recurrence.gpu_blocks import check_whole_rows, choose_blocks, constants_of, power_of_two
from .reference import check_state_data, check_states, check_window_data, check_windows

CHANNELS = 256
"""Channels of a program of window_commit."""


def state_commit(
    state: Tensor,
    key: Tensor,
    value: Tensor,
    log_gate: Tensor,
    rows: Tensor,
    lengths: Tensor,
    path: Tensor,
    decay: Tensor | None = None,
) -> None:
    """Runs the operator in one launch that reads and writes each state once; a CUDA graph can capture it.

    The bits equal those of passes in sequence. Those of the triangular system differ by rounding.
    """
    from .triton_kernel import replay_path

    given = (state, key, value, log_gate, rows, lengths, path, decay)
    check_states(*given)
    if argument_checks.can_read_values(state):
        check_state_data(*given)
    check_whole_rows("state_commit", "state", state, "float32 [R, H, K, V]")
    if len(rows) and path.shape[1] and state.numel() and len(value):
        blocks = choose_blocks(*state.shape[2:])
        replay_path[blocks.grid(state, len(rows))](
            state, *in_one_piece(key, value, log_gate, decay, rows, lengths, path), len(value),
            len(state), path.shape[1], state.stride(0), **constants_of(state, key, log_gate, decay, blocks),
            num_warps=blocks.warps, num_stages=1, enable_fp_fusion=False,
        )  # fmt: skip


def window_commit(window: Tensor, inputs: Tensor, rows: Tensor, lengths: Tensor, path: Tensor) -> None:
    """Runs the operator in one launch, for any dtype; a CUDA graph can capture it."""
    from .triton_kernel import move_windows

    check_windows(window, inputs, rows, lengths, path)
    if argument_checks.can_read_values(window):
        check_window_data(window, inputs, rows, lengths, path)
    check_whole_rows("window_commit", "window", window, "[R, W - 1, C]")
    (capacity, held, channels), batch = window.shape, len(rows)
    if batch and path.shape[1] and window.numel() and len(inputs):
        move_windows[(-(-channels // CHANNELS), batch)](
            window, inputs.contiguous(), *in_one_piece(rows, lengths, path), len(inputs), capacity, path.shape[1],
            window.stride(0), CHANNELS=channels, HELD=held, BLOCK_W=power_of_two(held, 1), BLOCK_C=CHANNELS,
            num_warps=4, num_stages=1,
        )  # fmt: skip


_INTEGERS = dict.fromkeys(("rows_ptr", "lengths_ptr", "path_ptr"), "*i32")
_SIZES = dict.fromkeys(("num_nodes", "num_rows", "path_width"), "i32")


def _replay(name: str, gate: int, everyday: bool = False) -> Variant:
    heads, groups, keys, width = (1, 1, 16, 8192) if gate == 2 else (32, 16, 128, 128)
    blocks = choose_blocks(keys, width)
    floats = dict.fromkeys(("state_ptr", "key_ptr", "value_ptr", "gate_ptr", "decay_ptr"), "*fp32")
    model = {"HEADS": heads, "GROUPS": groups, "KEYS": keys, "WIDTH": width}
    return Variant(
        f"state_commit/{name}",
        "state_commit.triton_kernel:replay_path",
        {**floats, **_INTEGERS, **_SIZES, "state_stride": "i32:16"},
        {**model, "BLOCK_K": blocks.keys, "BLOCK_V": blocks.columns, "GATE": gate},
        blocks.warps,
        stages=1,
        everyday=("sm_90",) if everyday else (),
        fusion=False,
    )


def _windows(dtype: str, everyday: bool = False) -> Variant:
    return Variant(
        f"state_commit/windows {dtype}",
        "state_commit.triton_kernel:move_windows",
        {"window_ptr": f"*{dtype}", "inputs_ptr": f"*{dtype}", **_INTEGERS, **_SIZES, "window_stride": "i32:16"},
        {"CHANNELS": 8192, "HELD": 3, "BLOCK_W": 4, "BLOCK_C": CHANNELS},
        stages=1,
        everyday=("sm_90",) if everyday else (),
    )


VARIANTS = [
    _replay("states", 0, everyday=True),
    _replay("states gates of channels", 1),
    _replay("states gates of elements", 2),
    _windows("bf16", everyday=True),
    _windows("fp32"),
]
