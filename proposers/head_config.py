"""What the settings of heads on the target's hidden states have in common; names are vLLM's."""

from pydantic import Field

from proposers.base import TargetModel
from proposers.checkpoint import Checkpoint, read_checkpoint
from proposers.network_config import NetworkConfig
from proposers.shipped import shipped_head
from server.errors import ConfigError


class HeadConfig(NetworkConfig):
    """Settings of a head that was trained for one target."""

    model: str | None = Field(
        default=None, min_length=1, description="folder or Hugging Face id of the head; none is the one shipped here"
    )
    revision: str | None = Field(default=None, description="branch, tag or commit of a Hugging Face repository")

    def checkpoint(self, target: TargetModel) -> Checkpoint:
        """The head's files. Raises: ConfigError, ModelError."""
        if self.model is not None:
            return read_checkpoint(self.model, self.revision)
        if self.revision is not None:
            raise ConfigError("speculative_config.revision: is of a Hugging Face repository; name it as model")
        return read_checkpoint(str(shipped_head(self.method, target.digest)))
