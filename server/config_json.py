"""Settings that are mappings, given as JSON text where only text can be given."""

import json

from server.config_values import Given, quoted
from server.errors import ConfigError


def read_json(name: str, given: Given, accepted: str) -> object:
    """The value, read from JSON if it is text; None for "none".

    Args: name: of the setting. accepted: what the text may be, to follow the words "must be".
    Raises: ConfigError.
    """
    if not isinstance(given.value, str):
        return given.value
    if given.value.strip().lower() == "none":
        return None
    try:
        value = json.loads(given.value, object_pairs_hook=_each_once)
    except ConfigError as error:
        raise ConfigError(f"{name}: {error} (from {given.source})") from None
    except (ValueError, RecursionError) as error:  # the latter for brackets in thousands
        problem = f"must be {accepted}, got {quoted(given.value)}: {error}"
        raise ConfigError(f"{name}: {problem} (from {given.source})") from None
    return None if value == "none" else value


def _each_once(pairs: list[tuple[str, object]]) -> dict[str, object]:
    """An object of JSON, which takes the last value of a key in silence. Raises: ConfigError."""
    items: dict[str, object] = {}
    for name, value in pairs:
        if name in items:
            raise ConfigError(f"{quoted(name)} is given twice")
        items[name] = value
    return items
