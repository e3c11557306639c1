"""Acceptance: the kernels against their eager twin on the same uniforms; interpreted where there is no GPU."""

from typing import Any

import pytest
import torch
from torch import Tensor

from server.kernels import rejection_reference
from server.kernels.rejection import BLOCK_V, Method, verify_drafts
from tests.fakes.drafts import draft_inputs

RATES = [0.9, 0.6, 0.6]


def compare(inputs: dict[str, Any]) -> Tensor:
    """Both on the same inputs. Returns: drafts kept."""
    kept: Tensor
    kept, weights = verify_drafts(**inputs)
    expected, expected_weights = rejection_reference.verify_drafts(**inputs)
    assert kept.dtype == torch.int64
    assert torch.equal(kept, expected)
    torch.testing.assert_close(weights.exp(), expected_weights.exp(), rtol=1e-4, atol=1e-6)
    assert torch.equal(weights == -torch.inf, expected_weights == -torch.inf)
    return kept


@pytest.mark.parametrize(
    ("drafter", "dtype"),
    [("one-hot", torch.float32), ("full", torch.float32), ("reduced", torch.float32), ("full", torch.bfloat16)],
)
@pytest.mark.parametrize("method", Method)
def test_the_twin_keeps_the_same(kernel_device: str, method: Method, drafter: str, dtype: torch.dtype) -> None:
    inputs = draft_inputs(8, 3, BLOCK_V + 50, drafter, kernel_device, dtype)
    inputs |= {"method": method, "rates": torch.tensor(RATES, device=kernel_device)}
    kept = compare(inputs)
    assert (kept <= inputs["num_drafts"]).all()
    assert kept.any()


@pytest.mark.parametrize("method", Method)
def test_rows_without_drafts(kernel_device: str, method: Method) -> None:
    """By their count, and because nobody has any."""
    inputs = draft_inputs(3, 2, 30, "full", kernel_device, torch.float32)
    inputs |= {"method": method, "rates": torch.tensor(RATES[:2], device=kernel_device)}
    inputs["num_drafts"].zero_()
    inputs["draft_ids"].fill_(-1)
    assert not compare(inputs).any()
    shorter = {name: inputs[name][:, :0] for name in ("draft_ids", "uniforms", "draft_logits")}
    shorter |= {"target_logits": inputs["target_logits"][:, :1], "rates": inputs["rates"][:0]}
    assert not compare(inputs | shorter).any()


@pytest.mark.parametrize("fill", [torch.nan, -torch.inf])
@pytest.mark.parametrize("method", [Method.STANDARD, Method.BLOCK])
def test_a_broken_row_ends_alone(kernel_device: str, method: Method, fill: float) -> None:
    inputs = draft_inputs(4, 3, 100, "full", kernel_device, torch.float32) | {"method": method}
    intact_kept, intact_weights = verify_drafts(**inputs)
    inputs["target_logits"][1] = fill
    kept, weights = verify_drafts(**inputs)
    assert kept[1] == 0
    assert not weights[1].isfinite().any(), "its draw has a score that tells"
    others = [0, 2, 3]
    assert torch.equal(kept[others], intact_kept[others])
    assert torch.equal(weights[others], intact_weights[others])


def test_nobody_has_drafts(kernel_device: str) -> None:
    inputs = draft_inputs(2, 2, 20, "reduced", kernel_device, torch.float32)
    nobody = {name: value[:0] for name, value in inputs.items() if name != "to_draft"}
    assert verify_drafts(**nobody, to_draft=inputs["to_draft"], method=0)[1].shape == (0, 20)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"uniforms": torch.zeros(2, 3)}, "do not fit"),
        ({"draft_ids": torch.zeros(2, 2, dtype=torch.int32)}, "int64"),
        ({"draft_logits": torch.zeros(2, 1, 20)}, "no logits of"),
        ({"to_draft": torch.zeros(19, dtype=torch.int32)}, "to_draft is"),
        ({"to_draft": None, "draft_logits": torch.zeros(2, 2, 19)}, "needs to_draft"),
        ({"method": Method.SYNTHETIC}, "needs 2 float32 rates"),
        ({"uniforms": torch.zeros(2, 2).T}, "not contiguous"),
        ({"draft_logits": torch.zeros(2, 20, 2).mT}, "not contiguous"),
    ],
)
def test_what_does_not_fit_is_refused(kernel_device: str, change: dict[str, Any], message: str) -> None:
    inputs = draft_inputs(2, 2, 20, "full", kernel_device, torch.float32) | {"method": Method.STANDARD}
    changed = {n: v.to(kernel_device) if isinstance(v, Tensor) else v for n, v in change.items()}
    with pytest.raises(ValueError, match=message):
        verify_drafts(**inputs | changed)
