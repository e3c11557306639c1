"""Several proposers in one batch; those on the device as one."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from proposers.base import Draft, DraftVocabulary, HostProposer, ProposeInput, Proposer
from proposers.network import BatchReader, Follower


class ProposerChain:
    """Each row takes its drafts from the first member that has some; implements proposers.base.Proposer.

    Every member drafts for every row, so that the state of each advances. If one of them draws its drafts, all
    come with logits of the target's vocabulary: what is certain has all its probability on one token.
    """

    def __init__(self, members: Sequence[tuple[int, Proposer]], vocab_size: int) -> None:
        """Args: members: with the rank of each, ascending. vocab_size: of the target."""
        self._members = members
        self._vocab_size = vocab_size
        self._draws = any(member.vocabulary is not None for _, member in members)

    @property
    def num_speculative_tokens(self) -> int:
        """The most of any member."""
        return max(member.num_speculative_tokens for _, member in self._members)

    @property
    def runs_on_device(self) -> bool:
        """Whether all members do."""
        return all(member.runs_on_device for _, member in self._members)

    @property
    def needs_hidden(self) -> bool:
        """Whether a member does."""
        return any(getattr(member, "needs_hidden", False) for _, member in self._members)

    @property
    def vocabulary(self) -> DraftVocabulary | None:
        """The target's, if a member draws."""
        return DraftVocabulary(self._vocab_size, torch.float32) if self._draws else None

    def propose(self, inputs: ProposeInput) -> Draft:
        """The first draft of each row that has tokens; that of the last member where none has."""
        is_drawn = self._draws and (inputs.sampling is None or inputs.sampling.has_unseeded)
        chosen: Draft | None = None
        for rank, member in self._members:
            draft = self._widened(member, member.propose(inputs), rank, is_drawn=is_drawn)
            chosen = draft if chosen is None else _merged(chosen, draft)
        assert chosen is not None
        return chosen

    def _widened(self, member: Proposer, draft: Draft, rank: int, *, is_drawn: bool) -> Draft:
        """A member's draft as wide as the widest, with its rank, and with logits if any draft is drawn."""
        num_missing = self.num_speculative_tokens - draft.ids.shape[1]
        ids = torch.nn.functional.pad(draft.ids, (0, num_missing), value=-1)
        logits = None
        if is_drawn:
            logits = _target_logits(member, draft, self._vocab_size)
            logits = torch.nn.functional.pad(logits, (0, 0, 0, num_missing))
        return Draft(ids, draft.counts, logits, torch.full_like(draft.counts, rank))


@dataclass(frozen=True, slots=True)
class Arrangement:
    """Proposers by where they run.

    Attributes:
        on_device: one that stands for all of those on the device; None if there are none.
        readers, followers: those on the device that look into the batch, and that follow what the target computes.
        on_host: with the rank of each, ascending.
        num_speculative_tokens: the most of any; 0 without proposers.
    """

    on_device: Proposer | None
    readers: tuple[BatchReader, ...]
    followers: tuple[Follower, ...]
    on_host: tuple[tuple[int, HostProposer], ...]
    num_speculative_tokens: int

    @classmethod
    def of(cls, proposers: Sequence[Proposer | HostProposer], vocab_size: int) -> "Arrangement":
        """Args: proposers: in the order in which they are asked. vocab_size: of the target."""
        on_host = tuple([(i, member) for i, member in enumerate(proposers) if isinstance(member, HostProposer)])
        members = [(i, member) for i, member in enumerate(proposers) if not isinstance(member, HostProposer)]
        on_device: Proposer | None = None
        if members:
            on_device = members[0][1] if len(proposers) == 1 else ProposerChain(members, vocab_size)
        width = max([member.num_speculative_tokens for member in proposers], default=0)
        readers = tuple([member for _, member in members if isinstance(member, BatchReader)])
        followers = tuple([member for member in readers if isinstance(member, Follower)])
        return cls(on_device, readers, followers, on_host, width)


def certain_logits(ids: Tensor, vocab_size: int) -> Tensor:
    """[n, k, vocab] float32: all probability on one token. Args: ids: [n, k], negative ones stand for any."""
    logits = torch.full((*ids.shape, vocab_size), -torch.inf, device=ids.device)
    return logits.scatter_(2, ids.long().clamp(min=0)[..., None], 0)


def _target_logits(member: Proposer, draft: Draft, vocab_size: int) -> Tensor:
    """What a member drew from, in the target's vocabulary."""
    if member.vocabulary is None or draft.logits is None:
        return certain_logits(draft.ids, vocab_size)
    logits, to_draft = draft.logits.float(), member.vocabulary.to_draft
    if to_draft is None:
        return logits
    return torch.where(to_draft >= 0, logits[:, :, to_draft.clamp(min=0).long()], -torch.inf)


def _merged(first: Draft, second: Draft) -> Draft:
    """Rows of the first that have drafts, those of the second for the others."""
    is_first = first.counts > 0
    assert first.ranks is not None
    assert second.ranks is not None
    logits = None
    if first.logits is not None and second.logits is not None:
        logits = torch.where(is_first[:, None, None], first.logits, second.logits)
    return Draft(
        torch.where(is_first[:, None], first.ids, second.ids),
        torch.where(is_first, first.counts, second.counts),
        logits,
        torch.where(is_first, first.ranks, second.ranks),
    )
