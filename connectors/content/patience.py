"""How long a store may take before it is left alone."""

import logging

from connectors.base import ConnectorContext

logger = logging.getLogger(__name__)

STORE_TIMEOUT_S = 2.0
"""How long the store may take to say what it has, and to load a block."""
PAUSE_S = 5.0
"""A store that took longer is left alone for so long."""


class Patience:
    """Whether the store is left alone for a while, as it hangs; on the step thread."""

    def __init__(self, context: ConnectorContext) -> None:
        self._context = context
        self._paused_until_s = -1.0

    @property
    def is_at_an_end(self) -> bool:
        """Whether it is."""
        return self._context.clock() < self._paused_until_s

    def is_spent(self, since_s: float) -> bool:
        """Whether what the store was asked for then should have come. Args: since_s: on the engine's clock."""
        return self._context.clock() - since_s >= STORE_TIMEOUT_S

    def lose(self) -> None:
        """Leave it alone from now on."""
        if not self.is_at_an_end:
            logger.warning("the %s store hangs; it is left alone for %g s", self._context.name, PAUSE_S)
            self._paused_until_s = self._context.clock() + PAUSE_S
