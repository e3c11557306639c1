"""A network that is fed the target's hidden states, small enough to know all that it should have drafted."""

from collections.abc import Sequence
from types import SimpleNamespace

import torch
from torch import Tensor
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from proposers.base import TargetModel
from proposers.network import Features, KVShape
from server.kernels.reference import attention, attention_mask
from server.model.attention import AttentionStep, attention_name

SIZE, HEADS, HEAD_DIM, NUM_LAYERS = 32, 2, 16, 2
"""Of two layers, the second keeps what the first made of all positions that it attended to."""


class FedNetwork:
    """Two layers of attention with random weights; implements proposers.network.DraftNetwork.

    What it makes of a token depends on all pairs of a token and the hidden state before it, from the first position
    on that it attends to, and on where they are. It knows a part of the target's vocabulary.
    """

    fingerprint = "0" * 64
    kv_shape = KVShape(NUM_LAYERS, HEADS, HEAD_DIM, torch.float32)
    max_num_tokens: int | None = None

    def __init__(self, target: TargetModel, features: Features, known: Sequence[int], device: torch.device) -> None:
        """Args: known: the target's ids of its tokens."""
        generator = torch.Generator().manual_seed(11)

        def random(*shape: int) -> Tensor:
            values: Tensor = torch.randn(*shape, generator=generator) * (1.5 / float(shape[0]) ** 0.5)
            return values.to(device)

        self.features = features
        self.num_features: int = target.config.hidden_size * (len(features) if isinstance(features, tuple) else 1)
        self.to_target: Tensor | None = torch.tensor(known, device=device)
        self._embedding = random(SIZE, target.config.vocab_size).T.contiguous()
        self._places = random(SIZE, target.max_num_tokens + 64).T.contiguous()
        self._condensing = random(self.num_features, SIZE)
        self._layers = [random(SIZE, 3 * SIZE) for _ in range(NUM_LAYERS)]
        self._output = 2 * random(SIZE, len(known))
        self._modules = [SimpleNamespace() for _ in range(NUM_LAYERS)]
        self._attend = ALL_ATTENTION_FUNCTIONS[attention_name(device, torch.float32, HEAD_DIM)]

    def bind_kv(self, kv: Tensor) -> None:
        """As a model's attention modules have it."""
        for index, module in enumerate(self._modules):
            module.kv_blocks = kv[:, index]

    def condense(self, features: Tensor) -> Tensor:
        """[T, features] -> [T, SIZE]."""
        return torch.tanh(features @ self._condensing / 4)

    def forward(self, token_ids: Tensor, positions: Tensor, step: AttentionStep, hidden: Tensor | None) -> Tensor:
        """[T, SIZE]."""
        state = self._pairs(token_ids, positions, hidden)
        for layer, module in zip(self._layers, self._modules, strict=True):
            query, key, value = self._projected(state, layer)
            attended, _ = self._attend(
                module, *(each[None] for each in (query, key, value)), None, attention_step=step, scaling=HEAD_DIM**-0.5
            )
            state = torch.tanh(state + attended[0].flatten(1))
        return state

    def logits(self, hidden: Tensor) -> Tensor:
        """[n, SIZE] -> [n, tokens that it knows]."""
        return (hidden @ self._output).float()

    def _pairs(self, token_ids: Tensor, positions: Tensor, hidden: Tensor | None) -> Tensor:
        assert hidden is not None
        return torch.tanh(self._embedding[token_ids] + self._places[positions] + hidden)

    def _projected(self, state: Tensor, layer: Tensor) -> tuple[Tensor, ...]:
        """Query, key and value, [HEADS, T, HEAD_DIM] each."""
        return tuple([each.unflatten(1, (HEADS, HEAD_DIM)).transpose(0, 1) for each in (state @ layer).chunk(3, 1)])


class FedReference:
    """The same network on a whole text at a time, without anything kept."""

    def __init__(self, network: FedNetwork, target: TargetModel) -> None:
        self._network = network
        self._target = target

    @torch.inference_mode()
    def logits(self, known: Sequence[int], drafts: Sequence[int], first: int) -> Tensor:
        """[drafts, tokens that it knows], what each of these drafts was to be chosen by.

        Args: known: all tokens in front of the drafts. first: position from which on it attends.
        """
        network, device, last = self._network, self._target.model.device, len(known) - 1
        token_ids = torch.tensor([*known, *drafts], device=device)
        fed = network.condense(self._features(token_ids[:last]))[first - 1 :]
        made: list[Tensor] = []
        for index in range(len(drafts)):
            positions = torch.arange(first, last + index + 1, device=device)
            made.append(self._made(token_ids[positions], positions, torch.cat((fed, *made)))[-1:])
        return network.logits(torch.cat(made))

    def _made(self, token_ids: Tensor, positions: Tensor, hidden: Tensor) -> Tensor:
        network = self._network
        state = network._pairs(token_ids, positions, hidden)
        mask = attention_mask(positions[None] - int(positions[0]), len(positions), None)
        for layer in network._layers:
            query, key, value = (each[None] for each in network._projected(state, layer))
            attended = attention(query, key, value, mask, HEAD_DIM**-0.5)[0]
            state = torch.tanh(state + attended.transpose(0, 1).flatten(1))
        return state

    def _features(self, token_ids: Tensor) -> Tensor:
        """[T, features] of the target, computed without its cache."""
        states = self._target.model(token_ids[None], output_hidden_states=True, use_cache=False).hidden_states
        features = self._network.features
        wanted = features if isinstance(features, tuple) else (-1,)
        return torch.cat([states[index][0] for index in wanted], dim=-1)
