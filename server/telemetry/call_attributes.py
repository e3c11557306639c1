"""OpenTelemetry names that spans and metrics of a call share."""

from opentelemetry.semconv._incubating.attributes import gen_ai_attributes as gen_ai
from opentelemetry.semconv._incubating.attributes import rpc_attributes as rpc
from opentelemetry.semconv.attributes import error_attributes as error

from server.events import CallFinished

SCOPE = "outrider"
GENERATE = "Generate"

# What the semantic conventions count as a failure of a gRPC server; the other codes are
# the caller's own doing, such as INVALID_ARGUMENT or CANCELLED.
_SERVER_ERRORS = frozenset({"UNKNOWN", "DEADLINE_EXCEEDED", "UNIMPLEMENTED", "INTERNAL", "UNAVAILABLE", "DATA_LOSS"})

AttributeValue = str | int | float | bool | list[str] | list[int]


def is_server_error(status: str) -> bool:
    """Whether a gRPC status code's name stands for a failure of the server."""
    return status in _SERVER_ERRORS


def rpc_attributes(call: CallFinished) -> dict[str, AttributeValue]:
    """The attributes of any call; few enough values for a metric."""
    attributes: dict[str, AttributeValue] = {
        rpc.RPC_SYSTEM_NAME: rpc.RpcSystemNameValues.GRPC.value,
        rpc.RPC_METHOD: f"{call.service}/{call.method}",
        rpc.RPC_RESPONSE_STATUS_CODE: call.status,
    }
    if is_server_error(call.status):
        attributes[error.ERROR_TYPE] = call.status
    return attributes


def gen_ai_attributes(call: CallFinished, model: str) -> dict[str, AttributeValue]:
    """The attributes of a generation; few enough values for a metric."""
    return {
        gen_ai.GEN_AI_OPERATION_NAME: call.attributes.get(
            gen_ai.GEN_AI_OPERATION_NAME, gen_ai.GenAiOperationNameValues.TEXT_COMPLETION.value
        ),
        gen_ai.GEN_AI_PROVIDER_NAME: SCOPE,
        gen_ai.GEN_AI_REQUEST_MODEL: model,
    }
