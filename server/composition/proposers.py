"""What drafts for the target, as configured."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from proposers.base import HostProposer, Proposer, TargetOutline, TargetView
from proposers.config import ProposerConfig
from proposers.registry import likely_methods
from proposers.shipped import has_shipped_head
from server.config import Config
from server.config_values import Given
from server.errors import ConfigError, ModelError
from server.model.loader import ModelFiles
from server.speculative_config import AUTO, SpeculativeConfig, parse_speculative_config

logger = logging.getLogger(__name__)

_SHIPPED = {"method": "eagle3", "num_speculative_tokens": 4, "rejection_sample_method": "block"}
_SHIPPED_ON_CPU = _SHIPPED | {"num_speculative_tokens": 6, "draft_min_certainty": 0.1}
"""What does best with the heads that are shipped. Only a CPU saves the passes that uncertain drafts would take."""


def choose_speculation(
    config: Config, files: ModelFiles, device: torch.device, dtype: torch.dtype
) -> SpeculativeConfig | None:
    """What is to draft: as configured, or what auto stands for with these files.

    What is configured is refused if it does not fit the target, as far as files tell; a shipped head that does not is
    left out, since nobody asked for it.
    Raises: ConfigError, ModelError.
    """
    outline = TargetOutline(
        config=files.config,
        tokenizer=files.tokenizer,
        device=device,
        dtype=dtype,
        trusts_code=config.model.trust_remote_code,
        digest=lambda: files.weights_digest,
    )
    if config.speculative != AUTO:
        if config.speculative is not None:
            _check(config.speculative, outline)
        return config.speculative
    if not has_shipped_head("eagle3", outline.digest):
        return None
    chosen = parse_speculative_config(Given(_SHIPPED_ON_CPU if device.type == "cpu" else _SHIPPED, "auto"))
    assert isinstance(chosen, SpeculativeConfig)
    try:
        _check(chosen, outline)
    except (ConfigError, ModelError) as error:
        logger.warning("no speculation: the eagle3 head shipped for this model cannot be used: %s", error)
        return None
    logger.info("speculation by the eagle3 head shipped for this model; --speculative-config none turns it off")
    return chosen


def build_proposers(speculative: SpeculativeConfig | None, target: TargetView) -> list[Proposer | HostProposer]:
    """What drafts, in the order in which it is asked; nothing without speculation. Raises: ConfigError, ModelError."""
    built: list[Proposer | HostProposer] = []
    for name, settings in speculative.named_proposers() if speculative else ():
        with _refused_as(name, settings):
            built.append(settings.build(target))
    return built


def _check(speculative: SpeculativeConfig, target: TargetOutline) -> None:
    for name, settings in speculative.named_proposers():
        with _refused_as(name, settings):
            settings.check(target)


@contextmanager
def _refused_as(name: str, settings: ProposerConfig) -> Iterator[None]:
    """Let what a proposer refuses say which proposer it was, by its setting, and what its model is for instead."""
    try:
        yield
    except (ConfigError, ModelError) as error:
        is_setting = str(error).partition(":")[0] in type(settings).model_fields
        likely = likely_methods("model", getattr(settings, "model", None))
        is_ours = settings.method in likely_methods("model", None)
        is_other = isinstance(error, ModelError) and is_ours and settings.method not in likely
        hint = f"; by its config.json it is for the method {likely[0]}" if is_other and len(likely) == 1 else ""
        raise type(error)(f"{name}{'.' if is_setting else ': '}{error}{hint}") from error
