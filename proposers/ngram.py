"""Prompt lookup: what followed the last few tokens before may follow them again."""

from typing import Annotated, ClassVar, Literal

import torch
from pydantic import Field, TypeAdapter, ValidationError, model_validator

from proposers.base import Draft, ProposeInput, TargetView
from proposers.config import ProposerConfig
from server.kernels import jit
from server.kernels.ngram_lookup import ngram_lookup

_DEFAULT_MIN = 3
_SHORTER: TypeAdapter[int] = TypeAdapter(Annotated[int, Field(ge=1, lt=_DEFAULT_MIN)])


class NgramConfig(ProposerConfig):
    """Settings of prompt lookup."""

    changeable: ClassVar[frozenset[str]] = frozenset({"prompt_lookup_max", "prompt_lookup_min", "match"})

    prompt_lookup_max: int = Field(default=5, ge=1, le=64, description="longest run of tokens that is looked up")
    prompt_lookup_min: int = Field(
        default=_DEFAULT_MIN, ge=1, le=64, description="shortest run of tokens that is looked up"
    )
    match: Literal["first", "last"] = Field(default="first", description="which of several occurrences is copied")

    @model_validator(mode="before")
    @classmethod
    def _lower_default_minimum(cls, values: dict[str, object]) -> dict[str, object]:
        """A maximum below the default minimum, given alone, is meant for both."""
        if "prompt_lookup_min" in values:
            return values
        try:
            return {**values, "prompt_lookup_min": _SHORTER.validate_python(values.get("prompt_lookup_max"))}
        except ValidationError:
            return values

    @model_validator(mode="after")
    def _ordered_window(self) -> "NgramConfig":
        if self.prompt_lookup_min > self.prompt_lookup_max:
            raise ValueError(
                f"prompt_lookup_min must be at most prompt_lookup_max ({self.prompt_lookup_max}), "
                f"got {self.prompt_lookup_min}"
            )
        return self

    def build(self, target: TargetView) -> "NgramProposer":
        """Prompt lookup does for every target."""
        return NgramProposer(
            self.num_speculative_tokens,
            self.prompt_lookup_min,
            self.prompt_lookup_max,
            takes_last=self.match == "last",
            device=target.device,
        )


class NgramProposer:
    """Finds the longest run of at most `max_window` last tokens that occurred before, and copies what followed.

    Among occurrences of equal length the first is taken, or the last. Nothing is proposed for a run
    shorter than `min_window`.
    Source: Saxena 2023, "Prompt Lookup Decoding".
    """

    def __init__(
        self, num_speculative_tokens: int, min_window: int, max_window: int, *, takes_last: bool, device: torch.device
    ) -> None:
        """Args: 1 <= min_window <= max_window, in tokens."""
        self._k = num_speculative_tokens
        self._min_window = min_window
        self._max_window = max_window
        self._takes_last = takes_last
        self._rule = torch.tensor([min_window, max_window, takes_last], dtype=torch.int32, device=device)

    @property
    def num_speculative_tokens(self) -> int:
        """Most tokens proposed per step."""
        return self._k

    @property
    def runs_on_device(self) -> bool:
        """Nothing is read on the host."""
        return True

    @property
    def vocabulary(self) -> None:
        """A lookup draws nothing."""
        return None

    def reconfigure(self, config: NgramConfig) -> None:
        """Look up in another way from the next step on; captured steps read the rule from its place."""
        self._min_window, self._max_window = config.prompt_lookup_min, config.prompt_lookup_max
        self._takes_last = config.match == "last"
        self._rule.copy_(torch.tensor([self._min_window, self._max_window, self._takes_last], dtype=torch.int32))

    def propose(self, inputs: ProposeInput) -> Draft:
        """Draft by lookup; every operation is on the device and of a shape the host knows."""
        if jit.is_available(inputs.slots.device):
            return Draft(
                *ngram_lookup(
                    inputs.token_ids,
                    inputs.slots,
                    inputs.num_tokens,
                    inputs.max_drafts,
                    inputs.max_num_tokens,
                    self._rule,
                    self._k,
                )
            )
        return self.propose_eagerly(inputs)

    def propose_eagerly(self, inputs: ProposeInput) -> Draft:
        """The kernel's twin."""
        device = inputs.slots.device
        num_tokens = inputs.num_tokens[:, None]
        token_ids = inputs.token_ids[inputs.slots, : inputs.max_num_tokens]
        place = torch.arange(token_ids.shape[1], device=device)
        is_before_last = place < num_tokens - 1
        # run[r, i]: how many tokens ending at i equal the tokens ending at the last one.
        run = torch.zeros_like(token_ids)
        is_match = is_before_last
        for back in range(self._max_window):
            suffix = token_ids.gather(1, (num_tokens - 1 - back).clamp(min=0))
            shifted = token_ids.roll(back, dims=1)  # place i holds token i - back
            is_match = is_match & (shifted == suffix) & (place >= back)
            run += is_match
        longest = run.amax(1, keepdim=True)
        is_best = (run == longest) & is_before_last
        order = place if self._takes_last else -place
        found = torch.where(is_best, order, order.min() - 1).argmax(1, keepdim=True)
        source = found + 1 + torch.arange(self._k, device=device)
        available = (num_tokens - 1 - found)[:, 0]
        counts = torch.where(longest[:, 0] >= self._min_window, available, 0)
        counts = torch.minimum(counts, inputs.max_drafts).clamp(max=self._k)
        ids = token_ids.gather(1, source.clamp(max=token_ids.shape[1] - 1))
        is_draft = torch.arange(self._k, device=device) < counts[:, None]
        return Draft(torch.where(is_draft, ids, -1).int(), counts.int())
