"""Which draft tokens are kept: the rule of the rows that a noise of their own does not decide.

A row may have fewer drafts than there is room for; what lies beyond is neither accepted nor rejected: the next
token is then the bonus token of the first position without a draft.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from proposers.base import DraftVocabulary
from server.kernels import cpu_sampling, jit, rejection_reference
from server.kernels.gumbel_argmax import gumbel_argmax
from server.kernels.noise import Stream, gumbel, uniform
from server.kernels.noise_kernel import uniforms
from server.kernels.rejection import Method, verify_drafts
from server.model.sampling_operators import has_sampling_operators

_COINS_PER_POSITION = 64
"""More than a step can have drafts; each step draws at positions of its own, so no two steps share a coin."""


@dataclass(frozen=True, slots=True)
class Acceptance:
    """The rule as it is configured. `rates`: for SYNTHETIC, the share of rows to keep at least 1, 2, ... k drafts."""

    method: Method = Method.STANDARD
    rates: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class Drafts:
    """What is to be verified, M rows.

    Attributes:
        ids: [M, k] int32 or int64; what lies beyond a row's count is ignored. counts: [M] int64.
        logits: [M, k, draft vocab], of what they were drawn from; None where they are certain.
    """

    ids: Tensor
    counts: Tensor
    logits: Tensor | None = None

    def of(self, rows: Tensor) -> "Drafts":
        """Some of the rows. Args: rows: [n] int64."""
        return Drafts(self.ids[rows], self.counts[rows], None if self.logits is None else self.logits[rows])


@dataclass(frozen=True, slots=True)
class Verified:
    """[n] int64 each: drafts kept, and the token that follows them.

    Attributes:
        scores: [n, k + 1], the highest logit of each position up to that token, see sampler.Chosen; None where
            kernels have found them already.
    """

    num_accepted: Tensor
    next_ids: Tensor
    scores: Tensor | None = None


def count_accepted(draft_ids: Tensor, num_drafts: Tensor, target_ids: Tensor) -> Tensor:
    """Keep drafts as long as they equal what the target chose at their position.

    With the likeliest tokens as `target_ids` this is greedy decoding. With argmax(log p + Gumbel)
    of a fixed noise per position it is sampling whose tokens do not depend on the drafter.

    Args:
        draft_ids: [n, k] integers. num_drafts: [n] int64, at most k. target_ids: [n, k + 1] int64; the token that
            follows the kept drafts is the one at their number.
    Returns: [n] int64.
    Source: Daliri et al. 2024, arXiv:2408.07978, section 3.
    """
    exists = torch.arange(draft_ids.shape[1], device=draft_ids.device) < num_drafts[:, None]
    return ((draft_ids == target_ids[:, :-1]) & exists).long().cumprod(1).sum(1)


class RejectionRule:
    """Accepts drafts by coins and draws one token for each row; owned by the sampler.

    Kept drafts and the token after them are distributed as if drawn from the target one by one, unless the method
    is SYNTHETIC.

    Attributes:
        is_coupling: whether keeping each draft that equals the target's own draw comes to the same: for STANDARD
            with drafts that are certain it keeps each with the same probability, and draws from the same rest.
    """

    def __init__(self, acceptance: Acceptance, vocabulary: DraftVocabulary | None, device: torch.device) -> None:
        """Args: vocabulary: of what drafts are drawn from; None where they are certain."""
        self.is_coupling = acceptance.method is Method.STANDARD and vocabulary is None
        self._method = acceptance.method
        self._has_operators = self._method is not Method.SYNTHETIC and has_sampling_operators(device)
        rates = acceptance.rates
        self._rates = torch.tensor(rates, dtype=torch.float32, device=device) if rates else None
        self._to_draft = None if vocabulary is None else vocabulary.to_draft

    def verify(self, target_logits: Tensor, drafts: Drafts, key: Tensor, position: Tensor) -> Verified:
        """Args:
        target_logits: [n, k + 1, vocab], processed, temperature and truncation included.
        key, position: [n] int64, the rows' own, and where the first token goes that they get.
        """
        num_drafts = drafts.ids.shape[1]
        if self._has_operators:
            return self._verify_by_operators(target_logits, drafts, *_coins(key, position, num_drafts), position)
        if has_kernels := jit.is_available(target_logits.device):
            numbers = uniforms(key, position * _COINS_PER_POSITION, num_drafts, Stream.ACCEPT)
        else:
            numbers = uniform(*_coins(key, position, num_drafts), Stream.ACCEPT).contiguous()
        judged = target_logits, drafts.ids.long(), drafts.counts, numbers
        rates = None if self._rates is None else self._rates[:num_drafts]
        verify = verify_drafts if has_kernels else rejection_reference.verify_drafts
        num_accepted, weights = verify(*judged, self._method, drafts.logits, self._to_draft, rates)
        scores = None if has_kernels else target_logits.amax(-1)
        return Verified(num_accepted, _draw(weights, key, position), scores)

    def _verify_by_operators(
        self, target_logits: Tensor, drafts: Drafts, keys: Tensor, coins: Tensor, position: Tensor
    ) -> Verified:
        return Verified(
            *cpu_sampling.verify_drafts(
                target_logits,
                drafts.ids.long(),
                drafts.counts,
                cpu_sampling.uniform(keys, coins, Stream.ACCEPT),
                cpu_sampling.uniform(keys[:, 0], position, Stream.RESAMPLE),
                self._method,
                drafts.logits,
                self._to_draft,
            )
        )


def _coins(key: Tensor, position: Tensor, num_drafts: int) -> tuple[Tensor, Tensor]:
    """[n, k] int64 each: what the coin of each draft is made of."""
    coins = position[:, None] * _COINS_PER_POSITION + torch.arange(num_drafts, device=position.device)
    return key[:, None].expand_as(coins), coins


def _draw(weights: Tensor, key: Tensor, position: Tensor) -> Tensor:
    """One token for each row of [n, vocab] log weights."""
    if jit.is_available(weights.device):
        temperature = torch.ones(len(weights), device=weights.device)
        ids: Tensor = gumbel_argmax(weights[:, None], key, position, temperature, Stream.RESAMPLE)[0]
        return ids[:, 0]
    return weights.add_(gumbel(key, position, Stream.RESAMPLE, weights.shape[1])).argmax(-1)
