"""`outrider pull`: fetches a model, so that `serve` starts without a download."""

import argparse

from server.config import ModelConfig


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the model and its revision."""
    fields = ModelConfig.model_fields
    parser.add_argument(
        "model", metavar="MODEL", nargs="?", default=fields["model"].default, help=fields["model"].description
    )
    parser.add_argument("--revision", default=None, help=fields["revision"].description)


def run(args: argparse.Namespace) -> int:
    """Fetch it and print the folder it lies in."""
    from server.model.resolve import pull  # imports transformers, which --help can do without

    print(pull(args.model, args.revision), flush=True)
    return 0
