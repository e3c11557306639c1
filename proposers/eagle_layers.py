"""The layers of EAGLE and EAGLE-3 heads. Names of their modules are those of published checkpoints."""

from typing import Any

import torch
from torch import Tensor, nn

from proposers.decoder_kinds import kind_of
from proposers.eagle_checkpoint import EagleHead


class EagleLayers(nn.Module):
    """EAGLE: embedding and hidden state to one hidden state, then decoder layers.

    The first layer takes its input as it is, and nothing is normalised behind the last.
    Source: Li et al. 2024, arXiv:2401.15077.
    """

    def __init__(self, head: EagleHead, target_hidden_size: int) -> None:
        super().__init__()
        self.config = head.config
        kind, size = kind_of(head.config), head.config.hidden_size
        # Published with and without a bias; the configuration does not always say which.
        self.fc = nn.Linear(size + target_hidden_size, size, bias="fc.bias" in head.tensors)
        self.layers = nn.ModuleList([kind.layer(head.config, index) for index in range(head.config.num_hidden_layers)])
        self.layers[0].input_layernorm = nn.Identity()

    def condense(self, features: Tensor) -> Tensor:
        """[..., hidden], as it is."""
        return features

    def forward(self, embeds: Tensor, hidden: Tensor, **context: Any) -> Tensor:
        """[1, T, hidden] each. Args: context: what decoder layers want besides."""
        hidden = self.fc(torch.cat((embeds, hidden), dim=-1))
        for layer in self.layers:
            hidden = layer(hidden, **context)
        return hidden

    def output(self, hidden: Tensor) -> Tensor:
        """What the output projection takes."""
        return hidden


class Eagle3Layers(nn.Module):
    """EAGLE-3: hidden states of several layers to one; the first decoder layer attends by embedding and hidden state.

    Source: Li et al. 2025, arXiv:2503.01840.
    """

    def __init__(self, head: EagleHead, target_hidden_size: int) -> None:
        super().__init__()
        self.config = head.config
        self._norms = head.norms
        kind, size, eps = kind_of(head.config), head.config.hidden_size, head.config.rms_norm_eps
        num_taps = 0 if head.taps is None else len(head.taps)
        if num_taps:
            self.fc = nn.Linear(num_taps * target_hidden_size, size, bias=False)
            if head.norms.before_fc:
                self.input_norm = kind.norm(num_taps * target_hidden_size, eps=eps)
            if head.norms.each_tap:
                self.fc_norm = nn.ModuleList([kind.norm(target_hidden_size, eps=eps) for _ in range(num_taps)])
        self._num_taps = num_taps
        self.layers = nn.ModuleList([kind.layer(head.config, index) for index in range(head.config.num_hidden_layers)])
        first: Any = self.layers[0]
        first.hidden_norm = kind.norm(size, eps=eps)
        for name in ("q_proj", "k_proj", "v_proj"):
            narrow: nn.Linear = getattr(first.self_attn, name)
            wide = nn.Linear(2 * size, narrow.out_features, bias=narrow.bias is not None)
            setattr(first.self_attn, name, wide)
        self.norm = kind.norm(size, eps=eps)

    def condense(self, features: Tensor) -> Tensor:
        """[..., taps * target's hidden] -> [..., hidden]."""
        if not self._num_taps:
            return features
        if self._norms.before_fc:
            features = self.input_norm(features)
        if self._norms.each_tap:
            taps = features.chunk(self._num_taps, dim=-1)
            features = torch.cat([norm(tap) for norm, tap in zip(self.fc_norm, taps, strict=True)], dim=-1)
        condensed: Tensor = self.fc(features)
        return condensed

    def forward(self, embeds: Tensor, hidden: Tensor, **context: Any) -> Tensor:
        """[1, T, hidden] each. Args: context: what decoder layers want besides."""
        first, *others = self.layers
        hidden = self._first(first, embeds, hidden, context)
        for layer in others:
            hidden = layer(hidden, **context)
        return self.norm(hidden) if self._norms.of_output else hidden

    def _first(self, layer: Any, embeds: Tensor, hidden: Tensor, context: dict[str, Any]) -> Tensor:
        normed = layer.hidden_norm(hidden)
        residual = normed if self._norms.before_residual else hidden
        attended, _ = layer.self_attn(torch.cat((layer.input_layernorm(embeds), normed), dim=-1), **context)
        hidden = residual + attended
        passed: Tensor = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
        return passed

    def output(self, hidden: Tensor) -> Tensor:
        """What the output projection takes."""
        return hidden if self._norms.of_output else self.norm(hidden)
