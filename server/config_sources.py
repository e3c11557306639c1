"""Collects settings from flags, the environment and a file: flag > OUTRIDER_<FLAG> > file > default."""

import argparse
import json
import re
from collections.abc import Collection, Hashable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import yaml

from connectors.registry import BUILT_IN as CONNECTORS
from proposers.registry import BUILT_IN as PROPOSERS
from server.config import FLAT_SECTIONS, SETTING_NAMES, Config
from server.config_values import Given, accepted_values, choices
from server.errors import ConfigError
from server.kv_transfer_config import KV_TRANSFER_CONFIG
from server.speculative_config import SPECULATIVE_CONFIG
from server.suggestions import did_you_mean

ENV_PREFIX = "OUTRIDER_"
_CONFIG_FILE = "config"
_POSITIONAL = "model"

# What Kubernetes puts into every pod of a namespace with a Service named "outrider".
_SERVICE_LINK = re.compile(r"SERVICE_HOST|SERVICE_PORT(_[A-Z0-9_]+)?|PORT_[0-9]+_(TCP|UDP|SCTP)(_(PORT|PROTO|ADDR))?")
_SERVICE_LINK_PORT = re.compile(r"(tcp|udp)://.+")


@dataclass(frozen=True, slots=True)
class ResolvedConfig:
    """A configuration, and where each of its settings came from."""

    config: Config
    sources: Mapping[str, str]

    def render(self) -> str:
        """Every setting with its source, one a line; the text is itself a valid --config file."""
        lines = [f"{name}: {json.dumps(value, ensure_ascii=False)}" for name, value in self.config.flat().items()]
        width = max(map(len, lines))
        return "\n".join(
            f"{line:<{width}}  # {source}" for line, source in zip(lines, self.sources.values(), strict=True)
        )


def add_arguments(
    parser: argparse.ArgumentParser,
    sections: Collection[str] = FLAT_SECTIONS.keys(),
    *,
    takes_several: bool = False,
) -> None:
    """Add a flag for every setting of the sections, in a group each, and --config.

    A flag that is not given leaves no attribute behind, so that it differs from every value.

    Args: takes_several: --speculative-config may be given more than once; its attribute is the list.
    """
    parser.add_argument("--config", metavar="FILE", default=argparse.SUPPRESS, help="YAML file of settings by name")
    for section in (FLAT_SECTIONS[key] for key in sections):
        group = parser.add_argument_group(str(section.__doc__).rstrip("."))
        for name, field in section.model_fields.items():
            default = "none" if field.default is None else field.default
            words = f"{field.description} ({accepted_values(field)}; default: {default})".replace("%", "%%")
            if name == _POSITIONAL:
                parser.add_argument(name, metavar="MODEL", nargs="?", default=argparse.SUPPRESS, help=words)
            elif field.annotation is bool:
                group.add_argument(
                    _flag(name), action=argparse.BooleanOptionalAction, default=argparse.SUPPRESS, help=words
                )
            else:
                metavar = "{" + ",".join(map(str, choices(field))) + "}" if choices(field) else "VALUE"
                group.add_argument(_flag(name), metavar=metavar, default=argparse.SUPPRESS, help=words)
    group = parser.add_argument_group("How draft tokens are made")
    group.add_argument(
        _flag(SPECULATIVE_CONFIG),
        action="append" if takes_several else "store",
        metavar="JSON",
        default=argparse.SUPPRESS,
        help="JSON object, a list of them, none for no speculation, or auto for the head shipped for the model, if "
        f"there is one; method is one of {', '.join(PROPOSERS)}, or module:Class of another; num_speculative_tokens "
        "and all other keys: docs/speculative.md (default: auto)",
    )
    group = parser.add_argument_group("How KV leaves and reaches this node")
    group.add_argument(
        _flag(KV_TRANSFER_CONFIG),
        metavar="JSON",
        default=argparse.SUPPRESS,
        help=f"JSON object, or none; kv_connector is one of {', '.join(CONNECTORS)}, or module:Class of another; "
        "all other keys: docs/disaggregated.md (default: none)",
    )


def resolve(flags: Mapping[str, object], environ: Mapping[str, str]) -> ResolvedConfig:
    """Merge all sources.

    Args:
        flags: the attributes that the parser of `add_arguments` set; other names are ignored.
        environ: the process's environment.
    Raises: ConfigError, on the first source that cannot be read, else naming every bad setting.
    """
    given = _read_environment(environ)
    path = given.pop(_CONFIG_FILE).value if _CONFIG_FILE in given else None
    path = flags.get(_CONFIG_FILE, path)
    if path is not None:
        given = _read_file(Path(str(path))) | given
    given |= {name: Given(flags[name], f"flag {_flag(name)}") for name in SETTING_NAMES if name in flags}
    config = Config.from_given(given)
    return ResolvedConfig(config, {name: given[name].source if name in given else "default" for name in config.flat()})


def _flag(name: str) -> str:
    return "MODEL" if name == _POSITIONAL else "--" + name.replace("_", "-")


def _read_environment(environ: Mapping[str, str]) -> dict[str, Given]:
    """Every OUTRIDER_* variable by the name of its setting; one that names none is an error.

    Those that are empty are as if they were not set, as scripts and container files clear them; Kubernetes' service
    links are left out.
    """
    known = {ENV_PREFIX + name.upper(): name for name in (*SETTING_NAMES, _CONFIG_FILE)}
    given: dict[str, Given] = {}
    for variable in sorted(name for name in environ if name.startswith(ENV_PREFIX)):
        if _is_service_link(variable.removeprefix(ENV_PREFIX), environ[variable]):
            continue
        if variable not in known:
            raise ConfigError(f"{variable}: no such variable{did_you_mean(variable, known)} (from the environment)")
        if environ[variable]:
            given[known[variable]] = Given(environ[variable], f"env {variable}")
    return given


class _UniqueKeyLoader(yaml.SafeLoader):
    """Refuses a key that is given twice, of which YAML takes the last one silently."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, object]:
        keys: set[str] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                if key.value in keys:
                    raise yaml.constructor.ConstructorError(None, None, f"{key.value} is given twice", key.start_mark)
                keys.add(key.value)
        return super().construct_mapping(node, deep)


def _is_service_link(name: str, value: str) -> bool:
    if name == "PORT":  # a setting too; its value tells which of the two
        return _SERVICE_LINK_PORT.fullmatch(value) is not None
    return _SERVICE_LINK.fullmatch(name) is not None


def _read_file(path: Path) -> dict[str, Given]:
    """The mapping in a YAML file; its names are checked with the values."""
    try:
        content = yaml.load(path.read_text(encoding="utf-8"), _UniqueKeyLoader)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"config: cannot read {path}: {error}") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"config: {path} is no valid YAML: {' '.join(str(error).split())}") from None
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ConfigError(f"config: {path} must hold a mapping of settings, not a {type(content).__name__}")
    items = cast("dict[object, object]", content)
    return {str(name): Given(value, f"file:{path}") for name, value in items.items()}
