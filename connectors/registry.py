"""Connectors by the name they have in the configuration, imported when asked for.

A connector is found through its class of settings: one of ours by its line here, one of another distribution by its
entry point in the group `outrider.connectors`, any other by `module:Class` in place of a name, or by the class's name
beside `kv_connector_module_path`.
"""

from collections.abc import Iterable, Mapping
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points

from connectors.config import ConnectorConfig
from server.errors import ConfigError
from server.suggestions import did_you_mean

GROUP = "outrider.connectors"

BUILT_IN: Mapping[str, str] = {
    "fault": "connectors.fault:FaultConfig",
    "filesystem": "connectors.filesystem:FilesystemConfig",
    "lmcache": "connectors.lmcache.connector:LMCacheConfig",
    "memory": "connectors.memory:MemoryConfig",
    "multi": "connectors.multi:MultiConfig",
    "nixl": "connectors.nixl.connector:NixlConfig",
    "null": "connectors.null:NullConfig",
    "tcp": "connectors.tcp.connector:TcpConfig",
}

ALIASES: Mapping[str, str] = {
    "ExampleConnector": "filesystem",
    "LMCacheConnectorV1": "lmcache",
    "MultiConnector": "multi",
    "NixlConnector": "nixl",
    "SharedStorageConnector": "filesystem",
}
"""What other engines call connectors with the same purpose."""


def known_connectors(installed: Iterable[EntryPoint] | None = None) -> dict[str, str]:
    """Where the settings of each connector are, by its name.

    Args: installed: entry points; those of the environment if not given.
    Raises: ConfigError if a name stands for two of them.
    """
    known = {**BUILT_IN, **{alias: BUILT_IN[name] for alias, name in ALIASES.items()}}
    for point in entry_points(group=GROUP) if installed is None else installed:
        if known.setdefault(point.name, point.value) != point.value:
            raise ConfigError(
                f"two connectors are called {point.name}: {known[point.name]} and {point.value}; "
                "uninstall the distribution of one of them"
            )
    return known


def config_class(name: str, module_path: str | None = None) -> type[ConnectorConfig]:
    """The class of settings of a connector.

    Args:
        name: of the connector, or module:Class. module_path: where the class of that name is.
    Raises: ConfigError, whose message is to follow the name of the setting.
    """
    known = known_connectors()
    if module_path is not None:
        place = f"{module_path}:{name}"
    elif ":" in name:
        place = name
    elif name in known:
        place = known[name]
    else:
        names = ", ".join(sorted(known.keys() - ALIASES.keys()))
        raise ConfigError(f"must be one of {names}, or module:Class of another{did_you_mean(name, known)}")
    module_name, _, class_name = place.partition(":")
    try:
        found = getattr(import_module(module_name), class_name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"{place} can not be loaded: {error}") from error
    if not (isinstance(found, type) and issubclass(found, ConnectorConfig)):
        raise ConfigError(f"{place} is no class of settings, see connectors.config.ConnectorConfig")
    return found
