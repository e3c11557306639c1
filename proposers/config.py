"""What every proposer's settings have in common. Knows no proposer, and imports none of their libraries."""

from typing import TYPE_CHECKING, Any, ClassVar, Protocol, runtime_checkable

from pydantic import Field

from server.config_values import Section

if TYPE_CHECKING:
    from proposers.base import HostProposer, Proposer, TargetOutline, TargetView


class ProposerConfig(Section):
    """Settings of one proposer; a proposer's own class adds fields and says how it is built.

    Attributes:
        changeable: names of the settings that its proposer takes on while it drafts; it then is Reconfigurable.
    """

    changeable: ClassVar[frozenset[str]] = frozenset()

    method: str = Field(min_length=1, description="the proposer's name, or module:Class of its settings")
    num_speculative_tokens: int = Field(default=5, ge=1, le=32, description="most draft tokens per step")

    def check(self, target: "TargetOutline") -> None:
        """Refuse what is known not to fit before the target's weights are loaded, which may take minutes.

        Called once, in front of `build`.
        Raises: as `build`.
        """

    def build(self, target: "TargetView") -> "Proposer | HostProposer":
        """The proposer for a target.

        Raises: ConfigError, or ModelError for its files, if it can not draft for this one. A message about one setting
            begins with the setting's name and a colon; whoever calls says where that was configured.
        """
        raise NotImplementedError


@runtime_checkable
class Reconfigurable(Protocol):
    """A proposer that takes on other settings while it drafts; used from the step thread, between two steps."""

    def reconfigure(self, config: Any) -> None:
        """Draft by these settings from the next step on.

        What is captured in a graph goes on with the values that it was captured with: what a proposer on the device
        looks up there must lie in tensors, to be changed in place, behind the steps that are queued.

        Args: config: of the class that the proposer was built from; differs in what is `changeable`, and was checked.
        """
