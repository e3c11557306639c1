"""Changes what speculation does while the engine runs."""

import logging
from collections.abc import Sequence

from proposers.config import ProposerConfig, Reconfigurable
from server.scheduler.draft_control import DraftControl
from server.scheduler.policy_choice import MakePolicy, make_policy
from server.speculation_state import SpeculationChange, SpeculationState
from server.speculative_config import SpeculativeConfig

logger = logging.getLogger(__name__)


class SpeculationControl:
    """Owned by the engine, whose step thread calls `apply` between two steps; `state` may be read from any thread."""

    def __init__(
        self,
        config: SpeculativeConfig | None,
        proposers: Sequence[object],
        drafts: DraftControl,
        make_policy: MakePolicy = make_policy,
    ) -> None:
        """Args: proposers: what was built from the configuration's, in its order."""
        self._make_policy = make_policy
        self._proposers = proposers
        self._drafts = drafts
        self._state = SpeculationState.of(config, proposers)

    @property
    def state(self) -> SpeculationState:
        """What holds from the next step on."""
        return self._state

    def apply(self, change: SpeculationChange) -> SpeculationState:
        """Make a change, all of it or none. Returns: what holds now. Raises: InvalidRequest."""
        before, after = self._state, self._state.changed(change)
        self._reconfigure(before, after)
        if (before.num_speculative_tokens, before.policy, before.members) != (
            after.num_speculative_tokens,
            after.policy,
            after.members,
        ):  # what was measured was measured of something else
            self._drafts.use(self._make_policy(after.policy, after.num_speculative_tokens))
        self._drafts.is_on = after.enabled
        self._state = after
        _log(before, after)
        return after

    def _reconfigure(self, before: SpeculationState, after: SpeculationState) -> None:
        """Tell the proposers whose settings differ; if one of them fails, all go on as before."""
        told: list[tuple[Reconfigurable, ProposerConfig]] = []
        try:
            for proposer, old, new in zip(self._proposers, before.members, after.members, strict=True):
                if new.config != old.config:
                    assert isinstance(proposer, Reconfigurable)
                    told.append((proposer, old.config))
                    proposer.reconfigure(new.config)
        except Exception:
            for proposer, config in told:
                proposer.reconfigure(config)
            raise


def _log(before: SpeculationState, after: SpeculationState) -> None:
    old, new = before.settings(), after.settings()
    changes = [f"{name} {old[name]} -> {value}" for name, value in new.items() if value != old[name]]
    if changes:
        logger.info("speculation: %s", ", ".join(changes))
