"""Command line: python -m proposers.training STAGE.

Exit codes: 0 done, 1 the work failed, 2 a wrong setting, 3 left off and to be gone on with, 130 interrupted.
"""

import argparse
import sys
from collections.abc import Mapping, Sequence

from pydantic import BaseModel

from proposers.training.end_to_end import EndToEndStage, end_to_end
from proposers.training.flags import add_flags, build
from proposers.training.generation import GenerateSettings, generate
from proposers.training.log import start_log
from proposers.training.prompt_file import write_prompts
from proposers.training.prompts import PromptSettings, make_prompts
from proposers.training.schedule import TrainSettings
from proposers.training.stages import EvaluateStage, ExportStage, TrainStage, evaluate, export, train
from server.errors import ConfigError, OutriderError

STAGES: Mapping[str, tuple[str, Sequence[type[BaseModel]]]] = {
    "prompts": ("make prompts out of files and templates", (PromptSettings,)),
    "generate": ("let the target continue prompts", (GenerateSettings,)),
    "train": ("train a head on what the target wrote", (TrainStage, TrainSettings)),
    "export": ("write a trained head as a checkpoint", (ExportStage,)),
    "evaluate": ("measure a checkpoint on texts it was not trained on", (EvaluateStage,)),
    "end-to-end": ("measure proposers in the engine, on prompts nothing was trained on", (EndToEndStage,)),
}
_FAILED, _USAGE, _LEFT_OFF, _INTERRUPTED = 1, 2, 3, 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run one stage. Returns: the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m proposers.training", description="Train draft heads for a model by what it writes itself."
    )
    stages = parser.add_subparsers(dest="stage", metavar="STAGE", required=True)
    for name, (words, settings) in STAGES.items():
        stage = stages.add_parser(name, help=words, description=words, allow_abbrev=False)
        for each in settings:
            add_flags(stage, each)
    args = parser.parse_args(argv)
    start_log()
    try:
        return _run(args)
    except ConfigError as error:
        return _fail(error, _USAGE)
    except OutriderError as error:
        return _fail(error, _FAILED)
    except KeyboardInterrupt:
        return _INTERRUPTED


def _run(args: argparse.Namespace) -> int:
    match args.stage:
        case "prompts":
            settings = build(PromptSettings, args)
            write_prompts(settings.output, make_prompts(settings))
        case "generate":
            return 0 if generate(build(GenerateSettings, args)) else _LEFT_OFF
        case "train":
            return 0 if train(build(TrainStage, args), build(TrainSettings, args)) else _LEFT_OFF
        case "export":
            export(build(ExportStage, args))
        case "evaluate":
            evaluate(build(EvaluateStage, args))
        case _:
            end_to_end(build(EndToEndStage, args))
    return 0


def _fail(error: OutriderError, code: int) -> int:
    print(f"training: {' '.join(str(error).split())}", file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())
