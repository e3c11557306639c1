"""Kernels that are only compiled in a rehearsal."""

from typing import Any
from unittest.mock import patch

import pytest
import torch

from server.kernels import jit

triton = pytest.importorskip("triton")


def half(x_ptr: Any, block: jit.tl.constexpr) -> None:
    """What a kernel looks like; never run here."""


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, bool]]:
    """By what is launched, whether it is only compiled; without a device."""
    seen: list[tuple[str, bool]] = []

    def run(kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        seen.append((kernel.__name__, warmup))

    monkeypatch.setattr(triton.JITFunction, "run", run)
    monkeypatch.setattr(triton.knobs.runtime, "interpret", False)
    return seen


def test_slow_kernels_are_only_compiled_in_a_rehearsal(launches: list[tuple[str, bool]]) -> None:
    slow, quick = jit.jit(is_slow_to_compile=True)(half), jit.jit()(half)
    slow[(1,)](0, block=16)
    with jit.rehearsing():
        slow[(1,)](0, block=16)
        quick[(1,)](0, block=16)
    slow[(1,)](0, block=16)
    assert launches == [("half", False), ("half", True), ("half", False), ("half", False)]


def test_a_rehearsal_looks_at_each_launch_once(launches: list[tuple[str, bool]]) -> None:
    """Unless code could be other for it: by type and alignment of tensors, by numbers, by options."""
    slow = jit.jit(is_slow_to_compile=True)(half)
    numbers = torch.zeros(8)
    given = (numbers, numbers.clone(), numbers[1:], numbers.half(), 1, 2)
    with jit.rehearsing():
        for argument in (*given, *given):
            slow[(1,)](argument, block=16)
        slow[(1,)](numbers, block=32)
    assert launches == [("half", True)] * 6


def test_a_rehearsal_that_fails_is_over(launches: list[tuple[str, bool]]) -> None:
    slow = jit.jit(is_slow_to_compile=True)(half)
    with pytest.raises(KeyError), jit.rehearsing():
        raise KeyError
    slow[(1,)](0, block=16)
    assert launches == [("half", False)]


def test_interpreted_kernels_stay_as_they_are() -> None:
    with patch.object(triton.knobs.runtime, "interpret", True):
        assert type(jit.jit(is_slow_to_compile=True)(half)) is type(jit.jit()(half))
