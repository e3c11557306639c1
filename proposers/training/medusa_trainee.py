"""Medusa heads in training: residual blocks on the target's last hidden state, its output projection behind them."""

from collections.abc import Mapping

from torch import Tensor, nn
from torch.nn import functional

from proposers.base import TargetModel
from proposers.checkpoint import Checkpoint
from proposers.training.target import trainable_rows
from server.errors import ModelError


class MedusaTrainee(nn.Module):
    """K heads, each one block x + SiLU(W x + b), in float32; they begin as the output projection itself.

    Source: Cai et al. 2024, arXiv:2401.10774.
    """

    def __init__(self, target: TargetModel, to_target: Tensor, num_heads: int) -> None:
        """Args: to_target: [vocab] int64, the target's id of each token they can draft."""
        super().__init__()
        device, size = target.model.device, target.config.hidden_size
        self.to_target = to_target.to(device)
        blocks = [nn.Linear(size, size, device=device) for _ in range(num_heads)]
        for block in blocks:
            nn.init.zeros_(block.weight)
            nn.init.zeros_(block.bias)
        self.blocks = nn.ModuleList(blocks)
        self._dtype = target.dtype
        self._output = trainable_rows(target, self.to_target)

    def states(self, last: Tensor) -> list[Tensor]:
        """[n, hidden] -> what the output projection takes for each head, [n, hidden] each."""
        last = last.float()
        return [last + functional.silu(block(last)) for block in self.blocks]

    def logits(self, state: Tensor) -> Tensor:
        """[..., hidden] -> [..., vocab]."""
        return self._output.logits(state.to(self._dtype))

    def tensors(self) -> Mapping[str, Tensor]:
        """Its weights by the names that such heads are published with, and the tokens they know."""
        own = {
            f"blocks.{head}.layers.0.{name}": tensor.detach()
            for head, block in enumerate(self.blocks)
            for name, tensor in block.state_dict().items()
        }
        return {**own, "token_map": self.to_target}


def load_medusa(checkpoint: Checkpoint, target: TargetModel) -> MedusaTrainee:
    """Heads as they are exported. Raises: ModelError if they do not fit."""
    tensors = checkpoint.tensors
    num_heads = sum(name.endswith(".layers.0.weight") for name in tensors)
    if "token_map" not in tensors or num_heads == 0:
        raise ModelError(f"{checkpoint.folder} holds no Medusa heads of the kind that is trained here")
    trainee = MedusaTrainee(target, tensors["token_map"].long(), num_heads)
    for head, block in enumerate(trainee.blocks):
        prefix = f"blocks.{head}.layers.0."
        block.load_state_dict({name: tensors[prefix + name].float() for name in ("weight", "bias")})
    return trainee
