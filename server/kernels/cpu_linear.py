"""Linear layers on the CPU: operators in C++, built when first loaded.

The weight lies in the order in which the product reads it, so that a few rows cost no more than
reading it once. A row's result has the same bits in any company and on any number of threads.
"""

import functools
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from server.kernels.cpu_build import load_operators

SOURCE = Path(__file__).with_name("cpu_linear.cpp")
HEADERS = tuple(Path(__file__).with_name(name) for name in ("cpu_multiply.h", "cpu_vector.h"))
DTYPES = (torch.float32, torch.bfloat16)
IN_FEATURES_MULTIPLE = 2


@functools.cache
def load(folder: Path) -> bool:
    """Make the operators available, in some seconds where `folder` does not hold them yet.

    Returns: False, after one line in the log that names the cause, where that is impossible.
    """
    if not load_operators(SOURCE, HEADERS, folder, "linear layers on the CPU will be slow"):
        return False
    torch.library.register_fake("outrider::cpu_linear", _fake_linear)
    return True


def supports(dtype: torch.dtype, in_features: int) -> bool:
    """Whether the operators compute a layer."""
    return dtype in DTYPES and in_features % IN_FEATURES_MULTIPLE == 0


def pack(weight: Tensor) -> Tensor:
    """The weight in the operators' own order.

    Args: weight: [out, in], float32 or bfloat16, contiguous; `in` is even.
    Returns: [tiles, in * columns], of the weight's type.
    Raises: RuntimeError for shapes and types that do not fit.
    """
    packed: Tensor = torch.ops.outrider.cpu_pack_linear(weight)
    return packed


def linear(inputs: Tensor, packed: Tensor, bias: Tensor | None, num_outputs: int) -> Tensor:
    """inputs @ weight.T + bias, added up in float32 and rounded once.

    Args:
        inputs: [T, in], last dimension contiguous. packed: from `pack`, of the same type.
        bias: [out] of the same type, or None.

    Returns: [T, out].
    Raises: RuntimeError for shapes, strides and types that do not fit.
    Twin: torch.nn.functional.linear.
    """
    outputs: Tensor = torch.ops.outrider.cpu_linear(inputs, packed, bias, num_outputs)
    return outputs


def _fake_linear(inputs: Tensor, _packed: Tensor, _bias: Any, num_outputs: int) -> Tensor:
    return inputs.new_empty(inputs.shape[0], num_outputs)
