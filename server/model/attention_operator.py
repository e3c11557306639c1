"""Attention as one operator, for code that is traced and compiled in this process.

How attention is launched follows from a step's groups, which the host knows and which change from step to
step: traced, they would be constants that compiled code is guarded on. So a tracer sees an operator of
tensors alone, which finds the step where the caller left it (`attending`).
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface

from server.kernels import jit
from server.model.attention import (
    OPERATOR_ATTENTION_NAME,
    AttentionOptions,
    AttentionStep,
    attend_by_tensors,
    attend_on_cuda,
)


class _Current(threading.local):
    """The step that this thread is in: engines in one process each have a step thread."""

    step: AttentionStep | None = None


_current = _Current()


@contextmanager
def attending(step: AttentionStep) -> Iterator[None]:
    """Let the operator attend as `step` says, on this thread."""
    before, _current.step = _current.step, step
    try:
        yield
    finally:
        _current.step = before


# Not torch.library.custom_op, which costs some 50 microseconds more for each layer of a step that is not replayed.
torch.library.define(
    "outrider::attend",
    "(Tensor(a!) layer, Tensor query, Tensor key, Tensor value, float scaling, int? sliding_window, float? softcap, "
    "Tensor? sinks) -> Tensor",
)


@torch.library.impl("outrider::attend", ("cuda", "cpu"))
def _attend(
    layer: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scaling: float,
    sliding_window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Store the new keys and values of a layer, then attend to its blocks, in the current step.

    Args:
        layer: [num_blocks, kv_heads, block_size, 2 * head_dim]. query: [T, heads, head_dim].
        key, value: [T, kv_heads, head_dim]. The others: see AttentionOptions.

    Returns: [T, heads, head_dim], contiguous.
    """
    step = _current.step
    assert step is not None, "only inside `attending`"
    implementation = attend_on_cuda if jit.is_available(query.device) else attend_by_tensors
    return implementation(step, layer, query, key, value, AttentionOptions(scaling, sliding_window, softcap, sinks))


def _shape(_: Tensor, query: Tensor, *__: Any) -> Tensor:
    return torch.empty_like(query, memory_format=torch.contiguous_format)


torch.library.register_fake("outrider::attend", _shape)


def attention_by_operator(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """What transformers calls; its shapes are those of attention.py's functions."""
    layer: Tensor = module.kv_blocks  # type: ignore[assignment]  # torch takes attributes for modules
    query, key, value = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    attend = torch.ops.outrider.attend.default
    return attend(layer, query, key, value, scaling, sliding_window, softcap, s_aux)[None], None


AttentionInterface.register(OPERATOR_ATTENTION_NAME, attention_by_operator)
