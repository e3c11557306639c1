"""How KV leaves and reaches this node: a setting that is a mapping, whose keys depend on the connector it names."""

from collections.abc import Mapping
from typing import Literal

from pydantic import Field

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
    engine_id: str | None = Field(
        default=None, min_length=1, max_length=128, description="names this node to its peers; made up if not given"
    )

    def of_role(self, role: Role) -> "KVTransferConfig":
        """With the `kv_role` that follows from a node's role, unless one is given. Raises: ConfigError."""
        allowed = _KV_ROLES[role]
        if self.kv_role is None:
            return self.model_copy(update={"kv_role": allowed[0]})
        if self.kv_role not in allowed:
            raise ConfigError(
                f"{KV_TRANSFER_CONFIG}.kv_role: must be {' or '.join(allowed)} where role is {role}, "
                f"got {self.kv_role!r}"
            )
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
