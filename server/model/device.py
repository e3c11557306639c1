"""Chooses the device and the type a model is computed in, and says why."""

import torch

from server.errors import ConfigError
from server.kernels import cpu_attention

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
KV_DTYPES = {**DTYPES, "fp8_e4m3": torch.float8_e4m3fn}
_FIRST_WITH_FP8 = (8, 9)
"""Compute capability."""


def choose_device(name: str) -> tuple[torch.device, str]:
    """The device that "auto", "cpu", "cuda" or "cuda:N" stands for, and the reason, for the start log.

    Raises: ConfigError if CUDA was asked for and is not there, or has no such index.
    """
    if name == "cpu":
        return torch.device("cpu"), "asked for with --device"
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if name == "auto":
        if count == 0:
            return torch.device("cpu"), f"no CUDA device: {_why_no_cuda()}"
        return torch.device("cuda", 0), f"the first of {count} CUDA devices: {torch.cuda.get_device_name(0)}"
    if count == 0:
        raise ConfigError(f"--device {name}: {_why_no_cuda()}; use --device cpu, or install the CUDA build of torch")
    idx = torch.device(name).index or 0
    if idx >= count:
        raise ConfigError(f"--device {name}: the CUDA devices of this machine are cuda:0 to cuda:{count - 1}")
    return torch.device("cuda", idx), f"asked for with --device: {torch.cuda.get_device_name(idx)}"


def choose_dtype(name: str, device: torch.device) -> tuple[torch.dtype, str]:
    """The type that "auto", "bfloat16", "float16" or "float32" stands for on `device`, and the reason.

    Raises: ConfigError if the device cannot compute in the type that was asked for.
    """
    lacks_bfloat16 = device.type == "cuda" and not torch.cuda.is_bf16_supported(including_emulation=False)
    if name == "auto":
        if lacks_bfloat16:
            return torch.float16, "the GPU does not compute in bfloat16"
        return torch.bfloat16, "the default"
    if name == "bfloat16" and lacks_bfloat16:
        raise ConfigError(f"--dtype bfloat16: {device} does not compute in it; use --dtype float16 or float32")
    return DTYPES[name], "asked for with --dtype"


def choose_kv_dtype(name: str, device: torch.device, dtype: torch.dtype, setting: str) -> torch.dtype:
    """The type that "auto" or one of KV_DTYPES stands for in the KV cache of a model computed in `dtype`.

    Args: setting: to be named where it is refused.

    Raises: ConfigError if attention on the device cannot read that type.
    """
    chosen = dtype if name == "auto" else KV_DTYPES[name]
    if device.type == "cpu" and chosen not in (dtype, *cpu_attention.KV_DTYPES):
        raise ConfigError(
            f"{setting}: the CPU keeps float32, bfloat16, fp8_e4m3 or the type that the model computes in, got {name}"
        )
    if device.type == "cuda" and name == "fp8_e4m3" and torch.cuda.get_device_capability(device) < _FIRST_WITH_FP8:
        raise ConfigError(f"{setting}: {device} does not convert {name}, GPUs of compute capability 8.9 and above do")
    return chosen


def _why_no_cuda() -> str:
    if torch.version.cuda is None:
        return "this build of torch is for the CPU only"
    return "torch finds no usable NVIDIA GPU or driver"
