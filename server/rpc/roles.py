"""Which part of a request a node does, by its role."""

from protos.outrider.v1 import inference_pb2 as pb
from server.errors import InvalidRequest, WrongRole
from server.kv_transfer_config import Role


def hands_on(request: pb.GenerateRequest, role: Role) -> bool:
    """Whether another node is to go on with a request behind its first token.

    Raises: WrongRole for what this node does not do; InvalidRequest for a request that wants to begin and to go on.
    """
    goes_on = request.HasField("continuation")
    if goes_on and request.hand_on:
        raise InvalidRequest.of("hand_on", "must not be set with a continuation")
    if goes_on and role == "prefill":
        raise WrongRole("this node is of role prefill: a continuation goes to a node of role decode or both")
    if request.hand_on and role == "decode":
        raise WrongRole("this node is of role decode: what is to be handed on goes to a node of role prefill or both")
    return request.hand_on or role == "prefill"
