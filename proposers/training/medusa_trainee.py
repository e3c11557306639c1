"""Medusa heads in training: residual blocks on the target's last hidden state, its own output projection behind them."""

from collections.abc import Mapping

from torch import Tensor, nn
from torch.nn import functional

from proposers.base import TargetModel


class MedusaTrainee(nn.Module):
    """K heads, each one block x + SiLU(W x + b), in float32; they begin as the output projection itself.

    Source: Cai et al. 2024, arXiv:2401.10774.
    """

    def __init__(self, target: TargetModel, to_target: Tensor, num_heads: int) -> None:
        """Args: to_target: [vocab] int64, the target's id of each token they can draft."""
        super().__init__()
        device, size = target.model.device, target.config.hidden_size
        self.to_target = to_target.to(device)
        self.blocks = nn.ModuleList([nn.Linear(size, size, device=device) for _ in range(num_heads)])
        for parameter in self.blocks.parameters():
            nn.init.zeros_(parameter)
        self._dtype = target.dtype
        self._output = target.head.rows(self.to_target)

    def states(self, last: Tensor) -> list[Tensor]:
        """[n, hidden] -> what the output projection takes for each head, [n, hidden] each."""
        last = last.to(self.blocks[0].weight.dtype)
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

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Take weights by those names."""
        for head, block in enumerate(self.blocks):
            block.load_state_dict(
                {name: tensors[f"blocks.{head}.layers.0.{name}"].float() for name in ("weight", "bias")}
            )
