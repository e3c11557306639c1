"""Triton where it is installed: modules with kernels can be imported everywhere, and launched where it is.

Where there is no Triton, `tl` stands in for what the definition of a kernel touches; its body never runs.
"""

import functools
from collections.abc import Callable, Hashable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar
from types import SimpleNamespace
from typing import Any

import torch

from server.host import cpu_count

try:
    import triton
    import triton.language

    tl = triton.language
except ModuleNotFoundError:  # no wheel for this platform
    triton = None
    tl = SimpleNamespace(constexpr=int, tensor=object)

ALIGNMENT = 16
"""Bytes; Triton makes other code for pointers that are not aligned to them."""
MAX_COMPILERS = 8
"""Kernels that are compiled side by side; each takes a core."""
INTERPRETER_MULTIPROCESSORS = 2
"""What is assumed where the interpreter runs: few, so that small tests are split."""
_rehearsed: ContextVar[set[Hashable] | None] = ContextVar("rehearsed", default=None)
"""What was launched in a rehearsal, so that each is looked at once; None outside."""


def is_available(device: torch.device) -> bool:
    """Whether kernels are to be launched for tensors of a device; their eager twins serve the others."""
    return device.type == "cuda" and triton is not None


def jit(*, unspecialised: Sequence[str] = (), is_slow_to_compile: bool = False) -> Callable[[Callable[..., Any]], Any]:
    """Compile a function as a kernel, or as a part of one, at its first launch.

    Args:
        unspecialised: arguments that change from step to step. Triton compiles anew for an integer that
            becomes 1 or a multiple of 16, and for a pointer that is no longer aligned to 16 bytes; a step
            must not wait for that.
        is_slow_to_compile: it is only compiled in rehearsals. What it writes is nobody's index: there it is anything.
    """

    def decorate(function: Callable[..., Any]) -> Any:
        if triton is None:
            return function
        names = list(unspecialised)
        options = {"do_not_specialize": names, "do_not_specialize_on_alignment": names}
        if is_slow_to_compile and not triton.knobs.runtime.interpret:
            return _rehearsed_kernel(function, options)
        return triton.jit(function, **options)

    return decorate


def _rehearsed_kernel(function: Callable[..., Any], options: dict[str, list[str]]) -> Any:
    class RehearsedKernel(triton.JITFunction):  # type: ignore[misc]  # Triton is not typed
        def run(self, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
            rehearsed = _rehearsed.get()
            if rehearsed is None:
                return super().run(*args, grid=grid, warmup=warmup, **options)
            launch = (self, *map(_kind, args), *options.items())
            if launch not in rehearsed:
                rehearsed.add(launch)
                super().run(*args, grid=grid, warmup=True, **options)
            return None

    return RehearsedKernel(function, **options)


def _kind(argument: Any) -> Hashable:
    """All that code may be specialised for."""
    if isinstance(argument, torch.Tensor):
        return argument.dtype, argument.data_ptr() % ALIGNMENT
    value: Hashable = argument
    return value


@contextmanager
def rehearsing() -> Iterator[None]:
    """Compile kernels side by side: those that are slow to compile are not run meanwhile, and leave anything behind.

    At the end all of them are compiled. What is launched by other threads is not affected.
    """
    with ThreadPoolExecutor(min(MAX_COMPILERS, cpu_count())) as pool, triton.AsyncCompileMode(pool):
        before = _rehearsed.set(set())
        try:
            yield
        finally:
            _rehearsed.reset(before)


def ceil_div(value: int, divisor: int) -> int:
    """Quotient of non-negative integers, rounded up."""
    return -(-value // divisor)


def next_power_of_2(value: int) -> int:
    """The smallest power of two that is not below a positive integer."""
    return 1 << (value - 1).bit_length()


@functools.cache
def num_multiprocessors(device: torch.device) -> int:
    """How many programs run at once, at least."""
    if device.type != "cuda":
        return INTERPRETER_MULTIPROCESSORS
    return torch.cuda.get_device_properties(device).multi_processor_count
