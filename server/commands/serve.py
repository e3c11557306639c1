"""`outrider serve`: builds the configuration and runs the server."""

import argparse
import os

from server.config_sources import add_arguments, resolve


def configure(parser: argparse.ArgumentParser) -> None:
    """Add a flag for every setting."""
    add_arguments(parser)
    parser.add_argument("--print-config", action="store_true", help="print every setting with its source, and exit")


def run(args: argparse.Namespace) -> int:
    """Serve until a signal, or print the configuration."""
    resolved = resolve(vars(args), os.environ)
    if args.print_config:
        print(resolved.render(), flush=True)
        return 0
    from server.serving import serve  # imports torch, which --print-config can do without

    serve(resolved.config)
    return 0
