"""The random numbers of noise.py inside kernels, word for word, and a launch for those that coins are made of."""

import torch
from torch import Tensor

from server.kernels.jit import jit, next_power_of_2, tl


@jit()
def _mix_64(x: tl.tensor) -> tl.tensor:
    """The finaliser of splitmix64, on uint64."""
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)


@jit()
def mix_32(x: tl.tensor) -> tl.tensor:
    """lowbias32, on uint32."""
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    return x ^ (x >> 16)


@jit()
def state(key: tl.tensor, position: tl.tensor, STREAM: tl.constexpr) -> tuple[tl.tensor, tl.tensor]:
    """Two uint32 words of an int64 key and position. STREAM: see `stream_word`."""
    key, position = key.to(tl.uint64, bitcast=True), position.to(tl.uint64, bitcast=True)
    word = _mix_64(_mix_64(key + STREAM) + position * 0x9E3779B97F4A7C15)
    return word.to(tl.uint32), (word >> 32).to(tl.uint32)


@jit()
def to_unit(word: tl.tensor) -> tl.tensor:
    """uint32 words as float32 in (0, 1)."""
    signed = word.to(tl.int32, bitcast=True)
    unsigned = signed.to(tl.float32) + tl.where(signed < 0, 4294967296.0, 0.0)  # rounds as the twin does
    return tl.minimum((unsigned + 0.5) * 2.3283064365386963e-10, 1.0 - 5.9604644775390625e-08)  # 2^-32, 2^-24


def stream_word(stream: int) -> int:
    """What kernels are told of a Stream."""
    return stream * 0x9E3779B97F4A7C15 % 2**64


@jit(unspecialised=("key_ptr", "first_ptr"))
def _uniform_kernel(
    key_ptr: tl.tensor,
    first_ptr: tl.tensor,
    numbers_ptr: tl.tensor,
    STREAM: tl.constexpr,
    COUNT: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """The numbers of one row (axis 0)."""
    row, index = tl.program_id(0), tl.arange(0, BLOCK)
    position = tl.load(first_ptr + row) + index
    low, high = state(tl.load(key_ptr + row), position, STREAM)
    tl.store(numbers_ptr + row * COUNT + index, to_unit(mix_32(mix_32(low) ^ high)), mask=index < COUNT)


def uniforms(key: Tensor, first: Tensor, count: int, stream: int) -> Tensor:
    """[M, count] float32 in (0, 1), those of a key at positions that follow each other.

    Args: key, first: [M] int64, the first position. stream: of kernels.noise.Stream.
    Raises: ValueError, before any launch.
    Twin: noise.uniform.
    """
    if key.dim() != 1 or key.shape != first.shape or key.dtype != torch.int64 or first.dtype != torch.int64:
        raise ValueError(f"keys {tuple(key.shape)} and positions {tuple(first.shape)} are not [M] int64 each")
    if not (key.is_contiguous() and first.is_contiguous()):
        raise ValueError("keys or positions are not contiguous")
    numbers = torch.empty(key.shape[0], count, dtype=torch.float32, device=key.device)
    if numbers.numel():
        block = next_power_of_2(count)
        _uniform_kernel[(key.shape[0],)](
            key, first, numbers, STREAM=stream_word(stream), COUNT=count, BLOCK=block, num_warps=1
        )
    return numbers
