"""Why KV that another node holds does not fit this one, with both values."""

from connectors.base import ConnectorContext
from server.kv_description import differences
from server.kv_handle import KVHandle


def misfit(source: KVHandle, context: ConnectorContext) -> str | None:
    """What of another node's model or KV is not as here; None if its KV can be used. The handle is not trusted."""
    if source.fingerprint == context.fingerprint:
        return None
    found = differences(context.kv_description, source.description)
    return found or f"fingerprint {source.fingerprint[:64]} there, {context.fingerprint} here"
