"""The sampler by kernels chooses what its eager twin does; interpreted where there is no GPU."""

from unittest.mock import patch

import pytest
import torch

from proposers.base import DraftVocabulary
from server.kernels import jit
from server.kernels.rejection import Method
from server.request import SamplingParams
from server.worker.rejection import Acceptance, Drafts, RejectionRule
from server.worker.sampler import Chosen, Sampler
from tests.fakes.worker_state import batch_of, decode_row, inputs_of, start

VOCAB = 50
K = 3
PARAMS = (
    SamplingParams(temperature=0),
    SamplingParams(temperature=0.8, seed=1),
    SamplingParams(temperature=1.3),
    SamplingParams(temperature=0.7, top_k=9),
    SamplingParams(temperature=0.9, top_p=0.8, min_p=0.01),
    SamplingParams(temperature=1.0),
)


@pytest.mark.parametrize("params", [PARAMS, PARAMS[2:3]], ids=["many", "one"])
@pytest.mark.parametrize("draws", [True, False], ids=["drawn", "certain"])
@pytest.mark.parametrize("method", Method)
def test_tokens_and_counts_are_equal(
    kernel_device: str, method: Method, draws: bool, params: tuple[SamplingParams, ...]
) -> None:
    if method is Method.STANDARD and not draws:
        pytest.skip("there the kernels couple the draws, which is the same distribution but not the same tokens")
    starts = [
        start(slot, [1, 2, 3 + slot], sampling=each, key=100 + slot, num_speculative_tokens=K)
        for slot, each in enumerate(params)
    ]
    batch = batch_of(starts, kernel_device, max_drafts=K)
    rows = [decode_row(slot, 3, K) for slot in range(len(starts))]
    sampling = inputs_of(rows, starts, kernel_device, max_drafts=K).sampling
    assert sampling is not None
    generator = torch.Generator(kernel_device).manual_seed(5)
    logits = 2 * torch.randn(len(starts), 1 + K, VOCAB, generator=generator, device=kernel_device)
    draft_logits = logits[:, :K] + torch.randn(len(starts), K, VOCAB, generator=generator, device=kernel_device)
    drafts = Drafts(
        draft_logits.argmax(-1),
        torch.tensor([3, 3, 3, 2, 3, 0][: len(starts)], device=kernel_device),
        draft_logits if draws else None,
    )
    rates = (0.9, 0.8, 0.7) if method is Method.SYNTHETIC else ()
    vocabulary = DraftVocabulary(VOCAB, torch.float32) if draws else None
    with patch("server.worker.rejection.has_sampling_operators", return_value=False):  # they draw in another way
        rule = RejectionRule(Acceptance(method, rates), vocabulary, torch.device(kernel_device))
    sampler = Sampler(batch, rule)

    def choose(*, by_kernels: bool) -> Chosen:
        with patch.object(jit, "is_available", return_value=by_kernels):
            return sampler.choose(logits.clone(), sampling, batch.num_tokens[: len(starts)], drafts)

    found, expected = choose(by_kernels=True), choose(by_kernels=False)
    assert found.num_accepted is not None
    assert expected.num_accepted is not None
    assert found.num_accepted.tolist() == expected.num_accepted.tolist()
    assert len(params) == 1 or found.num_accepted.sum() > 3
    for i, count in enumerate(found.num_accepted.tolist()):
        assert found.ids[i, : count + 1].tolist() == expected.ids[i, : count + 1].tolist()


def test_rows_without_a_token_left_or_with_nan_are_told_by_their_scores(kernel_device: str) -> None:
    starts = [start(slot, [1, 2], key=slot, num_speculative_tokens=1) for slot in range(3)]
    batch = batch_of(starts, kernel_device, max_drafts=1)
    sampling = inputs_of([decode_row(slot, 2, 1) for slot in range(3)], starts, kernel_device, max_drafts=1).sampling
    assert sampling is not None
    logits = torch.zeros(3, 2, VOCAB, device=kernel_device)
    logits[0, 0] = -torch.inf
    logits[1, 0, 7] = torch.nan
    counts = torch.ones(3, dtype=torch.int64, device=kernel_device)
    drafts = Drafts(torch.zeros(3, 1, dtype=torch.int64, device=kernel_device), counts)
    rule = RejectionRule(Acceptance(Method.BLOCK), None, torch.device(kernel_device))
    for by_kernels in (False, True):
        with patch.object(jit, "is_available", return_value=by_kernels):
            chosen = Sampler(batch, rule).choose(logits.clone(), sampling, batch.num_tokens[:3], drafts)
        assert chosen.num_accepted is not None
        assert chosen.num_accepted[:2].tolist() == [0, 0]
        scores = chosen.scores[:, 0]
        assert scores[0] == -torch.inf
        assert not scores[1] < torch.inf
        assert scores[2].isfinite()
        assert ((chosen.ids >= 0) & (chosen.ids < VOCAB)).all()
