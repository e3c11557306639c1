"""How drafts are made: the one setting that is a mapping, whose keys depend on the method it names."""

from collections.abc import Iterator, Mapping
from typing import Literal, TypeVar, cast

from pydantic import Field, SerializeAsAny, field_validator, model_validator

from proposers.config import ProposerConfig
from proposers.registry import config_class, likely_methods
from server.config_json import read_json
from server.config_values import Given, Section, build_section, quoted
from server.errors import ConfigError
from server.suggestions import did_you_mean

SPECULATIVE_CONFIG = "speculative_config"
AUTO: Literal["auto"] = "auto"
"""A head that is shipped for the model, or no speculation."""
DEFAULT_METHOD = "ngram"
SCHEDULE = "num_speculative_tokens_per_batch_size"
SYNTHETIC_FIELDS = ("synthetic_acceptance_rates", "synthetic_acceptance_length")


class AcceptanceConfig(Section):
    """Which drafts of sampled requests without a seed are kept."""

    rejection_sample_method: Literal["standard", "block", "synthetic"] = Field(
        default="standard",
        description="standard judges drafts one by one; block as a whole, and keeps no fewer; synthetic keeps them "
        "at given rates, whatever the model says: for measurements only",
    )
    synthetic_acceptance_rates: tuple[float, ...] | None = Field(
        default=None, description="the share of steps that keep at least 1, 2, ... drafts"
    )
    synthetic_acceptance_length: float | None = Field(
        default=None, description="mean tokens of a step, the one after the kept drafts included"
    )

    @model_validator(mode="after")
    def _fits_the_method(self) -> "AcceptanceConfig":
        given = [name for name in SYNTHETIC_FIELDS if getattr(self, name) is not None]
        if self.rejection_sample_method == "synthetic" and len(given) != 1:
            count = "both" if given else "neither"
            raise ValueError(
                f"rejection_sample_method synthetic needs one of {' and '.join(SYNTHETIC_FIELDS)}, got {count}"
            )
        if self.rejection_sample_method != "synthetic" and given:
            raise ValueError(f"{given[0]} needs rejection_sample_method synthetic")
        rates = self.synthetic_acceptance_rates or ()
        if not all(0 <= rate <= 1 for rate in rates):
            raise ValueError(f"synthetic_acceptance_rates must be from 0 to 1, got {list(rates)}")
        if list(rates) != sorted(rates, reverse=True):
            raise ValueError(
                f"synthetic_acceptance_rates must not rise, as who keeps two drafts has kept one, got {list(rates)}"
            )
        return self

    def check_width(self, num_drafts: int) -> None:
        """See that the values fit so many drafts. Raises: ValueError, whose message names the field."""
        rates, length = self.synthetic_acceptance_rates, self.synthetic_acceptance_length
        if rates is not None and len(rates) != num_drafts:
            raise ValueError(
                f"synthetic_acceptance_rates must be one for each of num_speculative_tokens ({num_drafts}, the "
                f"largest), got {len(rates)}"
            )
        if length is not None and not 1 <= length <= num_drafts + 1:
            raise ValueError(
                f"synthetic_acceptance_length must be from 1 to num_speculative_tokens + 1 ({num_drafts + 1}), "
                f"got {length:g}"
            )

    def rates(self, num_drafts: int) -> tuple[float, ...]:
        """The share of steps that keep at least 1, 2, ... drafts; empty unless the method is synthetic.

        A length is made of equal chances for each draft after those before it were kept.
        """
        if self.synthetic_acceptance_length is None:
            return self.synthetic_acceptance_rates or ()
        low, high = 0.0, 1.0
        for _ in range(53):  # bisection to the last bit
            chance = (low + high) / 2
            length = sum(chance**i for i in range(num_drafts + 1))
            low, high = (chance, high) if length < self.synthetic_acceptance_length else (low, chance)
        return tuple(high ** (i + 1) for i in range(num_drafts))


class PolicyConfig(Section):
    """How many of the drafts are verified."""

    policy: Literal["auto", "fixed"] = Field(
        default="auto",
        description="auto measures what drafts bring and cost, and verifies as many as pay, or none; fixed all",
    )
    num_speculative_tokens_per_batch_size: dict[int, int] | None = Field(
        default=None, description="most drafts of a row by the least number of rows they hold for; instead of a policy"
    )

    @field_validator("num_speculative_tokens_per_batch_size")
    @classmethod
    def _is_a_schedule(cls, schedule: dict[int, int] | None) -> dict[int, int] | None:
        if schedule is None or (schedule and all(rows >= 1 and 0 <= k <= 32 for rows, k in schedule.items())):
            return schedule
        raise ValueError("must name at least one number of rows, from 1 on, and from 0 to 32 drafts for each")

    def check_width(self, num_drafts: int) -> None:
        """See that a schedule allows no more drafts than a row gets at most. Raises: ValueError."""
        schedule = self.num_speculative_tokens_per_batch_size
        if schedule is not None and max(schedule.values()) > num_drafts:
            raise ValueError(
                f"must have from 0 to {num_drafts} drafts, which is num_speculative_tokens, for each number of rows, "
                f"got {schedule}"
            )

    @model_validator(mode="after")
    def _is_one_of_both(self) -> "PolicyConfig":
        if self.num_speculative_tokens_per_batch_size is not None and "policy" in self.model_fields_set:
            raise ValueError("num_speculative_tokens_per_batch_size takes the place of policy: give one of the two")
        return self


_SHARED = (AcceptanceConfig, PolicyConfig)
"""Settings that are one for all proposers."""
_Shared = TypeVar("_Shared", bound=Section)


class SpeculativeConfig(Section):
    """Settings of speculation."""

    proposers: tuple[SerializeAsAny[ProposerConfig], ...]
    acceptance: AcceptanceConfig = AcceptanceConfig()
    policy: PolicyConfig = PolicyConfig()

    @property
    def method(self) -> str:
        """What makes the drafts, in the order in which it is asked."""
        return ",".join(proposer.method for proposer in self.proposers)

    def named_proposers(self) -> Iterator[tuple[str, ProposerConfig]]:
        """Each one's settings behind what names them in messages, "speculative_config[1]" in a list."""
        for i, proposer in enumerate(self.proposers):
            yield SPECULATIVE_CONFIG if len(self.proposers) == 1 else f"{SPECULATIVE_CONFIG}[{i}]", proposer

    @property
    def num_speculative_tokens(self) -> int:
        """k: most drafts of a row in a step."""
        return max(proposer.num_speculative_tokens for proposer in self.proposers)

    def plain(self) -> object:
        """The settings as they may be given again."""
        first, *others = [proposer.model_dump() for proposer in self.proposers]
        first |= self.acceptance.model_dump(exclude_defaults=True) | self.policy.model_dump(exclude_defaults=True)
        return [first, *others] if others else first


def parse_speculative_config(given: Given) -> SpeculativeConfig | Literal["auto"] | None:
    """Read a mapping, a list of them, JSON text of either, "auto", None or "none".

    Raises: ConfigError that names every refused value.
    """
    if isinstance(given.value, str) and given.value.strip().lower() == AUTO:
        return AUTO
    accepted = 'a JSON object such as {"method": "ngram"}, a list of them, auto or none'
    value = read_json(SPECULATIVE_CONFIG, given, accepted)
    if value is None:
        return None
    if value == AUTO:
        return AUTO
    if isinstance(value, SpeculativeConfig):
        return value
    members: list[object] = list(value) if isinstance(value, list | tuple) else [value]
    problem = f"must be a mapping, a list of them, auto or none, got {quoted(given.value)}"
    if not members:
        raise ConfigError(f"{SPECULATIVE_CONFIG}: {problem} (from {given.source})")
    for i, member in enumerate(members):
        if not isinstance(member, Mapping):
            if len(members) > 1:
                problem = f"[{i}] must be a mapping, got {quoted(member)}"
            raise ConfigError(f"{SPECULATIVE_CONFIG}: {problem} (from {given.source})")
    return _parse_members(cast("list[Mapping[object, object]]", members), given.source)


def _parse_members(members: list[Mapping[object, object]], source: str) -> SpeculativeConfig:
    """Of each mapping the proposer; what is one for all may be in any of them."""
    shared: dict[str, Given] = {}
    proposers: list[ProposerConfig] = []
    for i, member in enumerate(members):
        prefix = f"{SPECULATIVE_CONFIG}." if len(members) == 1 else f"{SPECULATIVE_CONFIG}[{i}]."
        items = {str(name): item for name, item in member.items()}
        for name in _shared_names() & items.keys():
            if name in shared:
                raise ConfigError(f"{prefix}{name}: is one for all, and is given already (from {source})")
            shared[name] = Given(items.pop(name), source)
        proposer = _parse_proposer(items, source, prefix)
        if proposer in proposers:
            first = f"{SPECULATIVE_CONFIG}[{proposers.index(proposer)}]"
            raise ConfigError(f"{prefix.rstrip('.')}: is the same as {first}, and would never be asked (from {source})")
        proposers.append(proposer)
    acceptance = _parse_shared(AcceptanceConfig, shared)
    policy = _parse_shared(PolicyConfig, shared)
    config = SpeculativeConfig(proposers=tuple(proposers), acceptance=acceptance, policy=policy)
    try:
        acceptance.check_width(config.num_speculative_tokens)
    except ValueError as error:
        raise ConfigError(f"{SPECULATIVE_CONFIG}: {error} (from {source})") from None
    try:
        policy.check_width(config.num_speculative_tokens)
    except ValueError as error:
        raise ConfigError(f"{SPECULATIVE_CONFIG}.{SCHEDULE}: {error} (from {source})") from None
    return config


def _parse_shared(section: type[_Shared], given: Mapping[str, Given]) -> _Shared:
    own = {name: value for name, value in given.items() if name in section.model_fields}
    return build_section(section, own, prefix=f"{SPECULATIVE_CONFIG}.")


def _parse_proposer(items: Mapping[str, object], source: str, prefix: str) -> ProposerConfig:
    method = items.get("method", DEFAULT_METHOD)
    if not isinstance(method, str):
        raise ConfigError(f"{prefix}method: must be text, got {quoted(method)} (from {source})")
    try:
        section = config_class(method)
    except ConfigError as error:
        raise ConfigError(f"{prefix}method: {error}, got {quoted(method)} (from {source})") from error
    names = (*section.model_fields, *sorted(_shared_names()))
    unknown = [name for name in items if name not in names]
    if unknown and "method" not in items:
        for name in sorted(unknown, key=lambda name: name != "model"):
            if likely := likely_methods(name, items[name]):
                one = "one of " if len(likely) > 1 else ""
                raise ConfigError(
                    f"{prefix}method: must be given with {name} {quoted(items[name])}: {one}{', '.join(likely)} "
                    f"(from {source})"
                )
    if unknown:
        hint = did_you_mean(unknown[0], names)
        raise ConfigError(f"{prefix}{unknown[0]}: no such setting of {method}{hint} (from {source})")
    given = {name: Given(item, source) for name, item in {**items, "method": method}.items()}
    return build_section(section, given, prefix=prefix)


def _shared_names() -> set[str]:
    return {name for section in _SHARED for name in section.model_fields}
