"""Random numbers as a pure function of a key and a position.

There is no generator state: the same key and position give the same numbers on every device, in
every batch, at every pipeline depth. The integer mixing is Chris Wellons' `lowbias32`
(nullprogram.com/blog/2018/07/31), two rounds over 32-bit words.
"""

import enum

import torch
from torch import Tensor


def _signed(value: int, width: int) -> int:
    """The signed word with the same bits as an unsigned constant."""
    value &= (1 << width) - 1
    return value - (1 << width) if value >> (width - 1) else value


_GOLDEN_64 = 0x9E3779B97F4A7C15  # 2^64 / phi
_MIX_64 = _signed(0xBF58476D1CE4E5B9, 64), _signed(0x94D049BB133111EB, 64)
_GOLDEN_32 = _signed(0x9E3779B9, 32)
_MIX_32 = _signed(0x7FEB352D, 32), _signed(0x846CA68B, 32)


class Stream(enum.IntEnum):
    """What the numbers are used for; streams of one key are independent."""

    TARGET = 1
    ACCEPT = 2
    RESAMPLE = 3
    DRAFT = 4


def _shift_right(x: Tensor, bits: int, width: int) -> Tensor:
    """Logical shift of signed words, which torch shifts arithmetically."""
    return (x >> bits) & ((1 << (width - bits)) - 1)


def _mix_64(x: Tensor) -> Tensor:
    """The finaliser of splitmix64 (Steele et al. 2014), on int64."""
    x = (x ^ _shift_right(x, 30, 64)) * _MIX_64[0]
    x = (x ^ _shift_right(x, 27, 64)) * _MIX_64[1]
    return x ^ _shift_right(x, 31, 64)


def _mix_32(x: Tensor) -> Tensor:
    """lowbias32, in place on int32."""
    x ^= _shift_right(x, 16, 32)
    x *= _MIX_32[0]
    x ^= _shift_right(x, 15, 32)
    x *= _MIX_32[1]
    x ^= _shift_right(x, 16, 32)
    return x


def _state(key: Tensor, position: Tensor, stream: Stream) -> tuple[Tensor, Tensor]:
    """Two int32 words for each key and position."""
    state = _mix_64(_mix_64(key + _signed(_GOLDEN_64 * stream, 64)) + position * _signed(_GOLDEN_64, 64))
    return state.to(torch.int32), _shift_right(state, 32, 64).to(torch.int32)


def in_stream(key: Tensor, stream: Stream, of: Stream) -> Tensor:
    """The key that has in the stream `of` what `key` has in another; int64."""
    return key + _signed(_GOLDEN_64 * (stream - of), 64)


def _to_unit(words: Tensor) -> Tensor:
    """int32 words as float32 in (0, 1); small values keep their relative precision."""
    unsigned = words.to(torch.float32) + (words < 0) * float(1 << 32)
    return ((unsigned + 0.5) * 2.0**-32).clamp_(max=1 - 2.0**-24)


def uniform(key: Tensor, position: Tensor, stream: Stream) -> Tensor:
    """One float32 in (0, 1) for each key and position, int64 tensors of one shape."""
    low, high = _state(key, position, stream)
    return _to_unit(_mix_32(_mix_32(low.clone()) ^ high))


def gumbel(key: Tensor, position: Tensor, stream: Stream, vocabulary: int | Tensor) -> Tensor:
    """Standard Gumbel noise: int64 keys and positions of one shape -> [..., tokens] float32.

    -log(-log1p(-u)) resolves the upper tail, which decides an argmax, down to 2^-32.

    Args: vocabulary: the ids below it, or [tokens] integers, some ids.
    """
    low, high = _state(key, position, stream)
    if isinstance(vocabulary, int):
        index = torch.arange(vocabulary, dtype=torch.int32, device=key.device)
    else:
        index = vocabulary.int()
    words = _mix_32(index * _GOLDEN_32 ^ low[..., None])
    words = _mix_32(words ^ high[..., None])
    return _to_unit(words).neg_().log1p_().neg_().log_().neg_()
