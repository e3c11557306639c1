"""The output projection on CUDA gives sums as they are, not rounded to the weights' type."""

import pytest
import torch
from torch.nn import functional
from transformers import PreTrainedConfig

from server.model.head import LMHead

pytestmark = pytest.mark.gpu

DEVICE = "cuda"


class _Model:
    """What LMHead.of asks a model for."""

    def __init__(self, layer: torch.nn.Linear) -> None:
        self._layer = layer

    def get_output_embeddings(self) -> torch.nn.Linear:
        return self._layer


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("shape", [(1, 1), (64, 1), (3, 6)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_logits_are_not_rounded(dtype: torch.dtype, shape: tuple[int, int], has_bias: bool) -> None:
    torch.manual_seed(0)
    layer = torch.nn.Linear(576, 49_152, bias=has_bias, device=DEVICE, dtype=dtype).requires_grad_(False)
    head = LMHead.of(_Model(layer), PreTrainedConfig())
    hidden = torch.randn(*shape, 576, device=DEVICE).to(dtype)
    logits = head.logits(hidden)
    assert logits.dtype == torch.float32
    bias = layer.bias.double() if has_bias else None
    expected = functional.linear(hidden.double(), layer.weight.double(), bias)
    assert (logits.double() - expected).norm() < 1e-5 * expected.norm()  # bfloat16 is exact to 4e-3
    torch.testing.assert_close(head.logits_between(hidden, 7, 99), logits[..., 7:99], rtol=1e-4, atol=1e-4)
