"""Compiles a function of tensors into a package of AOTInductor."""

import errno
import os
from pathlib import Path
from typing import Any

import torch
from torch import nn

NUM_TOKENS = 22
"""Of an example call. It varies from call to call, and is not 0 or 1, which compilers take for special."""


def compile_package(region: nn.Module, example: tuple[Any, ...], dynamic_shapes: tuple[Any, ...], path: Path) -> None:
    """Compile what `region` computes from tensors alone, for any sizes that are dynamic.

    Args: example, dynamic_shapes: see torch.export.export.
    Raises: OSError if the disk is full; else whatever export or compiler have to say.
    """
    with torch.no_grad():
        program = torch.export.export(region, example, dynamic_shapes=dynamic_shapes, strict=False)
    try:
        torch._inductor.aoti_compile_and_package(
            program,
            package_path=str(path),
            # The header, compiled beforehand, would pay off for many packages only.
            inductor_configs={"cpp_cache_precompile_headers": False},
        )
    except Exception as error:  # compiler, assembler and linker tell it in their output alone
        reason = os.strerror(errno.ENOSPC)
        if reason in str(error):
            raise OSError(errno.ENOSPC, reason) from error
        raise
