"""What an EAGLE head computes between token ids and what its output projection takes, as one module."""

from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional

from proposers.decoder_kinds import kind_of
from proposers.eagle_checkpoint import EagleHead
from proposers.eagle_layers import Eagle3Layers, EagleLayers
from server.model.attention import AttentionStep


class RunsBody(Protocol):
    """What computes as EagleBody does."""

    def __call__(self, hidden: Tensor, token_ids: Tensor, step: AttentionStep) -> Tensor: ...

    def condense(self, features: Tensor) -> Tensor: ...

    def output(self, hidden: Tensor) -> Tensor: ...


class EagleBody(nn.Module):
    """Embedding, rotary positions and layers; over flat tokens."""

    embedding: Tensor

    def __init__(self, head: EagleHead, layers: EagleLayers | Eagle3Layers, embedding: Tensor) -> None:
        """Args: embedding: [target's vocabulary, hidden], perhaps the target's own."""
        super().__init__()
        self.layers = layers
        self.rotary: Any = kind_of(head.config).rotary(head.config).to(embedding.device)
        self.register_buffer("embedding", embedding, persistent=False)

    def condense(self, features: Tensor) -> Tensor:
        """[T, features] -> [T, hidden]."""
        return self.layers.condense(features)

    def forward(self, hidden: Tensor, token_ids: Tensor, step: AttentionStep) -> Tensor:
        """[T, hidden] condensed, [T] int64 -> [T, hidden]; positions are the step's."""
        return self.at(hidden, token_ids, step.positions, attention_step=step)

    def at(self, hidden: Tensor, token_ids: Tensor, positions: Tensor, **context: Any) -> Tensor:
        """The same at positions, [T] int64. Args: context: what attention wants besides."""
        embeds = functional.embedding(token_ids, self.embedding)[None]
        output: Tensor = self.layers(
            embeds,
            hidden[None],
            attention_mask=None,
            position_ids=positions[None],
            position_embeddings=self.rotary(embeds, position_ids=positions[None]),
            **context,
        )
        return output[0]

    def output(self, hidden: Tensor) -> Tensor:
        """[n, hidden] -> [n, hidden], what the output projection takes."""
        return self.layers.output(hidden)


def empty_layers(head: EagleHead, target_hidden_size: int) -> EagleLayers | Eagle3Layers:
    """A head's layers without memory."""
    kind = EagleLayers if head.kind == "eagle" else Eagle3Layers
    with torch.device("meta"):
        return kind(head, target_hidden_size)
