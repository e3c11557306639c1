"""Verification on a GPU: against its twin, and that it keeps the target's distribution."""

import pytest
import torch
from torch import Tensor

from server.kernels import rejection_reference
from server.kernels.rejection import Method, verify_drafts
from tests.fakes.drafted_chain import assert_drawn_from, chain, generate
from tests.fakes.drafts import draft_inputs

pytestmark = pytest.mark.gpu

DEVICE = "cuda"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("drafter", ["one-hot", "full", "reduced"])
@pytest.mark.parametrize("vocab_size", [49_152, 128_256])
@pytest.mark.parametrize("method", Method)
def test_verification_equals_the_twin(method: Method, vocab_size: int, drafter: str, dtype: torch.dtype) -> None:
    inputs = draft_inputs(64, 5, vocab_size, drafter, DEVICE, dtype)
    inputs |= {"method": method, "rates": torch.linspace(0.9, 0.3, 5, device=DEVICE)}
    inputs["target_logits"][7] = torch.nan
    kept, weights = verify_drafts(**inputs)
    expected, expected_weights = rejection_reference.verify_drafts(**inputs)
    is_same = kept == expected  # a coin may fall on a sum's last bit
    assert is_same.sum() >= 63
    assert kept[7] == 0 or method == Method.SYNTHETIC
    is_same[7] = False
    torch.testing.assert_close(weights[is_same].exp(), expected_weights[is_same].exp(), rtol=1e-3, atol=1e-6)
    assert ((weights == -torch.inf) == (expected_weights == -torch.inf))[is_same].all()
    again = verify_drafts(**inputs)
    assert torch.equal(again[0], kept)
    assert torch.equal(again[1][is_same], weights[is_same]), "a race"


@pytest.mark.parametrize("method", [Method.STANDARD, Method.BLOCK])
def test_verification_keeps_the_distribution(method: Method) -> None:
    p, q = chain(1, DEVICE), chain(2, DEVICE)

    def verify(
        target_logits: Tensor, draft_ids: Tensor, num_drafts: Tensor, uniforms: Tensor, draft_logits: Tensor
    ) -> tuple[Tensor, Tensor]:
        kept, weights = verify_drafts(target_logits, draft_ids, num_drafts, uniforms, method, draft_logits)
        return kept, weights

    tokens, kept = generate(p, q, 3, 200_000, verify)
    assert_drawn_from(p, tokens)
    assert kept.sum() > 20_000
