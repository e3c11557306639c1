"""Draws tokens and verifies drafts on the CPU: operators in C++, built when first loaded.

A pass or two over a row of logits, and only over rows that matter: those behind a refused draft are never looked at.
"""

import functools
from pathlib import Path

import torch
from torch import Tensor

from server.kernels.cpu_build import load_operators

SOURCE = Path(__file__).with_name("cpu_sampling.cpp")
HEADERS = (Path(__file__).with_name("cpu_vector.h"),)


@functools.cache
def load(folder: Path) -> bool:
    """Make the operators available, in some seconds where `folder` does not hold them yet.

    Returns: False, after one line in the log that names the cause, where that is impossible.
    """
    return load_operators(SOURCE, HEADERS, folder, "sampling on the CPU will be slow")


def uniform(key: Tensor, position: Tensor, stream: int) -> Tensor:
    """See noise.uniform, its twin; bit by bit the same, without a pass for each step of the mixing."""
    numbers: Tensor = torch.ops.outrider.cpu_uniform(
        key.flatten().contiguous(), position.flatten().contiguous(), stream
    )
    return numbers.view(position.shape)


def argmax(logits: Tensor) -> tuple[Tensor, Tensor]:
    """The first id of the highest logit, and that, of each row.

    Args: logits: [..., vocab] float32.
    Returns: [...] int64, some id or other where there is NaN; [...] float32, then NaN.
    Raises: RuntimeError for another type.
    Twin: torch.argmax.
    """
    ids, scores = torch.ops.outrider.cpu_argmax(logits.contiguous().flatten(0, -2))
    return ids.view(logits.shape[:-1]), scores.view(logits.shape[:-1])


def draw(logits: Tensor, coins: Tensor) -> Tensor:
    """One token for each row, from the softmax by one uniform number.

    Args: logits: [n, vocab] float32. coins: [n] float32 in [0, 1).
    Returns: [n] int64, some id or other where a row has NaN or infinity, or nothing to choose.
    Raises: RuntimeError for shapes and types that do not fit.
    Twin: rejection_reference.draw.
    """
    ids: Tensor = torch.ops.outrider.cpu_draw(logits.contiguous(), coins.contiguous())
    return ids


def verify_drafts(
    target_logits: Tensor,
    draft_ids: Tensor,
    num_drafts: Tensor,
    uniforms: Tensor,
    coins: Tensor,
    method: int,
    draft_logits: Tensor | None = None,
    to_draft: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """See rejection.verify_drafts; the methods are STANDARD and BLOCK, and the token that follows is drawn, too.

    Args:
        target_logits: [M, k + 1, vocab] float32. draft_ids: [M, k] int64, in the vocabulary up to a row's count.
        coins: [M] float32 in [0, 1), what the token that follows is drawn by.
        draft_logits: [M, k, draft vocab] float32.

    Returns: [M] int64, drafts kept; [M] int64, the token that follows; and [M, k + 1] float32, the highest logit of
        each position up to that token, see sampler.Chosen.scores.
    Raises: RuntimeError for shapes, types and ids that do not fit.
    Twin: rejection_reference.verify_drafts, and rejection_reference.draw from its weights.
    """
    verified: tuple[Tensor, Tensor, Tensor] = torch.ops.outrider.cpu_verify_drafts(
        target_logits.contiguous(),
        draft_ids.contiguous(),
        num_drafts.contiguous(),
        uniforms.contiguous(),
        coins.contiguous(),
        method,
        None if draft_logits is None else draft_logits.contiguous(),
        to_draft,
    )
    return verified
