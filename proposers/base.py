"""What a proposer of draft tokens gets and gives."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel


class Head(Protocol):
    """The target's projection from hidden states to its vocabulary."""

    @property
    def weight(self) -> Tensor:
        """[vocab, hidden], the model's own."""

    def logits(self, hidden: Tensor) -> Tensor:
        """[..., hidden] -> [..., vocab] float32."""

    def rows(self, token_ids: Tensor) -> "Head":
        """The head of a part of the vocabulary, [n] int64, with a copy of its weights."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetOutline:
    """The model as its files describe it, before its weights are loaded.

    Attributes:
        config: of the language model. tokenizer: as transformers has it.
        device, dtype: where it will be, and what it will compute in.
        trusts_code: whether code of a model's own may be run.
        digest: tells TargetModel's; reads all of the weights' files when it is first called.
    """

    config: "PreTrainedConfig"
    tokenizer: Any
    device: torch.device
    dtype: torch.dtype
    trusts_code: bool
    digest: Callable[[], str]


@dataclass(frozen=True, slots=True)
class TargetModel:
    """The model itself, for proposers that are networks.

    Attributes:
        model: its decoder layers may be packed or compiled: call it, its embedding and its norm, and leave the
            weights of its layers alone.
        config: of the language model. tokenizer: as transformers has it. folder: with its files.
        dtype: of weights and hidden states. digest: hex, equal for equal weights.
        block_size: tokens of a KV block. max_num_tokens: no sequence is longer. trusts_code: whether code of a model's
            own may be run. runs_plain: whether modules are to stay as they are, neither merged nor packed.
    """

    model: "PreTrainedModel"
    head: Head
    config: "PreTrainedConfig"
    tokenizer: Any
    folder: Path
    dtype: torch.dtype
    digest: str
    block_size: int
    max_num_tokens: int
    trusts_code: bool = False
    runs_plain: bool = False


@dataclass(frozen=True, slots=True)
class TargetView:
    """What a proposer may know of what verifies its drafts.

    Attributes:
        vocab_size: draft ids are below it.
        device: where the batch's tensors are, and drafts are to be.
        num_slots: most sequences at a time; slots are below it.
        network: None where the target is not at hand.
    """

    vocab_size: int
    device: torch.device
    num_slots: int
    network: TargetModel | None = None


@dataclass(frozen=True, slots=True)
class DraftSampling:
    """How the tokens of R sequences are chosen; [R] each.

    Attributes:
        temperature: float32, 0 is greedy. key: int64, what all randomness of a sequence follows from.
        is_seeded: bool, whose drafts are to have the target's own noise; those of the others one of their own.
        has_seeded, has_unseeded: whether any sequence with a temperature may be the one or the other.
    """

    temperature: Tensor
    key: Tensor
    is_seeded: Tensor
    has_seeded: bool
    has_unseeded: bool


@dataclass(frozen=True, slots=True)
class ProposeInput:
    """The sequences to draft for, R of them; device tensors that the proposer only reads.

    Attributes:
        token_ids: [slots, width] int32, known tokens of every slot.
        slots: [R] int64, rows of `token_ids`.
        num_tokens: [R] int64, known tokens of each.
        max_drafts: [R] int32, most drafts each may get.
        max_num_tokens: no sequence is longer than this; known to the host.
        num_proposed: columns that are wanted, at most the proposer's k; known to the host. None is k.
        sampling: how the drafts of a proposer with a vocabulary are to be drawn; None where nobody draws.
        hidden: [R, hidden], the target's last hidden state in front of each sequence's last token: what that token
            was chosen by. None for proposers that did not ask for it.
    """

    token_ids: Tensor
    slots: Tensor
    num_tokens: Tensor
    max_drafts: Tensor
    max_num_tokens: int
    num_proposed: int | None = None
    sampling: "DraftSampling | None" = None
    hidden: Tensor | None = None


@dataclass(frozen=True, slots=True)
class DraftVocabulary:
    """The vocabulary of the distributions that drafts are drawn from.

    Attributes:
        size: of it.
        dtype: of the logits.
        to_draft: [target's vocabulary] int32, the id that a token has in it, or -1; None where it is the target's.
    """

    size: int
    dtype: torch.dtype
    to_draft: Tensor | None = None

    @classmethod
    def of(cls, to_target: Tensor | None, target_size: int) -> "DraftVocabulary":
        """Of float32 logits of tokens with these ids in the target's vocabulary, or -1; None where it is that one."""
        if to_target is None:
            return cls(target_size, torch.float32)
        known = to_target >= 0
        own_ids = torch.arange(len(to_target), dtype=torch.int32, device=to_target.device)
        to_draft = torch.full((target_size,), -1, dtype=torch.int32, device=to_target.device)
        to_draft[to_target[known]] = own_ids[known]
        return cls(len(to_target), torch.float32, to_draft)


@dataclass(frozen=True, slots=True)
class Draft:
    """Proposed tokens.

    Attributes:
        ids: [R, k] int32, the target's, -1 beyond a row's count.
        counts: [R] int32.
        logits: [R, k, size] of the proposer's `vocabulary`, whose softmax the drafts were drawn from; what lies
            beyond a row's count is never looked at. None where drafts are certain.
        ranks: [R] int32, whose drafts they are: the place in the configured list; None where there is only one.
    """

    ids: Tensor
    counts: Tensor
    logits: Tensor | None = None
    ranks: Tensor | None = None


class Proposer(Protocol):
    """Drafts tokens on the device, after each step, without waiting for it; used from the step thread."""

    @property
    def num_speculative_tokens(self) -> int:
        """k: the width of every Draft, and the most tokens it proposes."""

    @property
    def runs_on_device(self) -> bool:
        """Whether `propose` only queues device work of shapes that the host knows, so that it can be captured."""

    @property
    def vocabulary(self) -> DraftVocabulary | None:
        """What drafts are drawn from, the same in every Draft; None where they are certain, as a lookup's are."""

    def propose(self, inputs: ProposeInput) -> Draft:
        """Draft the tokens that may follow each sequence."""


@dataclass(frozen=True, slots=True)
class SequenceText:
    """A sequence that enters the batch, for the first time or after a preemption.

    Attributes:
        token_ids: all that is known, at least one. num_prompt: how many of them are the prompt.
        cache_salt: what it brings is nobody's business who has another one.
    """

    token_ids: tuple[int, ...]
    num_prompt: int
    cache_salt: str


class HostProposer(ABC):
    """Drafts in Python, from tokens that have settled; used from the step thread, between two steps.

    Its drafts go to the device with the next step, so a sequence it drafts for waits until its step has settled,
    whatever the pipeline depth. Other sequences do not wait. Each is known by its slot; what raises ends drafting
    for that slot until it is started anew.

    Every sequence that may be drafted for is told of, whether drafts are wanted or not: `start` and `extend` should do
    no more than note what they get. With a step that drafts are wanted from, all its sequences are extended first;
    then each is proposed for, once at most. That is the place for work on what was noted, in pieces if it is much.
    """

    @property
    @abstractmethod
    def num_speculative_tokens(self) -> int:
        """k: the most tokens it proposes for a sequence."""

    @abstractmethod
    def start(self, slot: int, text: SequenceText) -> None:
        """A sequence takes a slot; the one that had it is gone."""

    @abstractmethod
    def extend(self, slot: int, token_ids: Sequence[int]) -> None:
        """Tokens of the target's were added, in order; some behind the end of the sequence are possible."""

    @abstractmethod
    def propose(self, slot: int, max_drafts: int) -> Sequence[int]:
        """At most so many tokens that may follow; none if there is nothing to say."""
