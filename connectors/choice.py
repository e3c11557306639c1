"""Which connector, for which direction, with which settings: alone, or as a part of another connector's settings."""

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field, PrivateAttr, ValidationInfo, model_validator

from connectors.config import ConnectorConfig, Way
from connectors.registry import ALIASES, config_class
from server.config_values import Section, path_of, quoted, read_section
from server.errors import ConfigError

EXTRA_CONFIG = "kv_connector_extra_config"


class ConnectorChoice(Section):
    """A connector by its name; what settings there are depends on which."""

    _settings: ConnectorConfig = PrivateAttr()

    kv_connector: str = Field(min_length=1, description="the connector's name, or module:Class of its settings")
    kv_connector_module_path: str | None = Field(
        default=None, min_length=1, description="module of the class that kv_connector then is the name of"
    )
    kv_role: Literal["kv_producer", "kv_consumer", "kv_both"] | None = Field(
        default=None, description="whether KV leaves, comes in, or both"
    )
    kv_connector_extra_config: dict[str, Any] = Field(default={}, description="the connector's own settings")

    @model_validator(mode="after")
    def _read_settings(self, info: ValidationInfo) -> "ConnectorChoice":
        path = path_of(info)
        try:
            section = config_class(self.kv_connector, self.kv_connector_module_path)
        except ConfigError as error:
            raise ConfigError(f"{path}kv_connector: {error}, got {quoted(self.kv_connector)}") from error
        self._settings = read_section(section, self.kv_connector_extra_config, f"{path}{EXTRA_CONFIG}.")
        return self

    @classmethod
    def hint(cls, name: str, values: Mapping[str, object]) -> str:
        """A connector's own setting has a mapping of its own to be in."""
        path = values.get("kv_connector_module_path")
        try:
            section = config_class(str(values.get("kv_connector")), None if path is None else str(path))
        except ConfigError:
            return super().hint(name, values)
        return f"; it goes into {EXTRA_CONFIG}" if name in section.model_fields else super().hint(name, values)

    @property
    def name(self) -> str:
        """The connector's name here, whatever name it was chosen by."""
        return ALIASES.get(self.kv_connector, self.kv_connector)

    @property
    def settings(self) -> ConnectorConfig:
        """`kv_connector_extra_config`, read."""
        return self._settings

    @property
    def is_producer(self) -> bool:
        """Whether KV may leave."""
        return self.kv_role != "kv_consumer"

    @property
    def is_consumer(self) -> bool:
        """Whether KV may come in."""
        return self.kv_role != "kv_producer"

    def carriers(self, way: Way) -> frozenset[str]:
        """By connectors of which names KV gets to other nodes, or here from them."""
        is_used = self.is_producer if way == "out" else self.is_consumer
        return self.settings.carriers(self.name, way) if is_used else frozenset()


def read_choice(value: object, path: str) -> ConnectorChoice:
    """A connector in the settings of another one.

    Args: path: of the value, with a point at its end.
    Raises: ConfigError that names every refused value.
    """
    if isinstance(value, ConnectorChoice):
        return value
    if not isinstance(value, Mapping):
        raise ConfigError(f"{path.rstrip('.')}: must be a mapping with kv_connector, got {quoted(value)}")
    return read_section(ConnectorChoice, {str(name): item for name, item in value.items()}, path)
