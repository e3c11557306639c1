"""Proposers by the name they have in the configuration, imported when asked for.

A proposer is found through its class of settings: one of ours by its line here, one of another distribution by
its entry point in the group `outrider.proposers`, any other by `module:Class` in place of a name.
"""

import json
from collections.abc import Iterable, Mapping
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path

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


def likely_methods(setting: str, value: object) -> list[str]:
    """Which of ours somebody means who gives this setting, and no method; a model's folder may say it in its config.

    Returns: in order of the alphabet; empty if none of them has such a setting.
    """
    methods = [method for method in sorted(BUILT_IN) if setting in config_class(method).model_fields]
    if setting != "model" or not isinstance(value, str):
        return methods
    return _methods_of_model(Path(value).expanduser()) or methods


def _methods_of_model(path: Path) -> list[str]:
    """What the model at a path is made for; empty if nothing there says so, as of a hub id."""
    if path.is_file():
        return ["draft_model"]
    try:
        config = json.loads((path / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return []
    if not isinstance(config, dict):
        return []
    marks = " ".join(map(str, (*config, *(config.get("architectures") or ()), config.get("model_type")))).lower()
    if config.get("speculators_model_type") in BUILT_IN:
        return [config["speculators_model_type"]]
    if "medusa" in marks:
        return ["medusa"]
    if "eagle3" in marks or "draft_vocab_size" in config:
        return ["eagle3"]
    if "eagle" in marks:
        return ["eagle", "eagle3"]
    # The first EAGLE heads call themselves language models, of a single layer.
    return ["draft_model", "eagle"] if config.get("num_hidden_layers") == 1 else ["draft_model"]
