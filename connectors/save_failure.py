"""Why a block did not get to where it was to be kept."""

from enum import StrEnum


class SaveFailure(StrEnum):
    """Why a block is not kept."""

    FULL = "full"
    """There is no room for it."""
    UNAVAILABLE = "unavailable"
    """The store could not be reached or written to."""
    BROKEN = "broken"
    """It raised something, which is in the log."""
    STOPPED = "stopped"
    """The engine had stopped before it was its turn."""
