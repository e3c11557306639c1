"""A connector that finds blocks by their content, in a store that it only knows as such."""

from connectors.base import Connector, ConnectorContext
from connectors.content.patience import Patience
from connectors.content.scheduler import ContentScheduler
from connectors.content.worker import ContentWorker
from connectors.store import BlockStore
from connectors.threads import Threads


def content_connector(store: BlockStore, context: ConnectorContext, *, layerwise: bool = False) -> Connector:
    """Both halves on a store, which is closed with them.

    Args: layerwise: whether blocks of prompts are copied layer by layer, while their step computes the next ones.
    """
    asking, patience = Threads("outrider-kv-find", 1), Patience(context)
    layerwise = layerwise and context.is_producer
    return Connector(
        ContentScheduler(store, context, asking, patience, layerwise=layerwise),
        ContentWorker(store, context, asking, patience, layerwise=layerwise),
    )
