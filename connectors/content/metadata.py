"""What the scheduler half tells the worker half."""

from dataclasses import dataclass

from connectors.base import BlockLoad, BlockSave


@dataclass(frozen=True, slots=True)
class ContentMetadata:
    """What is to be done next.

    Attributes:
        cancelled: loads that nobody waits for any more, if there are such. announced: what the step fills.
    """

    loads: tuple[BlockLoad, ...]
    saves: tuple[BlockSave, ...]
    cancelled: tuple[int, ...] = ()
    announced: tuple[BlockSave, ...] = ()
