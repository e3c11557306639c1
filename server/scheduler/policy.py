"""Who goes first."""

from server.request import Request


def order_key(request: Request, policy: str, ageing_s: float) -> float:
    """A fixed sort key; the smaller one runs first and is never preempted for the larger.

    fcfs sorts by arrival. priority sorts by `priority - waited / ageing_s`: comparing two
    requests at any moment, the moment cancels out, so the order never changes. A lower priority
    therefore waits, but not for ever, and two sequences can not preempt each other in turn.
    """
    if policy == "priority":
        return request.priority * ageing_s + request.arrival_s
    return request.arrival_s
