"""Maps the vocabularies of two tokenizers onto each other, where both have a token for the same text.

Token-level intersection (Timor et al. 2025, arXiv:2502.05202): what a draft model says of tokens that the target
does not have is left out, so that drafts are the target's tokens and are verified as any others.
"""

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from proposers.token_text import is_byte_token, text_of_tokens
from server.errors import ConfigError

logger = logging.getLogger(__name__)

SETTING = "use_heterogeneous_vocab"
LEAST_SHARE = 0.1
"""Of the draft's tokens; where the target knows fewer, most of what the draft would say is lost."""
_ROLES = ("eos_token_id", "bos_token_id", "pad_token_id")


@dataclass(frozen=True, slots=True)
class VocabularyMapping:
    """Which tokens of a target and a draft model are the same, one to one; on the CPU.

    Attributes:
        to_target: [draft's vocabulary] int64, -1 for a token that the target does not have.
        input_ids: [target's vocabulary] int64, what the draft model is given for each token: the same one, or else
            the last one that its tokenizer makes of the text.
    """

    to_target: Tensor
    input_ids: Tensor

    @classmethod
    def of_equal_ids(cls, target_size: int, draft_size: int) -> "VocabularyMapping":
        """The same ids as far as both go; beyond there are rows without a token."""
        ids = torch.arange(max(target_size, draft_size))
        return cls(torch.where(ids < target_size, ids, -1)[:draft_size], ids[:target_size].clamp(max=draft_size - 1))

    @property
    def num_shared(self) -> int:
        """Tokens that both have."""
        return int((self.to_target >= 0).sum())


def map_vocabularies(
    target_tokenizer: Any, draft_tokenizer: Any, target_size: int, draft_size: int
) -> VocabularyMapping:
    """Intersect two vocabularies by the bytes that their tokens stand for.

    Control tokens meet control tokens only: those that are written alike, and then EOS, BOS and padding by their
    role. Of several tokens for the same bytes, one spelled in characters goes before a single byte, and then the
    lowest id is taken.

    Args:
        target_tokenizer, draft_tokenizer: as transformers loads them.
        target_size, draft_size: of the models' vocabularies; tokens from there on are left out, and rows without
            a token belong to nothing.

    Raises: ConfigError for tokenizers that are not transformers' fast ones, and where no token is shared.
    """
    target, draft = _Vocabulary(target_tokenizer, target_size), _Vocabulary(draft_tokenizer, draft_size)
    pairs = _pairs(target, draft)
    mapping = VocabularyMapping(
        to_target=_table(((twin, token_id) for token_id, twin in pairs.items()), draft_size),
        input_ids=_input_ids(target, draft, pairs),
    )
    _report(mapping, target, draft)
    return mapping


def check_shared_tokens(target_tokenizer: Any, draft_tokenizer: Any, target_size: int, draft_size: int) -> None:
    """See that two vocabularies can be intersected, and have a token in common.

    Raises: ConfigError.
    """
    _pairs(_Vocabulary(target_tokenizer, target_size), _Vocabulary(draft_tokenizer, draft_size))


def check_same_vocabulary(target_tokenizer: Any, draft_tokenizer: Any, target_size: int, draft_size: int) -> None:
    """See that two models name the same tokens by the same ids.

    Rows beyond the tokenizers' tokens do not count, so the models' vocabularies may differ in size. Where one of
    them has no tokenizer, only sizes can be compared.

    Raises: ConfigError that names the first id at which they differ.
    """
    own, other = _tokens(target_tokenizer, target_size), _tokens(draft_tokenizer, draft_size)
    if own and other:
        if own == other:
            return
        first = min(token_id for token_id in own.keys() | other.keys() if own.get(token_id) != other.get(token_id))
        difference = f"token {first} is {_name(own, first)} for the target and {_name(other, first)} for the draft"
    elif target_size == draft_size:
        return
    else:
        difference = "without two tokenizers there is nothing else to go by"
    raise ConfigError(
        f"model: has another vocabulary (of {draft_size}, {len(other)} of them tokens) than the target (of "
        f"{target_size}, {len(own)} of them tokens): {difference}; take a draft model of the target's family, or set "
        f"{SETTING}"
    )


class _Vocabulary:
    """The tokens of a model by their ids, in order, and what they stand for."""

    def __init__(self, tokenizer: Any, size: int) -> None:
        """Raises: ConfigError."""
        if getattr(tokenizer, "backend_tokenizer", None) is None:
            raise ConfigError(f"{SETTING}: both models need a tokenizer.json, and one has none")
        self.tokenizer = tokenizer
        self.size = size
        self.tokens = _tokens(tokenizer, size)
        self.texts = text_of_tokens(tokenizer, self.tokens)
        added = {token_id for token_id, token in tokenizer.added_tokens_decoder.items() if token.special}
        self.controls = (added | set(tokenizer.all_special_ids)) & self.tokens.keys()

    def ids_by_text(self) -> dict[bytes, int]:
        """The token for each text, control tokens left out."""
        found: dict[bytes, int] = {}
        single_bytes: dict[bytes, int] = {}
        for token_id, text in self.texts.items():
            if token_id not in self.controls:
                is_byte = len(text) == 1 and is_byte_token(self.tokens[token_id])
                (single_bytes if is_byte else found).setdefault(text, token_id)
        return single_bytes | found

    @property
    def unknown(self) -> int:
        """What stands for something that it cannot spell."""
        roles = (self.tokenizer.unk_token_id, self.tokenizer.bos_token_id, self.tokenizer.eos_token_id)
        return next((token_id for token_id in roles if token_id in self.tokens), 0)


def _tokens(tokenizer: Any, size: int) -> dict[int, str]:
    vocabulary: Mapping[str, int] = tokenizer.get_vocab()
    return dict(sorted((token_id, token) for token, token_id in vocabulary.items() if token_id < size))


def _name(tokens: Mapping[int, str], token_id: int) -> str:
    return repr(tokens[token_id]) if token_id in tokens else "none"


def _pairs(target: _Vocabulary, draft: _Vocabulary) -> dict[int, int]:
    """The draft's id of each token that both have, by the target's. Raises: ConfigError if there is none."""
    pairs = _pair_controls(target, draft)
    own, other = target.ids_by_text(), draft.ids_by_text()
    pairs.update((token_id, other[text]) for text, token_id in own.items() if text in other)
    if not pairs:
        raise ConfigError(
            f"{SETTING}: none of the draft model's {len(draft.tokens)} tokens is among the target's "
            f"{len(target.tokens)}"
        )
    return pairs


def _pair_controls(target: _Vocabulary, draft: _Vocabulary) -> dict[int, int]:
    by_token = {draft.tokens[token_id]: token_id for token_id in draft.controls}
    own = ((token_id, target.tokens[token_id]) for token_id in sorted(target.controls))
    pairs = {token_id: by_token[token] for token_id, token in own if token in by_token}
    for role in _ROLES:
        token_id, twin = getattr(target.tokenizer, role), getattr(draft.tokenizer, role)
        is_free = token_id not in pairs and twin not in pairs.values()
        if token_id in target.tokens and twin in draft.tokens and is_free:
            pairs[token_id] = twin
    return pairs


def _input_ids(target: _Vocabulary, draft: _Vocabulary, pairs: Mapping[int, int]) -> Tensor:
    given = dict(pairs)
    draft_ids = draft.ids_by_text()
    spelled: dict[int, str] = {}
    for token_id, text in target.texts.items():
        if token_id not in pairs:
            try:
                spelled[token_id] = text.decode()
            except UnicodeDecodeError:  # a part of a character
                given[token_id] = draft_ids.get(text[-1:], -1)
    backend = draft.tokenizer.backend_tokenizer
    encodings = backend.encode_batch_fast(list(spelled.values()), add_special_tokens=False)
    ends = ([-1, *encoding.ids][-1] for encoding in encodings)
    table = _table([*given.items(), *zip(spelled, ends, strict=True)], target.size)
    return torch.where((table < 0) | (table >= draft.size), draft.unknown, table)


def _table(entries: Iterable[tuple[int, int]], size: int) -> Tensor:
    """[size] int64, -1 where there is no entry."""
    table = torch.full((size,), -1)
    indexed = torch.tensor(list(entries), dtype=torch.int64).view(-1, 2)
    table[indexed[:, 0]] = indexed[:, 1]
    return table


def _report(mapping: VocabularyMapping, target: _Vocabulary, draft: _Vocabulary) -> None:
    num_shared, num_draft = mapping.num_shared, len(draft.tokens)
    if num_shared < LEAST_SHARE * num_draft:
        logger.warning("of the draft model's %d tokens the target has %d: it drafts little", num_draft, num_shared)
    else:
        logger.info("of the draft model's %d tokens the target has %d", num_draft, num_shared)
    eos = target.tokenizer.eos_token_id
    if eos is None or not (mapping.to_target == eos).any():
        logger.warning("the draft model has no token for the target's end of text, and never drafts it")
