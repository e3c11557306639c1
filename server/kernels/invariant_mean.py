"""A mean over the last dimension whose rows do not depend on each other.

torch's own spreads a row over as many threads as the number of rows leaves it, and so the order of its sum
changes with the batch. Here it is the width's alone.
"""

from torch import Tensor

from server.kernels.jit import jit, next_power_of_2, tl

MAX_BLOCK = 1024


@jit()
def _mean_kernel(x_ptr: tl.tensor, out_ptr: tl.tensor, width: int, stride_row: int, BLOCK: tl.constexpr) -> None:
    """One row."""
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(0, width, BLOCK):
        place = start + tl.arange(0, BLOCK)
        pointer = x_ptr + tl.program_id(0).to(tl.int64) * stride_row + place
        total += tl.load(pointer, mask=place < width, other=0.0).to(tl.float32)
    mean = tl.sum(total, 0) / width
    tl.store(out_ptr + tl.program_id(0), mean.to(out_ptr.dtype.element_ty))


def invariant_mean(x: Tensor) -> Tensor:
    """The mean of each row, by itself, bit for bit.

    Args: x: [..., width] float32, bfloat16 or float16, last dimension contiguous.
    Returns: [..., 1], of x's type; sums are float32.
    Raises: ValueError, before any launch.
    Twin: x.mean(-1, keepdim=True).
    """
    if x.stride(-1) != 1 or not x.is_floating_point() or x.shape[-1] == 0:
        raise ValueError(f"no mean of {tuple(x.shape)} {x.dtype}, strides {x.stride()}, over its last dimension")
    out = x.new_empty(*x.shape[:-1], 1)
    rows = x.reshape(-1, x.shape[-1])
    if rows.shape[0]:
        width = rows.shape[1]
        _mean_kernel[(rows.shape[0],)](rows, out, width, rows.stride(0), BLOCK=min(next_power_of_2(width), MAX_BLOCK))
    return out
