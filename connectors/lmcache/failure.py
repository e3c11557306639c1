"""What goes wrong with LMCache's server."""


class LMCacheFailure(Exception):
    """It did not do what it was asked to, or not in time; the message goes on behind its address."""
