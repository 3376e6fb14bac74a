"""Counter-based random numbers: Philox4x32-10 words and the noise that they give, defined here for all backends.

A word is a pure function of (request seed, stream, position, index, token id). It does not depend on the place of a row
in the batch, on the number of earlier steps or on the state of a generator. ``csrc/random.h`` is the same arithmetic in
C++.

All backends produce equal bits. The exponential and the Gumbel variate are float32 polynomials of plain multiplications
and additions, without fused multiply-add, division or library functions. Do not compile these functions with a compiler
that contracts ``a * b + c``.

Philox: Salmon, Moraes, Dror and Shaw 2011, "Parallel random numbers: as easy as 1, 2, 3", section 3.3.
"""

from __future__ import annotations

import torch
from torch import Tensor

REPLAY = 0
"""Noise shared by target and drafter: position = absolute position of the sampled token, index = 0."""
ACCEPT = 1
"""Uniform draws of acceptance: position = position of the step's root, index = node within its row, token = 0."""
DRAFT = 2
"""Token noise of a draft sample: position = position of the step's root, index = draw."""
RECOVER = 3
"""Token noise of recovered and bonus tokens: position = position of the step's root, index = number accepted."""
DRAFT_BLOCK = 4
"""Block noise of DRAFT samples (token = block)."""
RECOVER_BLOCK = 5
"""Block noise of RECOVER samples (token = block)."""
_BLOCK_STREAM = {DRAFT: DRAFT_BLOCK, RECOVER: RECOVER_BLOCK}

BLOCK = 1024
"""Token ids per block of two-level Gumbel-max."""

_MASK = 0xFFFFFFFF
_SPLIT = 1 << 29  # smaller words (x < 1/8) use the polynomial that keeps tiny exponentials precise
_INV32 = 2.0**-32
# Minimax fits, float32-representable. -log1p(-x) = x + x^2 Q(x) on [0, 1/8];
# log(1 + f) = f - f^2 / 2 + f^3 P(f) on [sqrt(1/2) - 1, sqrt(2) - 1]. Lowest degree first.
_Q = (0.5000001788139343, 0.3333158791065216, 0.2506265640258789, 0.1903098225593567, 0.23242275416851044)
_P = (
    0.33333316445350647,
    -0.25000810623168945,
    0.2000228613615036,
    -0.16624553501605988,
    0.14181196689605713,
    -0.13128767907619476,
    0.12881621718406677,
    -0.07859545946121216,
)
_LN2_HIGH = 0.693359375  # ten bits, so exponent * _LN2_HIGH is exact
_LN2_LOW = -0.00021219444170128554
_SQRT_HALF_BITS = 0x3F3504F3


def _int64(value: Tensor | int, device: torch.device) -> Tensor:
    return torch.as_tensor(value, dtype=torch.int64, device=device)


def philox(
    c0: Tensor | int, c1: Tensor | int, c2: Tensor | int, c3: Tensor | int, seed: Tensor | int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns four Philox4x32-10 words for a counter and a 64-bit seed.

    Args:
        c0: First counter word, broadcastable like all arguments. The low 32 bits of counter words are used.
        c1: Second counter word.
        c2: Third counter word.
        c3: Fourth counter word.
        seed: Key; its low half is key word 0, its high half key word 1.

    Returns:
        Four int64 tensors of the broadcast shape with values in [0, 2**32).
    """
    device = next((c.device for c in (c0, c1, c2, c3, seed) if isinstance(c, Tensor)), torch.device("cpu"))
    x0, x1, x2, x3 = (_int64(c, device) & _MASK for c in (c0, c1, c2, c3))
    key = _int64(seed, device)
    k0, k1 = key & _MASK, (key >> 32) & _MASK
    for _ in range(10):
        # int64 products wrap modulo 2**64; shifting and masking still gives the right halves
        first, second = x0 * 0xD2511F53, x2 * 0xCD9E8D57
        x0, x1, x2, x3 = (
            ((second >> 32) & _MASK) ^ x1 ^ k0,
            second & _MASK,
            ((first >> 32) & _MASK) ^ x3 ^ k1,
            first & _MASK,
        )
        k0, k1 = (k0 + 0x9E3779B9) & _MASK, (k1 + 0xBB67AE85) & _MASK
    x0, x1, x2, x3 = torch.broadcast_tensors(x0, x1, x2, x3)
    return x0, x1, x2, x3


def words(
    seed: Tensor | int, position: Tensor | int, index: Tensor | int, stream: Tensor | int, token: Tensor | int
) -> Tensor:
    """Returns one random word per element.

    The counter is (token >> 2, position, index, stream), and ``token & 3`` selects the word.

    Args:
        seed: Request seeds, broadcastable like all arguments.
        position: Absolute positions.
        index: Indices within the stream; see the constants of this module.
        stream: REPLAY, ACCEPT or another stream.
        token: Token ids.

    Returns:
        int64 tensor of the broadcast shape with values in [0, 2**32).
    """
    device = next((a.device for a in (seed, position, index, token) if isinstance(a, Tensor)), torch.device("cpu"))
    token = _int64(token, device)
    four = philox(token >> 2, position, index, stream, seed)
    lane = (token & 3).expand_as(four[0])
    return torch.where(lane < 2, torch.where(lane == 0, four[0], four[1]), torch.where(lane == 2, four[2], four[3]))


def span_words(seeds: Tensor, positions: Tensor, index: Tensor | int, stream: int, count: int) -> Tensor:
    """Returns the words of tokens 0 .. count - 1 for every row, int64 [R, count]. ``index`` is [R] or an int."""
    device = seeds.device
    quads = torch.arange((count + 3) // 4, device=device, dtype=torch.int64)
    index = _int64(index, device)
    index = index[:, None] if index.ndim else index
    four = philox(quads[None, :], positions[:, None], index, stream, seeds[:, None])
    return torch.stack(four, dim=-1).flatten(1)[:, :count]


def _log(y: Tensor) -> Tensor:
    """Computes the natural logarithm of positive normal float32 by multiplications and additions, to about one ulp."""
    bits = y.contiguous().view(torch.int32)
    exponent = (bits - _SQRT_HALF_BITS) >> 23
    f = (bits - (exponent << 23)).view(torch.float32) - 1.0  # 1 + f in [sqrt(1/2), sqrt(2))
    e = exponent.to(torch.float32)
    poly = torch.full_like(f, _P[-1])
    for coefficient in reversed(_P[:-1]):
        poly = poly * f + coefficient
    square = f * f
    tail = poly * f * square
    tail = tail + e * _LN2_LOW
    tail = tail - square * 0.5
    return (f + tail) + e * _LN2_HIGH


def exponential(word: Tensor) -> Tensor:
    """Transforms words to standard exponential variates, E = -log(1 - x) with x = (word + 1/2) / 2**32.

    Words below 2**29 use a polynomial in x. Small values therefore keep their full relative precision, which matters
    because they win. All others use the logarithm of 1 - x.

    Args:
        word: Random words, int64 in [0, 2**32), any shape.

    Returns:
        float32 variates in [2**-33, 22.9].
    """
    x = (word.to(torch.float32) + 0.5) * _INV32
    poly = torch.full_like(x, _Q[-1])
    for coefficient in reversed(_Q[:-1]):
        poly = poly * x + coefficient
    small = x + (x * x) * poly
    y = ((_MASK - word).to(torch.float32) + 0.5) * _INV32
    return torch.where(word < _SPLIT, small, -_log(y))


def gumbel(word: Tensor) -> Tensor:
    """Returns standard Gumbel variates of words, -log(exponential(word)): float32 in about [-3.14, 22.88]."""
    return -_log(exponential(word))


def uniform(word: Tensor) -> Tensor:
    """Transforms words to uniform variates strictly inside (0, 1).

    They have 23 bits. With 24, the addition of one half would round the largest value up to 1.

    Args:
        word: Random words, int64 in [0, 2**32), any shape.

    Returns:
        float32 variates, multiples of 2**-24.
    """
    return ((word >> 9).to(torch.float32) + 0.5) * 2.0**-23


def replay_noise(seeds: Tensor, positions: Tensor, vocab: int) -> Tensor:
    """Returns the Gumbel noise that target and drafter share, for every token id.

    Args:
        seeds: Request seeds, int64 [R].
        positions: Absolute positions of the sampled tokens, int32 [R].
        vocab: Number of token ids.

    Returns:
        float32 [R, vocab].
    """
    return gumbel(span_words(seeds, positions, 0, REPLAY, vocab))


def sample_from_weights(
    weights: Tensor,
    seeds: Tensor | None,
    positions: Tensor | None,
    index: Tensor | None,
    stream: int = RECOVER,
    gumbel_noise: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """Samples one token per row from unnormalised weights by two-level Gumbel-max.

    The vocabulary is split into blocks of ``BLOCK`` ids. The block with the largest ``log(mass) + gumbel`` wins, then
    its token with the largest ``log(weight) + gumbel``. The noise of both levels is independent, so the distribution is
    that of the weights. A sample needs one word per block, and one per token of a single block. Tokens of weight zero
    never win. Ties go to the lower id. A row without any weight gives token 0.

    Args:
        weights: float32 or float64 [R, V], not negative.
        seeds: Request seeds, int64 [R]. Unused with `gumbel_noise`, like the next two.
        positions: Absolute positions of the roots, int32 [R].
        index: Number of each draw within its step, int32 [R].
        stream: DRAFT or RECOVER.
        gumbel_noise: Gumbel noise (blocks [R, ceil(V / BLOCK)], tokens [R, V]), float32, in place of keyed noise.

    Returns:
        Token ids, int64 [R].
    """
    rows, vocab_size = weights.shape
    if rows == 0:
        return torch.zeros(0, dtype=torch.int64, device=weights.device)
    count = (vocab_size + BLOCK - 1) // BLOCK
    width = BLOCK if count > 1 else vocab_size
    padded = torch.nn.functional.pad(weights, (0, count * width - vocab_size)).view(rows, count, width)
    mass = padded.sum(-1, dtype=torch.float64).to(weights.dtype)
    if gumbel_noise is None:
        assert seeds is not None and positions is not None and index is not None
        block_noise = gumbel(span_words(seeds, positions, index, _BLOCK_STREAM[stream], count))
    else:
        block_noise = gumbel_noise[0]
    block = (mass.log() + block_noise).argmax(-1)
    inside = padded[torch.arange(rows, device=weights.device), block]
    ids = block[:, None] * BLOCK + torch.arange(width, device=weights.device)
    if gumbel_noise is None:
        assert seeds is not None and positions is not None and index is not None
        noise = gumbel(words(seeds[:, None], positions[:, None], index[:, None], stream, ids))
    else:
        noise = gumbel_noise[1].gather(1, ids.clamp(max=vocab_size - 1))
    best = (inside.log() + noise).argmax(-1)
    return ids.gather(1, best[:, None]).squeeze(1)
