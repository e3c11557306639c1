"""A real gRPC server whose generations follow a script, for tests of clients."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc

from protos.outrider.v1 import inference_pb2 as pb
from protos.outrider.v1.inference_pb2_grpc import InferenceServicer, add_InferenceServicer_to_server


@dataclass
class ScriptedServer(InferenceServicer):
    """Answers every generation alike, and notes what it was asked.

    Attributes:
        bursts: tokens per message; as many messages.
        pause_s: between messages, on the server.
        refusals: a status per request number that is refused.
        hold: awaited by each generation before its first message.
    """

    bursts: Sequence[int] = (1, 1, 1)
    pause_s: float = 0.0
    refusals: dict[int, grpc.StatusCode] = field(default_factory=dict)
    hold: Callable[[], Awaitable[object]] | None = None
    max_model_len: int = 1000
    address: str = ""
    requests: list[pb.GenerateRequest] = field(default_factory=list)
    num_live: int = 0
    most_live: int = 0

    async def Generate(  # noqa: N802 - gRPC's name for it
        self, request: pb.GenerateRequest, context: "grpc.aio.ServicerContext[Any, Any]"
    ) -> AsyncIterator[pb.GenerateResponse]:
        """Play the script."""
        number = len(self.requests)
        self.requests.append(request)
        self.num_live += 1
        self.most_live = max(self.most_live, self.num_live)
        try:
            if number in self.refusals:
                await context.abort(self.refusals[number], "refused by the script")
            if self.hold is not None:
                await self.hold()
            yield pb.GenerateResponse(started=pb.Started(request_id=str(number)))
            for position, num_tokens in enumerate(self.bursts):
                await asyncio.sleep(self.pause_s if position else 0)
                yield pb.GenerateResponse(delta=pb.Delta(text="x" * num_tokens, token_ids=[7] * num_tokens))
            yield pb.GenerateResponse(
                finished=pb.Finished(
                    finish_reason=pb.FINISH_REASON_LENGTH,
                    usage=pb.Usage(prompt_tokens=10, completion_tokens=sum(self.bursts), cached_tokens=4),
                    speculation=pb.SpeculationStats(num_draft_tokens=8, num_accepted_draft_tokens=6),
                )
            )
        finally:
            self.num_live -= 1

    async def GetModelInfo(  # noqa: N802 - gRPC's name for it
        self, request: pb.GetModelInfoRequest, context: "grpc.aio.ServicerContext[Any, Any]"
    ) -> pb.GetModelInfoResponse:
        """A small model."""
        return pb.GetModelInfoResponse(
            served_model_name="scripted", vocab_size=100, max_model_len=self.max_model_len, device="cpu", version="9.9"
        )


@asynccontextmanager
async def running_script(script: ScriptedServer) -> AsyncIterator[ScriptedServer]:
    """Serve on a free port until the block is left."""
    server = grpc.aio.server()
    add_InferenceServicer_to_server(script, server)
    script.address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    try:
        yield script
    finally:
        await server.stop(grace=None)
