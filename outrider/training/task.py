"""Settings of a training, and checks of its folders before anything is loaded. Used by `train_head`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from outrider.engine.files.model_files import check_folder
from outrider.engine.heads.checkpoint import TargetFiles
from outrider.engine.loading.loader import check_weights, read_config
from outrider.lab.models.alpha import check_same_tokens
from outrider.training.estimate import TrainingSizes
from outrider.training.losses import LossName
from outrider.training.written import Ids
from outrider.wire.errors import ConfigError

REPORT = "training.json"
"""Name of the JSON file that is written beside the trained weights. The file has the settings of the training, and the
acceptance before and after the training."""

Kind = Literal["eagle3", "medusa", "pass", "draft"]


@dataclass(frozen=True)
class TrainingTask:
    """Settings of a training, as `train_head` reads them from stdin."""

    kind: Kind
    target: str
    """Folder of the target."""
    out: str
    """Folder to which the trained weights and the report are written."""
    work: str
    """Folder in which the generated text and the checkpoints are kept, so that an interrupted training can continue."""
    prompts: list[str]
    """Prompts to train on. The target generates an output for each of them."""
    held_apart: list[str]
    """Prompts that are not trained on. Acceptance is measured on the target's outputs for them, at each temperature."""
    temperatures: list[float]
    """Temperatures at which the target generates outputs. The prompts use them in rotation."""
    start: str | None
    """Folder of a draft model to begin with. The kind `draft` trains its weights further; `eagle3` uses its sizes,
    embedding and lm_head. None = there is no such model."""
    loss: LossName
    depth: int
    """Number of draft tokens of a round that are trained: the number of steps of EAGLE-3's training-time test, of
    Medusa heads, or of look-ahead embeddings."""
    taps: list[int] | None
    """Indices of the target's hidden states that `eagle3` reads. None = one from an early, one from a middle and one
    from a late layer (`default_taps`)."""
    draft_vocab: int | None
    """Number of token ids that `eagle3` can propose, the most frequent in the text; None = all."""
    updates: int
    """Number of updates of the weights in the whole training."""
    batch_size: int
    """Number of outputs that one update of the weights trains on."""
    max_tokens: int
    """Maximum number of tokens of an output that the target generates."""
    seed: int
    seconds: float | None
    """Seconds after which the training ends, finished or not; None = no limit."""
    device: str = "auto"
    raw: bool = False
    """Whether the prompts are used unchanged, even if the target has a chat template."""


def check_folders(task: TrainingTask) -> dict[str, int]:
    """Check the folders of a training. Return the number of parameters of the target and, if `task.start` is given, of
    that draft model. The keys are the models' folders.

    Raises ConfigError if a file of a model is missing, if the tokenizers of target and draft model differ, or if the
    folder `task.out` holds anything but an earlier training.
    """
    num_parameters: dict[str, int] = {}
    for model in (task.target, task.start):
        if model is not None:
            check_folder(Path(model).expanduser())
            network = check_weights(model, read_config(model))
            num_parameters[model] = sum(parameter.numel() for parameter in network.parameters())
    if task.start is not None:
        check_same_tokens(task.target, task.start)
    out = Path(task.out)
    if out.exists() and not _may_replace(out):
        raise ConfigError(
            f"--out is {task.out!r}, which holds something else than an earlier training; name a new folder"
        )
    return num_parameters


def _may_replace(out: Path) -> bool:
    if not out.is_dir():
        return False
    return (out / REPORT).is_file() or not any(out.iterdir())


def estimate_sizes(
    task: TrainingTask, target: TargetFiles, num_parameters: dict[str, int], num_answers: int, prompts: Sequence[Ids]
) -> TrainingSizes:
    """Return the sizes from which the cost of a training is estimated.

    target: files of the target. num_parameters: number of parameters of each model, by its folder. num_answers: number
    of outputs that the target will generate. prompts: token ids of the prompts to train on.
    """
    num_target = num_parameters[task.target]
    if task.start is not None:
        num_trained = num_parameters[task.start]
    elif task.kind == "eagle3":  # a layer of the target's shape, and the projection of three hidden states
        num_trained = num_target // target.num_layers + 3 * target.width**2
    elif task.kind == "medusa":
        num_trained = task.depth * target.width**2
    else:
        num_trained = task.depth * target.width
    return TrainingSizes(
        num_target_parameters=num_target,
        num_trained_parameters=num_trained,
        vocab_size=target.vocab_size,
        num_answers=num_answers,
        max_tokens=task.max_tokens,
        prompt_tokens=sum(map(len, prompts)) // len(prompts),
        updates=task.updates,
        batch_size=task.batch_size,
        depth=task.depth,
    )
