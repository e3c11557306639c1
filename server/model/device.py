"""Chooses the device and the type a model is computed in, and says why."""

import torch

from server.errors import ConfigError

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


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


def _why_no_cuda() -> str:
    if torch.version.cuda is None:
        return "this build of torch is for the CPU only"
    return "torch finds no usable NVIDIA GPU or driver"
