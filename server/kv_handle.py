"""How one node tells another where the KV of a prompt is, and how far a choice has come."""

from dataclasses import dataclass

from server.token_logprobs import PositionLogprobs


@dataclass(frozen=True, slots=True)
class KVHandle:
    """Where the KV of a prompt is held for whoever goes on with it; travels to another node as a message.

    Attributes:
        connector: the kind that can read it. engine_id: who holds it, new with each start of that engine.
        address: where that one answers, in the connector's own form; empty where content is found by hash.
        lease_id: names what is held; empty where nothing is.
        num_tokens: leading tokens of the prompt whose KV is there, whole blocks.
        block_ids: on the node that holds it. block_size: there.
        fingerprint: of its target's group. description: what that follows from, see server.kv_description; empty
            if nobody said so.
    """

    connector: str
    engine_id: str
    address: str
    lease_id: str
    num_tokens: int
    block_ids: tuple[int, ...]
    block_size: int
    fingerprint: str
    description: str = ""


@dataclass(frozen=True, slots=True)
class ChoiceState:
    """A choice that another node has begun.

    Attributes:
        token_ids: generated there.
        key: 63 bits that all randomness of the choice follows from; None if that node was lost, and its key with it.
        num_delivered_tokens: leading ones that the caller has, with their text; the others are held back as their text
            is incomplete, or may turn into a stop string.
        logprobs: of those that are held back, where asked for.
    """

    token_ids: tuple[int, ...]
    key: int | None
    num_delivered_tokens: int = 0
    logprobs: tuple[PositionLogprobs, ...] = ()


@dataclass(frozen=True, slots=True)
class Continuation:
    """A request that another node has begun.

    Attributes:
        choices: one for each; None for one that has ended there.
        source: where the prompt's KV is; None if it is to be computed again.
    """

    choices: tuple[ChoiceState | None, ...]
    source: KVHandle | None = None
