"""How drafts are made: the one setting that is a mapping, whose keys depend on the method it names."""

import json
from collections.abc import Mapping
from typing import cast

from pydantic import SerializeAsAny

from proposers.config import ProposerConfig
from proposers.registry import config_class
from server.config_values import Given, Section, build_section, quoted
from server.errors import ConfigError

NAME = "speculative_config"
DEFAULT_METHOD = "ngram"


class SpeculativeConfig(Section):
    """Settings of speculation."""

    proposer: SerializeAsAny[ProposerConfig]

    @property
    def method(self) -> str:
        """What makes the drafts."""
        return self.proposer.method

    @property
    def num_speculative_tokens(self) -> int:
        """k: most drafts of a row in a step."""
        return self.proposer.num_speculative_tokens

    def plain(self) -> object:
        """The settings as they may be given again."""
        return self.proposer.model_dump()


def parse_speculative_config(given: Given) -> SpeculativeConfig | None:
    """Read a mapping, JSON text of one, None or "none".

    Raises: ConfigError that names every refused value.
    """
    value = given.value
    if isinstance(value, str) and value.strip().lower() != "none":
        try:
            value = json.loads(value)
        except json.JSONDecodeError as error:
            problem = f"must be a JSON object or none, got {quoted(value)}: {error}"
            raise ConfigError(f"{NAME}: {problem} (from {given.source})") from None
    if value is None or isinstance(value, str):
        return None
    if isinstance(value, SpeculativeConfig):
        return value
    if not isinstance(value, Mapping):
        raise ConfigError(f"{NAME}: must be a mapping or none, got {quoted(given.value)} (from {given.source})")
    items = {str(name): item for name, item in cast("Mapping[object, object]", value).items()}
    return SpeculativeConfig(proposer=_parse_proposer(items, given.source, f"{NAME}."))


def _parse_proposer(items: Mapping[str, object], source: str, prefix: str) -> ProposerConfig:
    method = items.get("method", DEFAULT_METHOD)
    if not isinstance(method, str):
        raise ConfigError(f"{prefix}method: must be text, got {quoted(method)} (from {source})")
    try:
        section = config_class(method)
    except ConfigError as error:
        raise ConfigError(f"{prefix}method: {error}, got {quoted(method)} (from {source})") from error
    given = {name: Given(item, source) for name, item in {**items, "method": method}.items()}
    return build_section(section, given, prefix=prefix)
