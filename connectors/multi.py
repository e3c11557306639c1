"""Several connectors as one: loads come from the one that has most, saves go to all of them."""

import time
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

from pydantic import Field, ValidationInfo, field_validator

from connectors.base import (
    BlockLoad,
    BlockSave,
    Connector,
    ConnectorContext,
    ConnectorScheduler,
    ConnectorWorker,
    Finished,
    KVCaches,
    KVRequest,
)
from connectors.choice import ConnectorChoice, read_choice
from connectors.config import ConnectorConfig, Way
from server.config_values import path_of
from server.kv_handle import KVHandle


class MultiConfig(ConnectorConfig):
    """Settings of several connectors."""

    connectors: tuple[ConnectorChoice, ...] = Field(
        min_length=1, description="the connectors; of those that have equally much, the first is loaded from"
    )

    @field_validator("connectors", mode="before")
    @classmethod
    def _read_connectors(cls, value: object, info: ValidationInfo) -> tuple[ConnectorChoice, ...]:
        if not isinstance(value, list | tuple):
            raise ValueError("must be a list of mappings with kv_connector")
        return tuple(read_choice(item, f"{path_of(info)}connectors[{i}].") for i, item in enumerate(value))

    def carriers(self, name: str, way: Way) -> frozenset[str]:
        """Those of all of them."""
        return frozenset().union(*(choice.carriers(way) for choice in self.connectors))

    def build(self, context: ConnectorContext) -> Connector:
        """Both halves of all of them; each may do what it is told to, as far as this node may."""
        members: list[Connector] = []
        with ExitStack() as built:
            for choice in self.connectors:
                own = replace(
                    context,
                    name=choice.name,
                    is_producer=context.is_producer and choice.is_producer,
                    is_consumer=context.is_consumer and choice.is_consumer,
                )
                members.append(choice.settings.build(own))
                built.callback(members[-1].worker.shutdown, 0.0)
            built.pop_all()  # nobody is shut down, as all could be built
        num_savers = sum(member.scheduler.wants_saves for member in members)
        return Connector(
            MultiScheduler([member.scheduler for member in members], context.block_size),
            MultiWorker([member.worker for member in members], num_savers),
        )


@dataclass(frozen=True, slots=True)
class MultiMetadata:
    """What the members are to do next.

    Attributes:
        members: the metadata of each.
        loads: sequences whose blocks a member is to fill, with its place.
    """

    members: tuple[Any, ...]
    loads: tuple[tuple[int, int], ...]


class MultiScheduler(ConnectorScheduler[MultiMetadata]):
    """Asks every member, and remembers for each sequence which of them is to load."""

    def __init__(self, members: Sequence[ConnectorScheduler[Any]], block_size: int) -> None:
        self._members = members
        self._block_size = block_size
        self._answers: dict[int, tuple[int, list[int | None]]] = {}
        self._chosen: dict[int, tuple[int, KVRequest]] = {}
        self._loads: list[tuple[int, int]] = []

    def get_num_new_matched_tokens(self, request: KVRequest, num_computed_tokens: int) -> int | None:
        """None until every member has answered, as the last one may have most; each is asked until it has.

        Some forget what they have answered. So the one with most is asked again unless it answered just now.
        """
        asked_for, counts = self._answers.pop(request.seq_id, (-1, []))
        if asked_for != num_computed_tokens:
            counts = [None] * len(self._members)
        old = {place for place, count in enumerate(counts) if count is not None}
        while True:
            for place, member in enumerate(self._members):
                if counts[place] is None:
                    counts[place] = member.get_num_new_matched_tokens(request, num_computed_tokens)
            known = [count for count in counts if count is not None]
            if len(known) < len(counts):
                self._answers[request.seq_id] = (num_computed_tokens, counts)
                return None
            most = max(known)
            chosen = known.index(most)
            if chosen not in old:
                break
            old.remove(chosen)
            counts[chosen] = None
        if most > 0:
            self._chosen[request.seq_id] = (chosen, request)
        return most

    @property
    def wants_loads(self) -> bool:
        """Whether any member wants to be asked."""
        return any(member.wants_loads for member in self._members)

    def update_state_after_alloc(self, load: BlockLoad) -> None:
        """The member with most loads. The others hear that nothing is left to load, and let go of what they hold."""
        chosen, request = self._chosen.pop(load.seq_id)
        for place, member in enumerate(self._members):
            if place != chosen:
                member.get_num_new_matched_tokens(request, len(request.hashes) * self._block_size)
        self._members[chosen].update_state_after_alloc(load)
        self._loads.append((load.seq_id, chosen))

    @property
    def wants_saves(self) -> bool:
        """Whether any member wants them."""
        return any(member.wants_saves for member in self._members)

    def save(self, saves: Sequence[BlockSave]) -> None:
        """Offer them to all members that want any."""
        for member in self._members:
            if member.wants_saves:
                member.save(saves)

    @property
    def wants_announcements(self) -> bool:
        """Whether any member wants them."""
        return any(member.wants_announcements for member in self._members)

    def announce(self, saves: Sequence[BlockSave]) -> None:
        """To all members that want to know."""
        for member in self._members:
            if member.wants_announcements:
                member.announce(saves)

    @property
    def load_timeout_s(self) -> float:
        """The longest of all."""
        return max(member.load_timeout_s for member in self._members)

    def build_connector_meta(self) -> MultiMetadata | None:
        """Those of all members; who could load and got no blocks is asked for again."""
        self._chosen.clear()
        members = tuple(member.build_connector_meta() for member in self._members)
        loads, self._loads = tuple(self._loads), []
        return MultiMetadata(members, loads) if loads or any(own is not None for own in members) else None

    def request_finished(self, request: KVRequest, block_ids: Sequence[int]) -> KVHandle | None:
        """From the first member that can hand on: another one's lease would hold the blocks until it ran out."""
        handles = (member.request_finished(request, block_ids) for member in self._members)
        return next((handle for handle in handles if handle is not None), None)

    def cancel(self, seq_id: int) -> None:
        """With all members, as each may keep something."""
        self._answers.pop(seq_id, None)
        self._chosen.pop(seq_id, None)
        for member in self._members:
            member.cancel(seq_id)


class MultiWorker(ConnectorWorker[MultiMetadata]):
    """A load is its member's; a save has ended when it has with every member."""

    def __init__(self, members: Sequence[ConnectorWorker[Any]], num_savers: int) -> None:
        """Args: num_savers: how many of the members report each save."""
        self._members = members
        self._num_savers = num_savers
        self._loads: dict[int, int] = {}
        self._num_reports: Counter[int] = Counter()

    def register_kv_caches(self, caches: KVCaches) -> None:
        """With all."""
        for member in self._members:
            member.register_kv_caches(caches)

    def start_load_kv(self, metadata: MultiMetadata) -> None:
        """What each was told."""
        self._loads.update(metadata.loads)
        for member, own in zip(self._members, metadata.members, strict=True):
            if own is not None:
                member.start_load_kv(own)

    @property
    def is_layerwise(self) -> bool:
        """Whether any member is."""
        return any(member.is_layerwise for member in self._members)

    def wait_for_layer_load(self, layer: int) -> None:
        """Of all that ask for it."""
        for member in self._members:
            if member.is_layerwise:
                member.wait_for_layer_load(layer)

    def save_kv_layer(self, layer: int) -> None:
        """To all that ask for it."""
        for member in self._members:
            if member.is_layerwise:
                member.save_kv_layer(layer)

    def wait_for_save(self) -> None:
        """Of all."""
        for member in self._members:
            member.wait_for_save()

    def get_finished(self) -> Finished:
        """What has ended with those that count."""
        everything = Finished()
        for place, member in enumerate(self._members):
            own = member.get_finished()
            loaded = tuple(seq_id for seq_id in own.loaded if self._loads.get(seq_id) == place)
            for seq_id in loaded:
                del self._loads[seq_id]
            saved = tuple(block_id for block_id in own.saved if self._is_last_save(block_id))
            everything = everything.joined(replace(own, loaded=loaded, saved=saved))
        return everything

    def _is_last_save(self, block_id: int) -> bool:
        """Count a save that has ended with one member. Returns: whether it has with all."""
        self._num_reports[block_id] += 1
        if self._num_reports[block_id] < self._num_savers:
            return False
        del self._num_reports[block_id]
        return True

    def get_block_ids_with_load_errors(self) -> frozenset[int]:
        """Those of all."""
        return frozenset().union(*(member.get_block_ids_with_load_errors() for member in self._members))

    def shutdown(self, timeout_s: float) -> None:
        """All of them within the time, also when one fails."""
        until_s = time.monotonic() + timeout_s
        with ExitStack() as stack:
            for member in reversed(self._members):
                stack.callback(_shut_down, member, until_s)


def _shut_down(member: ConnectorWorker[Any], until_s: float) -> None:
    member.shutdown(max(0.0, until_s - time.monotonic()))
