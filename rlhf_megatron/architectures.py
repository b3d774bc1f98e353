"""What each role's model is. Imports no torch: a bad model directory is refused at once.

A dry run and the planners need a model's numbers only. Where its directory is not there they take
those of a published model of the same name from configs/models, and say so.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rlhf_megatron.config import Config
from rlhf_megatron.errors import ConfigError, UserError
from rlhf_megatron.layout.architecture import (
    ModelArchitecture,
    read_architecture,
    read_architecture_file,
)
from rlhf_megatron.validation_model import validate_model

PROFILES = "profiles"
STAND_INS = Path("models")
"""Folder beside the configurations: models/NAME/config.json."""

REPOSITORY_CONFIGS = Path(__file__).resolve().parents[1] / "configs"
"""Not part of an installed package."""


@dataclass(frozen=True, kw_only=True)
class Architectures:
    """The numbers of the roles' models."""

    actor: ModelArchitecture
    critic: ModelArchitecture | None  # None where it is a head on the actor
    ref: ModelArchitecture | None  # None without a KL penalty
    notes: tuple[str, ...] = ()
    """One line for each model whose numbers come from a stand-in."""


@dataclass(frozen=True, kw_only=True)
class FoundModel:
    """Where a model's numbers are."""

    config_file: Path
    note: str = ""
    """What to say where they are not the model's own."""


def stand_in_folders(config_files: Sequence[str | Path] = ()) -> tuple[Path, ...]:
    """Where stand-ins may lie: beside the given configurations, above a folder of profiles, and in
    the repository's configs/."""
    folders = [Path(path).resolve().parent for path in config_files]
    above = [folder.parent for folder in folders if folder.name == PROFILES]
    candidates = [folder / STAND_INS for folder in (*folders, *above, REPOSITORY_CONFIGS)]
    return tuple(dict.fromkeys(folder for folder in candidates if folder.is_dir()))


def find_model(model: str | Path, *, stand_ins: Sequence[Path]) -> FoundModel:
    """The config.json of a directory; of the stand-in of its name where there is no such directory.

    Raises UserError where there is neither.
    """
    directory = Path(model)
    if directory.exists() or not stand_ins:
        return FoundModel(config_file=directory / "config.json")
    for folder in stand_ins:
        file = folder / directory.name / "config.json"
        if file.is_file():
            note = f"{model} is not here: planned with the numbers of {_short(file)}"
            return FoundModel(config_file=file, note=note)
    known = sorted({file.parent.name for folder in stand_ins for file in folder.glob("*/*.json")})
    raise UserError(
        f"{model}: no such directory; give a Hugging Face model directory, or, to plan without one,"
        f" a name that configs/models knows: {', '.join(known)}"
    )


def read_architectures(config: Config, *, stand_ins: Sequence[Path] = ()) -> Architectures:
    """Read the roles' models and check them against the configuration.

    stand_ins: `stand_in_folders` for a plan; none for a run, which needs the models themselves.
    Raises UserError for an unreadable or unsupported model, ConfigError with all rules broken.
    """
    notes: dict[str, None] = {}

    def read(directory: str) -> ModelArchitecture:
        if not stand_ins:
            return read_architecture(directory)
        found = find_model(directory, stand_ins=stand_ins)
        if found.note:
            notes[found.note] = None
        return read_architecture_file(found.config_file)

    actor = read(config.actor.model)
    critic = None
    if not config.critic.shared_backbone:
        critic = read(config.critic.model) if config.critic.model else actor
    ref = None
    if config.ppo.kl.place != "off":
        ref = read(config.ref.model) if config.ref.model else actor
    problems = validate_model(config, actor=actor, critic=critic, ref=ref)
    if actor.head != "lm":
        problems.append(
            f"actor.model={config.actor.model}: a classification model cannot generate; give a "
            "language model (a reward model's head is for critic.model or reward.model)"
        )
    if problems:
        raise ConfigError(problems)
    return Architectures(actor=actor, critic=critic, ref=ref, notes=tuple(notes))


def _short(path: Path) -> Path:
    """From the working folder where it lies below it."""
    here = Path.cwd()
    return path.relative_to(here) if path.is_relative_to(here) else path
