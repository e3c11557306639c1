"""Prompt lookup: the kernel against the proposer in tensors, through the interpreter where there is no GPU."""

import random
from collections.abc import Sequence

import pytest
import torch

from proposers.base import Draft, ProposeInput
from proposers.ngram import NgramProposer
from server.kernels.ngram_lookup import BLOCK_T, ngram_lookup


def inputs_of(texts: Sequence[Sequence[int]], device: str, max_drafts: Sequence[int]) -> ProposeInput:
    """Texts in shuffled slots, with leftovers of earlier sequences behind them."""
    rng = random.Random(len(texts))
    longest, num_slots = max(map(len, texts)), len(texts) + 2
    token_ids = torch.randint(3, (num_slots, longest + 40), generator=torch.Generator().manual_seed(1)).int()
    slots = rng.sample(range(num_slots), len(texts))
    for slot, text in zip(slots, texts, strict=True):
        token_ids[slot, : len(text)] = torch.tensor(text)
    return ProposeInput(
        token_ids=token_ids.to(device),
        slots=torch.tensor(slots, device=device),
        num_tokens=torch.tensor([len(text) for text in texts], device=device),
        max_drafts=torch.tensor(max_drafts, dtype=torch.int32, device=device),
        max_num_tokens=longest + 2,
    )


def rule_of(min_window: int, max_window: int, device: torch.device, *, takes_last: bool = False) -> torch.Tensor:
    return torch.tensor([min_window, max_window, takes_last], dtype=torch.int32, device=device)


def check(inputs: ProposeInput, k: int, min_window: int, max_window: int, *, takes_last: bool) -> Draft:
    """Compare both. Returns: what the twin drafts."""
    device = inputs.slots.device
    twin = NgramProposer(k, min_window, max_window, takes_last=takes_last, device=device).propose_eagerly(inputs)
    ids, counts = ngram_lookup(
        inputs.token_ids,
        inputs.slots,
        inputs.num_tokens,
        inputs.max_drafts,
        inputs.max_num_tokens,
        rule_of(min_window, max_window, device, takes_last=takes_last),
        k,
    )
    assert ids.dtype == counts.dtype == torch.int32
    assert torch.equal(counts, twin.counts)
    assert torch.equal(ids, twin.ids)
    return twin


@pytest.mark.parametrize("takes_last", [False, True])
@pytest.mark.parametrize(("min_window", "max_window"), [(1, 1), (2, 5), (3, 3), (4, 64)])
def test_short_texts(kernel_device: str, min_window: int, max_window: int, takes_last: bool) -> None:
    k, rng = 5, random.Random(max_window)
    texts = [[rng.randrange(1 + i % 4) for _ in range(rng.randint(1, 40))] for i in range(24)]
    inputs = inputs_of(texts, kernel_device, [rng.randint(0, k) for _ in texts])
    twin = check(inputs, k, min_window, max_window, takes_last=takes_last)
    assert twin.counts.any()


@pytest.mark.parametrize("takes_last", [False, True])
def test_long_texts_are_cut_into_parts(kernel_device: str, takes_last: bool) -> None:
    """Matches before, on and behind the edges of parts; equally long ones in several parts."""
    rng = random.Random(5)
    run = [7, 8, 9, 7]
    text = [rng.randrange(10, 1000) for _ in range(4 * BLOCK_T)]
    texts = []
    for end in (4, BLOCK_T - 1, BLOCK_T, BLOCK_T + 2, 3 * BLOCK_T + 1):
        planted = list(text)
        for first in (end, end + BLOCK_T // 2):
            planted[first - 4 : first] = run
        texts.append([*planted, *run])
    inputs = inputs_of(texts, kernel_device, [5] * len(texts))
    twin = check(inputs, 5, 2, 4, takes_last=takes_last)
    assert twin.counts.tolist() == [5] * len(texts)


def test_a_slot_without_tokens_drafts_nothing(kernel_device: str) -> None:
    """Padding of a captured batch."""
    inputs = inputs_of([[1, 1, 1], [1, 1, 1]], kernel_device, [3, 3])
    inputs.num_tokens[1] = 0
    rule = rule_of(1, 2, inputs.slots.device)
    _, counts = ngram_lookup(inputs.token_ids, inputs.slots, inputs.num_tokens, inputs.max_drafts, 5, rule, 3)
    assert counts.tolist() == [1, 0]


def test_what_does_not_fit_is_refused(kernel_device: str) -> None:
    inputs = inputs_of([[1, 2, 1], [3]], kernel_device, [3, 3])
    tensors = (inputs.token_ids, inputs.slots, inputs.num_tokens, inputs.max_drafts)
    rule = rule_of(1, 2, inputs.slots.device)
    with pytest.raises(ValueError, match="2 slots need"):
        ngram_lookup(*tensors[:3], inputs.max_drafts[:1], 5, rule, 3)
    with pytest.raises(ValueError, match="int32"):
        ngram_lookup(inputs.token_ids.long(), *tensors[1:], 5, rule, 3)
    with pytest.raises(ValueError, match="for 0 drafts"):
        ngram_lookup(*tensors, 5, rule, 0)
    with pytest.raises(ValueError, match="three int32"):
        ngram_lookup(*tensors, 5, rule.long(), 3)
    with pytest.raises(ValueError, match="in 99"):
        ngram_lookup(*tensors, 99, rule, 3)


def test_a_rule_that_changes_in_its_place(kernel_device: str) -> None:
    """As a captured step meets it: nothing but the content of its tensors differs."""
    device = torch.device(kernel_device)
    inputs = inputs_of([[1, 2, 3, 9, 1, 2, 3, 8, 1, 2, 3]], kernel_device, [3])
    tensors = (inputs.token_ids, inputs.slots, inputs.num_tokens, inputs.max_drafts)
    rule = rule_of(2, 4, device)
    for changed, expected in ((rule_of(2, 4, device, takes_last=True), [8, 1, 2]), (rule_of(4, 4, device), [-1] * 3)):
        rule.copy_(changed)
        assert ngram_lookup(*tensors, inputs.max_num_tokens, rule, 3)[0].tolist() == [expected]
