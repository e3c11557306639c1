"""Inputs of the acceptance kernels."""

from typing import Any

import torch


def draft_inputs(
    num_rows: int, num_drafts: int, vocab_size: int, drafter: str, device: str, dtype: torch.dtype
) -> dict[str, Any]:
    """Arguments of verify_drafts but for the method: drafts of which many are kept, in rows of all lengths.

    Args: drafter: "full", "reduced" to half of the vocabulary, or "one-hot".
    """
    generator = torch.Generator(device).manual_seed(num_rows + vocab_size)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, device=device)

    target = 3 * normal(num_rows, num_drafts + 1, vocab_size)
    target[:, :, : vocab_size // 10] = -torch.inf  # left out by top-k, say
    drafts = target[:, :num_drafts].nan_to_num(neginf=-9.0) + normal(num_rows, num_drafts, vocab_size)
    inputs: dict[str, Any] = {}
    if drafter == "reduced":
        inputs["to_draft"] = torch.full((vocab_size,), -1, dtype=torch.int32, device=device)
        known = torch.randperm(vocab_size, generator=generator, device=device)[: vocab_size // 2]
        inputs["to_draft"][known] = torch.arange(vocab_size // 2, dtype=torch.int32, device=device)
        ids = known[drafts[:, :, known].argmax(-1)]
        drafts = drafts[:, :, known]
    else:
        ids = drafts.argmax(-1)
    if drafter != "one-hot":
        inputs["draft_logits"] = drafts.to(dtype)
    unit = torch.rand(num_rows, num_drafts, generator=generator, device=device)
    return inputs | {
        "target_logits": target.to(dtype),
        "draft_ids": ids,
        "num_drafts": torch.arange(num_rows, device=device) % (num_drafts + 1),
        "uniforms": unit.clamp(1e-9, 1 - 2**-24),
    }
