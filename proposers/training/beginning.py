"""The head that a run begins with: a new one, or one that was trained before."""

from torch import Tensor

from proposers.base import TargetModel
from proposers.checkpoint import read_checkpoint
from proposers.training.eagle_trainee import EagleShape, EagleTrainee, load_eagle, new_eagle
from proposers.training.medusa_trainee import MedusaTrainee
from proposers.training.schedule import TrainSettings
from proposers.training.target import Wanted, default_taps
from server.errors import ConfigError

_OF_THE_HEAD = ("taps", "tied_output", "norm_output", "vocab_size")


def new_trainee(
    target: TargetModel, settings: TrainSettings, to_target: Tensor
) -> tuple[EagleTrainee | MedusaTrainee, Wanted]:
    """A head to begin with, and the features it needs."""
    if settings.kind == "medusa":
        return MedusaTrainee(target, to_target, settings.num_heads), Wanted((), settings.temperature)
    taps = settings.taps or default_taps(target.config.num_hidden_layers)
    shape = EagleShape(taps, to_target, not settings.tied_output, settings.norm_output)
    return new_eagle(shape, target, settings.seed), Wanted(taps, settings.temperature)


def head_to_train_on(target: TargetModel, settings: TrainSettings) -> tuple[EagleTrainee, TrainSettings] | None:
    """The head that `settings.init` names, and the settings of a run that goes on with it; None if it names none.

    Raises: ConfigError if such heads are not trained here, or settings contradict it; ModelError if it is none.
    """
    if settings.init is None:
        return None
    if settings.kind != "eagle3":
        raise ConfigError("--init: only heads of the kind eagle3 are trained on")
    if given := sorted(settings.model_fields_set.intersection(_OF_THE_HEAD)):
        flags = ", ".join("--" + name.replace("_", "-") for name in given)
        raise ConfigError(f"{flags}: not together with --init, whose head brings its own")
    head = load_eagle(read_checkpoint(str(settings.init)), target)
    shaped = settings.model_copy(
        update={
            "taps": head.taps,
            "tied_output": head.output is None,
            "norm_output": head.norms.of_output,
            "vocab_size": len(head.to_target),
        }
    )
    new, _ = new_trainee(target, shaped, head.to_target)
    assert isinstance(new, EagleTrainee), "this was asked above"
    if new.norms != head.norms or _shapes(new) != _shapes(head):
        raise ConfigError(f"--init: {settings.init} is a head of another make than those that are trained here")
    return head, shaped


def _shapes(trainee: EagleTrainee) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in trainee.state_dict().items()}
