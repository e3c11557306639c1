"""From hidden states to logits, for chosen rows and for a part of the vocabulary."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional
from transformers import PreTrainedConfig, PreTrainedModel

from server.errors import ModelError
from server.kernels import cpu_linear
from server.kernels.huge_pages import Arena
from server.model.fusion import PackedLinear

Linear = Callable[[Tensor, Tensor, Tensor | None], Tensor]
"""(inputs [..., in], weight [out, in], bias [out] or None) -> [..., out]."""


def _wide_linear(inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """The product as it was summed, in float32; saves rounding it, and a pass over it to widen it. CUDA only."""
    if inputs.dtype == torch.float32:
        return functional.linear(inputs, weight, bias)
    outputs = torch.mm(inputs.flatten(0, -2), weight.t(), out_dtype=torch.float32)
    outputs = outputs.view(*inputs.shape[:-1], weight.shape[0])
    return outputs if bias is None else outputs + bias


@dataclass(frozen=True, slots=True)
class LMHead:
    """The output projection of a causal language model and what its architecture does to the logits.

    Attributes:
        weight: [vocab, hidden]; bias: [vocab] or None; both the model's own tensors.
        scale: factor on the logits. softcap: logits become softcap * tanh(logits / softcap).
        packed: the same projection with its weight packed, for the whole vocabulary; None where that is no gain.
        linear: what multiplies otherwise.
    """

    weight: Tensor
    bias: Tensor | None
    scale: float
    softcap: float | None
    packed: PackedLinear | None = None
    linear: Linear = functional.linear

    @classmethod
    def of(
        cls,
        model: PreTrainedModel,
        config: PreTrainedConfig,
        *,
        is_packed: bool = False,
        linear: Linear | None = None,
    ) -> "LMHead":
        """The head of a loaded model; packed, it keeps its weight in our operator's order in addition.

        Args: linear: None takes torch's, on CUDA with results in float32.
        """
        layer = model.get_output_embeddings()
        scale = getattr(config, "logit_scale", None) or 1.0 / (getattr(config, "logits_scaling", None) or 1.0)
        softcap = getattr(config, "final_logit_softcapping", None)
        bias = getattr(layer, "bias", None)
        return cls.of_weight(layer.weight, bias, scale=scale, softcap=softcap, is_packed=is_packed, linear=linear)

    @classmethod
    def of_weight(
        cls,
        weight: Tensor,
        bias: Tensor | None = None,
        *,
        scale: float = 1.0,
        softcap: float | None = None,
        is_packed: bool = False,
        linear: Linear | None = None,
    ) -> "LMHead":
        """A head of given tensors; the arguments are the class's, and those of `of`."""
        if linear is None:
            linear = _wide_linear if weight.is_cuda else functional.linear
        is_packed = is_packed and cpu_linear.supports(weight.dtype, weight.shape[1])
        packed = PackedLinear(weight, bias, Arena()) if is_packed else None
        return cls(weight, bias, scale, softcap, packed, linear)

    def rows(self, token_ids: Tensor) -> "LMHead":
        """The head of a part of the vocabulary, [n] int64, with a copy of its weights."""
        return LMHead.of_weight(
            self.weight[token_ids],
            None if self.bias is None else self.bias[token_ids],
            scale=self.scale,
            softcap=self.softcap,
            is_packed=self.packed is not None,
            linear=self.linear,
        )

    @property
    def vocab_size(self) -> int:
        """Rows of the projection."""
        return self.weight.shape[0]

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits of the whole vocabulary: [..., hidden] -> [..., vocab] float32."""
        if self.packed is not None:
            return self._adjust(self.packed(hidden))
        return self._adjust(self.linear(hidden, self.weight, self.bias))

    def logits_between(self, hidden: Tensor, start: int, end: int) -> Tensor:
        """Logits of the tokens in [start, end): [..., hidden] -> [..., end - start] float32."""
        bias = None if self.bias is None else self.bias[start:end]
        return self._adjust(self.linear(hidden, self.weight[start:end], bias))

    def logits_at(self, hidden: Tensor, token_ids: Tensor) -> Tensor:
        """The logit of one token per row: [n, hidden], [n] int64 -> [n] float32."""
        logits = (hidden * self.weight[token_ids]).sum(-1)
        return self._adjust(logits if self.bias is None else logits + self.bias[token_ids])

    def _adjust(self, logits: Tensor) -> Tensor:
        if self.scale != 1.0:
            logits = logits * self.scale
        if self.softcap is not None:
            logits = self.softcap * torch.tanh(logits / self.softcap)
        return logits.float()

    def check(self, hidden: Tensor, expected: Tensor) -> None:
        """Compare with what the model itself makes of the same hidden states, [n, hidden] and [n, vocab].

        Raises: ModelError where the architecture does something to its logits that is not known here.
        """
        if not torch.allclose(self.logits(hidden), expected.float(), atol=1e-2, rtol=1e-2):
            raise ModelError("this architecture transforms its logits in a way that is not supported")
