"""Proposers by the name they have in the configuration, imported when asked for.

A proposer is found through its class of settings: one of ours by its line here, one of another distribution by
its entry point in the group `outrider.proposers`, any other by `module:Class` in place of a name.
"""

from collections.abc import Iterable, Mapping
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points

from proposers.config import ProposerConfig
from server.errors import ConfigError
from server.suggestions import did_you_mean

GROUP = "outrider.proposers"

BUILT_IN: Mapping[str, str] = {
    "draft_model": "proposers.draft_model:DraftModelConfig",
    "eagle": "proposers.eagle:EagleConfig",
    "eagle3": "proposers.eagle:Eagle3Config",
    "layer_skip": "proposers.layer_skip:LayerSkipConfig",
    "medusa": "proposers.medusa:MedusaConfig",
    "ngram": "proposers.ngram:NgramConfig",
    "suffix": "proposers.suffix:SuffixConfig",
}


def known_proposers(installed: Iterable[EntryPoint] | None = None) -> dict[str, str]:
    """Where the settings of each proposer are, by its name.

    Args: installed: entry points; those of the environment if not given.
    Raises: ConfigError if a name stands for two of them.
    """
    known = dict(BUILT_IN)
    for point in entry_points(group=GROUP) if installed is None else installed:
        if known.setdefault(point.name, point.value) != point.value:
            raise ConfigError(
                f"two proposers are called {point.name}: {known[point.name]} and {point.value}; "
                "uninstall the distribution of one of them"
            )
    return known


def config_class(method: str) -> type[ProposerConfig]:
    """The class of settings of a proposer. Args: method: its name, or module:Class.

    Raises: ConfigError, whose message is to follow the name of the setting.
    """
    known = known_proposers()
    if ":" not in method and method not in known:
        names = ", ".join(sorted(known))
        raise ConfigError(f"must be one of {names}, or module:Class of another{did_you_mean(method, known)}")
    place = known.get(method, method)
    module_name, _, class_name = place.partition(":")
    try:
        found = getattr(import_module(module_name), class_name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"{place} can not be loaded: {error}") from error
    if not (isinstance(found, type) and issubclass(found, ProposerConfig)):
        raise ConfigError(f"{place} is no class of settings, see proposers.config.ProposerConfig")
    return found
