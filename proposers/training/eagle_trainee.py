"""An EAGLE-3 head in training: the layers that are served, unrolled over packed rows."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from proposers.base import TargetModel
from proposers.checkpoint import Checkpoint
from proposers.decoder_kinds import KINDS, kind_of
from proposers.eagle_checkpoint import EagleHead, Norms, eagle_head
from proposers.eagle_layers import Eagle3Layers
from proposers.training.packing import PackedRows
from proposers.training.target import Features, trainable_rows
from proposers.training.unrolled_attention import UNROLLED_ATTENTION_NAME, Unrolling, shift

LM_HEAD = "lm_head.weight"


@dataclass(frozen=True, slots=True)
class EagleShape:
    """What a new head is like.

    Attributes:
        taps: layers of the target whose inputs it takes, ascending.
        to_target: [vocab] int64, the target's id of each token it can draft.
        has_own_output: whether the output projection is trained; else it stays the target's.
        feeds_normed: whether the hidden state that is fed back is the normalised one.
    """

    taps: tuple[int, ...]
    to_target: Tensor
    has_own_output: bool = True
    feeds_normed: bool = False


class EagleTrainee(nn.Module):
    """Weights in float32; the target's embedding and, where it is shared, its output projection are not among them."""

    def __init__(self, head: EagleHead, target: TargetModel, output: Tensor | None) -> None:
        """Args: head: its tensors are not looked at. output: [vocab, hidden], its own projection."""
        super().__init__()
        assert head.taps is not None, "it takes hidden states of chosen layers"
        device = target.model.device
        self.taps = head.taps
        self.norms = head.norms
        whole = torch.arange(head.vocab_size) if head.to_target is None else head.to_target
        self.to_target = whole.to(device)
        head.config._attn_implementation = UNROLLED_ATTENTION_NAME
        self.layers = Eagle3Layers(head, target.config.hidden_size).to(device, torch.float32)
        self.output = None if output is None else nn.Parameter(output.to(device, torch.float32))
        self._shared = None if output is not None else trainable_rows(target, self.to_target)
        self._rotary = kind_of(head.config).rotary(head.config).to(device)
        self._embedding: Tensor = target.model.get_input_embeddings().weight.detach()

    def unroll(self, rows: PackedRows, features: Features, num_passes: int) -> list[Tensor]:
        """What each pass makes of every slot: [B, L, hidden], to foretell the token behind it.

        Slot p is right in pass i where its text has at least 1 + i tokens before p.
        """
        hidden = shift(self.layers.condense(features.taps.to(self.layers.fc.weight.dtype)), 1, 1)
        embeds = functional.embedding(rows.token_ids, self._embedding).to(hidden.dtype)
        # Rotary embeddings see distances only, so places of the row do as well as positions in the text.
        places = torch.arange(rows.row_length, device=hidden.device)[None]
        unrolling = Unrolling(rows)
        context: dict[str, Any] = {
            "attention_mask": None,
            "position_ids": places,
            "position_embeddings": self._rotary(embeds, position_ids=places),
            "unrolling": unrolling,
        }
        made: list[Tensor] = []
        for index in range(num_passes):
            unrolling.index = index
            made.append(self.layers(embeds, hidden, **context))
            hidden = shift(made[-1], 1, 1)
        return made

    def logits(self, hidden: Tensor) -> Tensor:
        """[..., hidden] -> [..., vocab]."""
        normed = self.layers.output(hidden)
        if self._shared is not None:
            return self._shared.logits(normed.to(self._embedding.dtype))
        assert self.output is not None
        return functional.linear(normed, self.output)

    def tensors(self) -> Mapping[str, Tensor]:
        """Its weights by the names that heads are published with."""
        own = {name: tensor.detach() for name, tensor in self.layers.state_dict().items()}
        return own if self.output is None else {**own, LM_HEAD: self.output.detach()}


def new_eagle(shape: EagleShape, target: TargetModel, seed: int) -> EagleTrainee:
    """A head to begin with: it passes on the last tap, says what the target's output projection makes of it, and
    its layer adds little.
    """
    config = _layer_config(target)
    head = EagleHead(
        folder=target.folder,
        kind="eagle3",
        config=config,
        tensors={},
        to_target=shape.to_target,
        taps=shape.taps,
        norms=Norms(each_tap=True, of_output=shape.feeds_normed),
    )
    output = target.head.weight[shape.to_target.to(target.head.weight.device)] if shape.has_own_output else None
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        trainee = EagleTrainee(head, target, output)
        _initialise(trainee, target)
    return trainee


def load_eagle(checkpoint: Checkpoint, target: TargetModel) -> EagleTrainee:
    """A head as it was published, to be trained on or looked at. Raises: ModelError if it is no such head."""
    head = eagle_head(checkpoint, target, "eagle3")
    trainee = EagleTrainee(head, target, head.tensors.get(LM_HEAD))
    tensors = {name: tensor.float() for name, tensor in head.tensors.items()}
    tensors.pop(LM_HEAD, None)
    trainee.layers.load_state_dict(tensors)
    return trainee


def _layer_config(target: TargetModel) -> Any:
    """One decoder layer of the target's sizes, of its own architecture where heads are known to have it."""
    given = target.config.to_dict()
    kind = KINDS.get(given["model_type"], KINDS["llama"])
    names = (
        *("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim"),
        *("hidden_act", "max_position_embeddings", "rms_norm_eps", "rope_parameters", "attention_bias", "mlp_bias"),
    )
    sizes = {name: given[name] for name in names if given.get(name) is not None}
    return kind.config(**sizes, num_hidden_layers=1, tie_word_embeddings=False)


@torch.no_grad()
def _initialise(trainee: EagleTrainee, target: TargetModel) -> None:
    for name, parameter in trainee.layers.named_parameters():
        if parameter.dim() > 1:
            is_added = name.endswith(("o_proj.weight", "down_proj.weight"))
            parameter.normal_(std=(0.1 if is_added else 1.0) / parameter.shape[-1] ** 0.5)
        elif name.endswith(".bias"):
            parameter.zero_()
    layers, size = trainee.layers, trainee.layers.config.hidden_size
    layers.fc.weight.mul_(0.1)
    layers.fc.weight[:, -size:] += torch.eye(size, device=layers.fc.weight.device)
    final = dict(target.model.base_model.named_parameters()).get("norm.weight")
    if final is not None:
        layers.norm.load_state_dict({"weight": final})
