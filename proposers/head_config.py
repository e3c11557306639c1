"""What the settings of heads on the target's hidden states have in common; names are vLLM's."""

from collections.abc import Callable

from pydantic import Field

from proposers.checkpoint import Checkpoint, read_checkpoint
from proposers.network_config import NetworkConfig
from proposers.shipped import shipped_head
from server.errors import ConfigError, ModelError


class HeadConfig(NetworkConfig):
    """Settings of a head that was trained for one target."""

    model: str | None = Field(
        default=None, min_length=1, description="folder or Hugging Face id of the head; none is the one shipped here"
    )
    revision: str | None = Field(default=None, description="branch, tag or commit of a Hugging Face repository")

    def checkpoint(self, target_digest: Callable[[], str]) -> Checkpoint:
        """The head's files.

        Args: target_digest: see TargetOutline.
        Raises: ConfigError, ModelError.
        """
        if self.model is None and self.revision is not None:
            raise ConfigError("revision: is of a Hugging Face repository; name it as model")
        model = str(shipped_head(self.method, target_digest)) if self.model is None else self.model
        try:
            return read_checkpoint(model, self.revision)
        except ModelError as error:
            raise ModelError(f"model: {error}") from error
