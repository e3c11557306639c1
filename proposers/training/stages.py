"""The stages behind the command line: what each of them loads, does and writes."""

import json
import logging
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field

from proposers.base import TargetModel
from proposers.checkpoint import read_checkpoint
from proposers.training.acceptance import Drafter
from proposers.training.beginning import head_to_train_on, new_trainee
from proposers.training.curves import draw_curves
from proposers.training.eagle_trainee import EagleTrainee, load_eagle
from proposers.training.export import export_head
from proposers.training.feature_source import feature_source
from proposers.training.measures import table
from proposers.training.medusa_trainee import MedusaTrainee, load_medusa
from proposers.training.objectives import EagleObjective, MedusaObjective, Objective
from proposers.training.packing import pack
from proposers.training.run_folder import RunFolder
from proposers.training.schedule import TrainSettings
from proposers.training.target import TargetFeatures, Wanted, load_target
from proposers.training.teacher_forced import HeldOut, measure
from proposers.training.texts import read_texts
from proposers.training.trainer import Pace, Trainer
from proposers.training.vocabulary import frequent_tokens
from server.errors import ConfigError

logger = logging.getLogger(__name__)

_LOOKED_AT = 8
"""Drafts that are looked at together take memory for their whole vocabulary: fewer rows at a time than in training."""
_WATCHED_K = 4


class TargetSettings(BaseModel):
    """Which target, and where."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    model: str = Field(default="smollm2-135m", description="the target: a folder, a GGUF file or a hub id")
    device: str = Field(default="auto", description="auto, cpu, cuda or cuda:N")
    dtype: str = Field(default="auto", description="type of the target's weights and activations")


class TrainStage(TargetSettings):
    """Settings of the stage train besides those of the run."""

    texts: Path = Field(description="folder of the stage generate")
    output: Path = Field(description="folder of the run; one that was left off is gone on with")
    report_every: int = Field(default=20, ge=1, description="steps between two reports")
    save_every: int = Field(default=500, ge=1, description="steps between two checkpoints")
    stop_after_seconds: float | None = Field(
        default=None, gt=0, description="save and leave off then; the same command goes on"
    )
    watched_texts: int = Field(default=200, ge=0, description="held-out texts that every checkpoint is measured on")
    compile: bool = Field(default=False, description="compile the unrolled head and its loss with torch.compile")


class ExportStage(TargetSettings):
    """Settings of the stage export."""

    run: Path = Field(description="folder of the stage train")
    output: Path = Field(description="folder for the checkpoint")
    keep_tokens: int | None = Field(default=None, ge=1, description="leave only so many tokens, the most frequent ones")


class EvaluateStage(TargetSettings):
    """Settings of the stage evaluate."""

    texts: Path = Field(description="folder of the stage generate, with held-out or hand-written prompts")
    head: Path = Field(description="checkpoint of the stage export, or a published one of EAGLE-3")
    output: Path | None = Field(default=None, description="JSON file to write besides the table")
    ks: tuple[int, ...] = Field(default=(2, 3, 4, 5, 6), min_length=1, description="numbers of drafts")
    temperature: float = Field(default=0.8, gt=0, description="of the sampled texts")
    row_length: int = Field(default=512, ge=16, description="tokens of a row; longer texts are cut")


def train(stage: TrainStage, settings: TrainSettings) -> bool:
    """Train a head, or go on with it. Returns: whether it is done. Raises: ConfigError, ModelError, OutriderError."""
    target = load_target(stage.model, stage.device, stage.dtype)
    folder = RunFolder(stage.output)
    begun = head_to_train_on(target, settings)
    if begun is not None:
        settings = begun[1]
    folder.begin(settings, target.digest)
    texts = read_texts(stage.texts, ["train"])
    if begun is None:
        to_target = frequent_tokens(texts, target.config.vocab_size, settings.vocab_size).to(target.model.device)
    else:
        to_target = begun[0].to_target
    rows, _ = pack(texts, settings.row_length)
    logger.info("%d texts in %d rows of %d tokens", len(texts), rows.num_rows, settings.row_length)
    trainee, wanted = new_trainee(target, settings, to_target)
    if begun is not None:
        trainee.load_state_dict(begun[0].state_dict())
    features = TargetFeatures(target, wanted)
    source = feature_source(rows.to(target.model.device), features, settings.batch_rows)
    objective = _objective(trainee, target, settings, compiles=stage.compile)
    trainer = Trainer(objective, source, rows.num_rows, settings, folder, to_target)

    held_out = None
    if stage.watched_texts:
        watched = read_texts(stage.texts, ["heldout"])[: stage.watched_texts]
        held_out = HeldOut(watched, (_WATCHED_K,), settings.row_length, _LOOKED_AT)

    def evaluate(step: int) -> None:
        if held_out is not None:
            drafter = Drafter(trainee, target.config.vocab_size, settings.temperature)
            measures = measure(held_out, drafter, features, target.model.device, settings.kind)
            lengths = measures.mean_lengths()
            folder.report({"what": "heldout", "step": step - 1, "k": _WATCHED_K, "mean_length": lengths})
            logger.info("held out, %d drafts: %s", _WATCHED_K, "  ".join(f"{at} {n:.3f}" for at, n in lengths.items()))
        draw_curves(folder.reports(), folder.folder / "curves.png")

    pace = Pace(stage.report_every, stage.save_every, stage.stop_after_seconds)
    return trainer.run(pace, evaluate)


def export(stage: ExportStage) -> int:
    """Write what a run has so far as a checkpoint. Returns: its bytes. Raises: ConfigError, ModelError."""
    folder = RunFolder(stage.run)
    settings, digest = folder.settings()
    target = load_target(stage.model, stage.device, stage.dtype)
    if digest != target.digest:
        raise ConfigError(f"{stage.run} was trained for other weights than {stage.model} has: {digest[:12]}...")
    if (found := folder.load(target.model.device)) is None:
        raise ConfigError(f"{stage.run} has no checkpoint yet; run the stage train first")
    state, weights, _ = found
    trainee, _ = new_trainee(target, settings, state.to_target.to(target.model.device))
    trainee.load_state_dict(dict(weights))
    nbytes = export_head(trainee, target, stage.output, stage.keep_tokens)
    logger.info("%s: %.1f MB, after step %d of %d", stage.output, nbytes / 1e6, state.step, state.total)
    return nbytes


def evaluate(stage: EvaluateStage) -> None:
    """Measure a checkpoint on held-out and hand-written texts, print a table. Raises: ConfigError, ModelError."""
    target = load_target(stage.model, stage.device, stage.dtype)
    checkpoint = read_checkpoint(str(stage.head))
    is_medusa = checkpoint.config.get("model_type") == "medusa"
    trainee = load_medusa(checkpoint, target) if is_medusa else load_eagle(checkpoint, target)
    taps = trainee.taps if isinstance(trainee, EagleTrainee) else ()
    texts = read_texts(stage.texts, ["heldout", "handwritten"])
    if wrong := {text.temperature for text in texts} - {0.0, stage.temperature}:
        raise ConfigError(f"--temperature {stage.temperature:g}: the texts were drawn at {max(wrong):g}")
    held_out = HeldOut(texts, stage.ks, stage.row_length, _LOOKED_AT)
    features = TargetFeatures(target, Wanted(taps, stage.temperature))
    drafter = Drafter(trainee, target.config.vocab_size, stage.temperature)
    method = "medusa" if is_medusa else "eagle3"
    report(measure(held_out, drafter, features, target.model.device, method).entries(), stage.output)


def report(entries: list[dict[str, object]], output: Path | None) -> None:
    """Print a table, and write the same as JSON where that is wanted."""
    print(table(entries))
    if output is not None:
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(json.dumps(entries, indent=1) + "\n")


def _objective(
    trainee: EagleTrainee | MedusaTrainee, target: TargetModel, settings: TrainSettings, *, compiles: bool
) -> Objective:
    if isinstance(trainee, MedusaTrainee):
        return MedusaObjective(trainee, target, temperature=settings.temperature)
    return EagleObjective(
        trainee,
        target,
        num_passes=settings.passes,
        temperature=settings.temperature,
        overlap_weight=settings.overlap_weight,
        compiles=compiles,
    )
