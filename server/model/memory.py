"""Whether the weights fit, asked before they are loaded."""

import torch

from server.errors import ModelError
from server.host import available_memory_nbytes
from server.model.weights import WeightFiles

_GIB = 1 << 30
# Sizes of types that keep their own width: everything that is not a float.
_INTEGER_NBYTES = {"I64": 8, "U64": 8, "I32": 4, "U32": 4, "I16": 2, "U16": 2, "I8": 1, "U8": 1, "BOOL": 1}


def weights_nbytes(weights: WeightFiles, dtype: torch.dtype) -> int:
    """Bytes the weights take once every float among them is of type `dtype`."""
    return sum(
        tensor.num_elements * (dtype.itemsize if tensor.is_float else _INTEGER_NBYTES.get(tensor.dtype, 8))
        for tensor in weights.tensors.values()
    )


def check_fits(name: str, weights: WeightFiles, device: torch.device, dtype: torch.dtype) -> None:
    """Raises: ModelError naming both sizes if the weights alone are larger than the memory that is free."""
    needed = weights_nbytes(weights, dtype)
    available = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else available_memory_nbytes()
    if needed > available:
        where = "free on the GPU" if device.type == "cuda" else "free for this process"
        narrower = "" if dtype.itemsize <= 2 else " --dtype bfloat16 halves it;"
        raise ModelError(
            f"{name} is too big for {device}: its weights take {needed / _GIB:.2f} GiB in {_name(dtype)}, and "
            f"{available / _GIB:.2f} GiB are {where};{narrower} free memory or serve a smaller model"
        )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
