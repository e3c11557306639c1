"""What drafts for the target, as configured."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from proposers.base import HostProposer, Proposer, TargetOutline, TargetView
from proposers.config import ProposerConfig
from proposers.registry import likely_methods
from server.config import Config
from server.errors import ConfigError, ModelError
from server.model.loader import ModelFiles


def check_proposers(config: Config, files: ModelFiles, device: torch.device, dtype: torch.dtype) -> None:
    """Refuse what drafts if it does not fit the target, as far as files tell. Raises: ConfigError, ModelError."""
    outline = TargetOutline(
        config=files.config,
        tokenizer=files.tokenizer,
        device=device,
        dtype=dtype,
        trusts_code=config.model.trust_remote_code,
        digest=lambda: files.weights_digest,
    )
    for name, settings in config.speculative.named_proposers() if config.speculative else ():
        with _refused_as(name, settings):
            settings.check(outline)


def build_proposers(config: Config, target: TargetView) -> list[Proposer | HostProposer]:
    """What drafts, in the order in which it is asked; nothing without speculation. Raises: ConfigError, ModelError."""
    built: list[Proposer | HostProposer] = []
    for name, settings in config.speculative.named_proposers() if config.speculative else ():
        with _refused_as(name, settings):
            built.append(settings.build(target))
    return built


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
