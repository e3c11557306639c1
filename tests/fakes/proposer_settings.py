"""Settings with which each proposer drafts often for a tiny model."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.tiny_heads import build_tiny_eagle, build_tiny_eagle3, build_tiny_medusa
from tests.tiny_model import build_tiny_model

SETTINGS: dict[str, dict[str, object]] = {
    "draft_model": {"model": "draft_model"},
    "eagle": {"model": "eagle"},
    "eagle3": {"model": "eagle3"},
    "layer_skip": {"num_layers": 1},
    "medusa": {"model": "medusa"},
    "ngram": {"prompt_lookup_min": 1, "prompt_lookup_max": 3},
}
"""What a method needs; a model is named by what makes it."""
MODELS: dict[str, Callable[[Path], Path]] = {
    "draft_model": lambda folder: build_tiny_model(folder, num_layers=1, seed=7),
    "eagle": build_tiny_eagle,
    "eagle3": lambda folder: build_tiny_eagle3(folder, draft_vocab_size=300),
    "medusa": build_tiny_medusa,
}


def config_of(method: str, k: int) -> dict[str, object]:
    """One proposer's settings."""
    return {"method": method, "num_speculative_tokens": k, **SETTINGS.get(method, {})}


def build_models(folder: Path) -> dict[str, str]:
    """Where each model is, by what names it."""
    return {name: str(build(folder / name)) for name, build in MODELS.items()}


def with_models(
    config: Mapping[str, Any] | Sequence[Mapping[str, Any]], models: Mapping[str, str]
) -> list[dict[str, Any]]:
    """Settings with their models' folders in place of the names."""
    members = [config] if isinstance(config, Mapping) else config
    return [{**each, "model": models[each["model"]]} if "model" in each else dict(each) for each in members]
