"""Settings of speculation as they are read."""

from server.config import Config
from server.speculative_config import SpeculativeConfig


def speculative_config(given: object) -> SpeculativeConfig:
    """What they say; not for auto or none. Raises: ConfigError."""
    config = Config.from_kwargs(speculative_config=given).speculative
    assert isinstance(config, SpeculativeConfig)
    return config
