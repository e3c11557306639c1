"""How KV leaves and reaches this node: a setting that is a mapping, whose keys depend on the connector it names."""

import re
from collections.abc import Mapping
from typing import Literal
from uuid import uuid4

from pydantic import Field, field_validator

from connectors.choice import ConnectorChoice
from server.config_json import read_json
from server.config_values import Given, quoted, read_section
from server.errors import ConfigError

KV_TRANSFER_CONFIG = "kv_transfer_config"

Role = Literal["prefill", "decode", "both"]
_KV_ROLES: Mapping[Role, tuple[Literal["kv_producer", "kv_consumer", "kv_both"], ...]] = {
    "prefill": ("kv_producer", "kv_both"),
    "decode": ("kv_consumer", "kv_both"),
    "both": ("kv_both", "kv_producer", "kv_consumer"),
}
"""What a node of this role may do with KV; first, what it does if nothing is said."""


class KVTransferConfig(ConnectorChoice):
    """A connector, and what is to happen when it fails; names are vLLM's."""

    kv_load_failure_policy: Literal["recompute", "fail"] = Field(
        default="recompute", description="what becomes of a request whose KV could not be loaded"
    )
    engine_id: str | None = Field(default=None, description="names this node to its peers; made up if not given")

    @field_validator("engine_id")
    @classmethod
    def _is_short(cls, engine_id: str | None) -> str | None:
        if engine_id is not None and not re.fullmatch(r"[A-Za-z0-9._-]{1,31}", engine_id):
            raise ValueError("must be 1 to 31 letters, digits, dots, dashes and underscores, or none")
        return engine_id

    def new_engine_id(self) -> str:
        """What an engine is called from one start to the next, so that peers see that it is another one."""
        made_up = uuid4().hex
        return made_up if self.engine_id is None else f"{self.engine_id}-{made_up}"

    def of_role(self, role: Role) -> "KVTransferConfig":
        """With the `kv_role` that follows from a node's role, unless one is given.

        Raises: ConfigError if that contradicts the role, or if KV can not go the way that the role is for.
        """
        allowed = _KV_ROLES[role]
        if self.kv_role is None:
            return self.model_copy(update={"kv_role": allowed[0]}).of_role(role)
        if self.kv_role not in allowed:
            raise ConfigError(
                f"{KV_TRANSFER_CONFIG}.kv_role: must be {' or '.join(allowed)} where role is {role}, "
                f"got {self.kv_role!r}"
            )
        if role == "prefill" and not self.carriers("out"):
            raise ConfigError(f"role: prefill needs a connector that other nodes can read from, {self.name} is none")
        if role == "decode" and not self.carriers("in"):
            raise ConfigError(f"role: decode needs a connector that reads from other nodes, {self.name} is none")
        return self

    def plain(self) -> dict[str, object]:
        """The settings as they may be given again."""
        return self.model_dump(exclude_defaults=True)


def parse_kv_transfer_config(given: Given) -> KVTransferConfig | None:
    """Read a mapping, JSON text of one, None or "none".

    Raises: ConfigError that names every refused value.
    """
    value = read_json(KV_TRANSFER_CONFIG, given, "a JSON object or none")
    if value is None or isinstance(value, KVTransferConfig):
        return value
    if not isinstance(value, Mapping):
        raise ConfigError(f"{KV_TRANSFER_CONFIG}: must be a mapping or none, got {quoted(value)} (from {given.source})")
    try:
        return read_section(
            KVTransferConfig, {str(name): item for name, item in value.items()}, f"{KV_TRANSFER_CONFIG}."
        )
    except ConfigError as error:
        raise ConfigError(f"{error} (from {given.source})") from error
