"""Imports the package of LMCache, which comes with an extra."""

import warnings

from server.errors import ConfigError


def import_lmcache() -> None:
    """Before the first use, on a thread that may take seconds: meanwhile hardly another one gets on.

    Raises: ConfigError if it is not installed.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of OpenTelemetry, for how lmcache logs
            import lmcache.v1.multiprocess.transport.factory
            import lmcache.v1.multiprocess.transport.zmq_impl.client  # noqa: F401 - which it imports when it is used
    except ImportError as error:
        raise ConfigError(
            f"the lmcache connector needs a package that is not installed ({error}): pip install 'outrider[lmcache]', "
            "or on a machine without CUDA: pip install --no-deps -r requirements/lmcache-cpu.txt"
        ) from error
