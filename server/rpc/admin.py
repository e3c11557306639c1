"""The servicer of what an operator may ask of a running server."""
# ruff: noqa: N802 - the stubs name the methods

import json
from collections.abc import Mapping
from typing import Any

import grpc

from protos.outrider.v1 import admin_pb2 as pb
from protos.outrider.v1.admin_pb2_grpc import AdminServicer
from server.engine.protocol import Engine
from server.errors import InvalidRequest
from server.events import EventBus
from server.rpc.call import recorded_call
from server.speculation_state import Member, ProposerChange, SpeculationChange, SpeculationState

SERVICE_NAME = pb.DESCRIPTOR.services_by_name["Admin"].full_name
Context = grpc.aio.ServicerContext[Any, Any]
_POLICIES: Mapping[pb.DraftPolicy, str] = {pb.DRAFT_POLICY_AUTO: "auto", pb.DRAFT_POLICY_FIXED: "fixed"}


class AdminService(AdminServicer):
    """Answers the calls of outrider.v1.Admin, on the event loop that the engine belongs to."""

    def __init__(self, engine: Engine, events: EventBus) -> None:
        self._engine = engine
        self._events = events

    async def GetSpeculation(self, request: pb.GetSpeculationRequest, context: Context) -> pb.GetSpeculationResponse:
        """What holds."""
        async with recorded_call("GetSpeculation", context, self._events, service=SERVICE_NAME):
            return pb.GetSpeculationResponse(speculation=_speculation(self._engine.speculation))

    async def SetSpeculation(self, request: pb.SetSpeculationRequest, context: Context) -> pb.SetSpeculationResponse:
        """Change it, and wait until the change holds."""
        async with recorded_call("SetSpeculation", context, self._events, service=SERVICE_NAME) as record:
            state = await self._engine.set_speculation(_change(request))
            record.attributes = {
                "outrider.speculation.enabled": state.enabled,
                "outrider.speculation.num_speculative_tokens": state.num_speculative_tokens,
            }
            return pb.SetSpeculationResponse(speculation=_speculation(state))


def _change(request: pb.SetSpeculationRequest) -> SpeculationChange:
    """The change as values. Raises: InvalidRequest for a policy that is none."""
    return SpeculationChange(
        enabled=request.enabled if request.HasField("enabled") else None,
        num_speculative_tokens=request.num_speculative_tokens if request.HasField("num_speculative_tokens") else None,
        policy=_policy(request),
        proposers=[
            ProposerChange(
                member=getattr(each, chosen) if (chosen := each.WhichOneof("proposer")) else None,
                parameters={name: _from_text(text) for name, text in each.parameters.items()},
            )
            for each in request.proposers
        ],
    )


def _policy(request: pb.SetSpeculationRequest) -> dict[str, object]:
    chosen = request.WhichOneof("verified_drafts")
    if chosen is None:
        return {}
    if chosen == "policy":
        if request.policy not in _POLICIES:
            raise InvalidRequest.of("policy", f"must be AUTO (1) or FIXED (2), got {request.policy}")
        return {chosen: _POLICIES[request.policy]}
    return {chosen: dict(request.num_speculative_tokens_per_batch_size.num_speculative_tokens)}


def _speculation(state: SpeculationState) -> pb.Speculation:
    message = pb.Speculation(
        enabled=state.enabled,
        num_speculative_tokens=state.num_speculative_tokens,
        max_num_speculative_tokens=state.max_num_speculative_tokens,
        proposers=[_proposer(member) for member in state.members],
    )
    schedule = state.policy.num_speculative_tokens_per_batch_size
    if schedule is not None:
        message.num_speculative_tokens_per_batch_size.num_speculative_tokens.update(schedule)
    else:
        message.policy = next(number for number, name in _POLICIES.items() if name == state.policy.policy)
    return message


def _proposer(member: Member) -> pb.Proposer:
    parameters = {name: _to_text(getattr(member.config, name)) for name in member.changeable}
    return pb.Proposer(method=member.config.method, parameters=parameters)


def _to_text(value: object) -> str:
    """JSON; strings as they are, unless they would be read as something else."""
    return value if isinstance(value, str) and _from_text(value) == value else json.dumps(value)


def _from_text(text: str) -> object:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text
