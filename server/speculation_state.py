"""What holds of speculation at a moment, and what it becomes by a change while the server runs."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from pydantic import ValidationError

from proposers.config import ProposerConfig, Reconfigurable
from server.config_values import refusals
from server.errors import FieldViolation, InvalidRequest
from server.request import ModelInfo
from server.speculative_config import PolicyConfig, SpeculativeConfig
from server.suggestions import did_you_mean

WITHOUT = "the server was started without speculation, see --speculative-config"


@dataclass(frozen=True, kw_only=True, slots=True)
class ProposerChange:
    """Other settings of one proposer.

    Attributes:
        member: its place in the configured list or its method; None is the only one.
        parameters: by the setting's name, as a configuration file has them.
    """

    member: int | str | None = None
    parameters: Mapping[str, object]


@dataclass(frozen=True, kw_only=True, slots=True)
class SpeculationChange:
    """What is to be otherwise; None and what is empty stays as it is.

    Attributes:
        policy: fields of PolicyConfig, of which one takes the place of the other.
    """

    enabled: bool | None = None
    num_speculative_tokens: int | None = None
    policy: Mapping[str, object] = field(default_factory=dict)
    proposers: Sequence[ProposerChange] = ()


@dataclass(frozen=True, slots=True)
class Member:
    """A proposer's settings, and the names of those that may change while it drafts."""

    config: ProposerConfig
    changeable: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class SpeculationState:
    """Attributes:
    members: what drafts, in the order in which it is asked; empty if the server was started without speculation.
    max_num_speculative_tokens: what the server was started with: memory and graphs are made for it.
    num_speculative_tokens: most drafts of a row in a step, while `enabled`.
    """

    members: tuple[Member, ...]
    policy: PolicyConfig
    max_num_speculative_tokens: int
    num_speculative_tokens: int
    enabled: bool

    @classmethod
    def of(cls, config: SpeculativeConfig | None, proposers: Sequence[object]) -> "SpeculationState":
        """As the server was started. Args: proposers: what was built from the configuration's, in its order."""
        if config is None:
            return cls((), PolicyConfig(), 0, 0, enabled=False)
        members = [
            Member(settings, settings.changeable if isinstance(proposer, Reconfigurable) else frozenset())
            for settings, proposer in zip(config.proposers, proposers, strict=True)
        ]
        most = config.num_speculative_tokens
        return cls(tuple(members), config.policy, most, most, enabled=True)

    @property
    def max_drafts(self) -> int:
        """Most drafts of a row in a step now."""
        return self.num_speculative_tokens if self.enabled else 0

    def reported(self, info: ModelInfo) -> ModelInfo:
        """The model's description with what holds now."""
        method = ",".join(member.config.method for member in self.members) if self.enabled else "none"
        return replace(info, speculative_method=method, num_speculative_tokens=self.max_drafts)

    def settings(self) -> dict[str, object]:
        """All that may change, by name."""
        schedule = self.policy.num_speculative_tokens_per_batch_size
        return {
            "enabled": self.enabled,
            "num_speculative_tokens": self.num_speculative_tokens,
            "policy": self.policy.policy if schedule is None else dict(sorted(schedule.items())),
        } | {
            f"proposers[{i}].{name}": getattr(member.config, name)
            for i, member in enumerate(self.members)
            for name in sorted(member.changeable)
        }

    def changed(self, change: SpeculationChange) -> "SpeculationState":
        """The state with a change, all of it or none.

        Raises: InvalidRequest naming every refused field of SetSpeculationRequest, and what would be accepted.
        """
        violations = list(self._refused(change))
        policy, members = self.policy, list(self.members)
        num_drafts = self.num_speculative_tokens
        if change.num_speculative_tokens is not None:
            num_drafts = change.num_speculative_tokens
        if change.policy and self.members:
            name = next(iter(change.policy))
            try:
                policy = PolicyConfig.model_validate(change.policy)
                policy.check_width(num_drafts)
            except ValidationError as error:
                violations += [FieldViolation(name, rule) for _, rule in refusals(PolicyConfig, change.policy, error)]
            except ValueError as error:
                violations.append(FieldViolation(name, str(error)))
        for i, each in enumerate(change.proposers):
            try:
                place = _place_of(members, each.member)
                members[place] = _reconfigured(members[place], each.parameters)
            except InvalidRequest as error:
                path = f"proposers[{i}]"
                violations += [FieldViolation(f"{path}.{v.field}", v.description) for v in error.violations]
        if violations:
            raise InvalidRequest(*violations)
        return replace(
            self,
            members=tuple(members),
            policy=policy,
            num_speculative_tokens=num_drafts,
            enabled=self.enabled if change.enabled is None else change.enabled,
        )

    def _refused(self, change: SpeculationChange) -> "list[FieldViolation]":
        if not self.members:
            asked = {
                "enabled": change.enabled,
                "num_speculative_tokens": change.num_speculative_tokens,
                **dict.fromkeys(change.policy, True),
            }
            return [FieldViolation(name, WITHOUT) for name, value in asked.items() if value]
        most, wanted = self.max_num_speculative_tokens, change.num_speculative_tokens
        if wanted is None or 1 <= wanted <= most:
            return []
        rule = f"must be from 1 to {most}, which the server was started with, got {wanted}"
        return [FieldViolation("num_speculative_tokens", rule)]


def _place_of(members: Sequence[Member], wanted: int | str | None) -> int:
    """The place of the one that is meant. Raises: InvalidRequest."""
    methods = [member.config.method for member in members]
    if not members:
        raise InvalidRequest.of("parameters", WITHOUT)
    if isinstance(wanted, int):
        if not 0 <= wanted < len(members):
            raise InvalidRequest.of("index", f"must be from 0 to {len(members) - 1}, got {wanted}")
        return wanted
    places = [i for i, method in enumerate(methods) if wanted in (None, method)]
    if not places:
        raise InvalidRequest.of("method", f"must be one of {', '.join(methods)}, got {wanted}")
    if len(places) > 1:
        raise InvalidRequest.of("index", f"must say which of {', '.join(methods)} is meant, counted from 0")
    return places[0]


def _reconfigured(member: Member, parameters: Mapping[str, object]) -> Member:
    """With other settings. Raises: InvalidRequest naming every refused one."""
    config, kind = member.config, type(member.config)
    can_change = f"; {', '.join(sorted(member.changeable)) or 'nothing'} of {config.method} can"
    violations = [
        FieldViolation(
            f"parameters.{name}",
            f"cannot change while the server runs{can_change}"
            if name in kind.model_fields
            else f"no such setting{did_you_mean(name, member.changeable) or can_change}",
        )
        for name in parameters
        if name not in member.changeable
    ]
    if violations:
        raise InvalidRequest(*violations)
    values = {**config.model_dump(), **parameters}
    try:
        return replace(member, config=kind.model_validate(values))
    except ValidationError as error:
        raise InvalidRequest(
            *(FieldViolation(f"parameters.{name}".rstrip("."), rule) for name, rule in refusals(kind, values, error))
        ) from None
