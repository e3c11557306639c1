"""A loaded model as proposers that are networks see it."""

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from proposers.base import TargetModel, TargetOutline, TargetView
from server.model.head import LMHead


def target_model(folder: Path, device: str, dtype: torch.dtype = torch.float32) -> TargetModel:
    """The model in a folder, on plain attention; without a tokenizer."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).to(device).eval().requires_grad_(False)
    return TargetModel(
        model=model,
        head=LMHead.of(model, model.config),
        config=model.config,
        tokenizer=None,
        folder=folder,
        dtype=dtype,
        digest="0" * 64,
        block_size=16,
        max_num_tokens=512,
    )


def target_view(folder: Path, device: str, num_slots: int = 4) -> TargetView:
    """The same as a proposer's `build` gets it."""
    network = target_model(folder, device)
    return TargetView(network.config.vocab_size, torch.device(device), num_slots, network)


def target_outline(target: TargetView) -> TargetOutline:
    """The same as its `check` gets it."""
    network = target.network
    assert network is not None
    return TargetOutline(
        config=network.config,
        tokenizer=network.tokenizer,
        device=target.device,
        dtype=network.dtype,
        trusts_code=False,
        digest=lambda: network.digest,
    )
