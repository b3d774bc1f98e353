"""The phases of a step, and what each of them needs on the device.

The order and the hand-over are those of trainer.py and DESIGN.md, section 5: the engine is awake
from the weight sync to the end of the reward phase, and a checkpoint is written while it is.
"""

from dataclasses import dataclass, field
from typing import Literal

Part = Literal["weights", "gradients", "optimizer"]
Awake = Literal["asleep", "weights", "awake"]
"""What of an engine is on the device: nothing, its weights, or its KV cache as well."""
Activity = Literal["inference", "training", ""]


@dataclass(frozen=True, kw_only=True)
class Phase:
    """One phase: who is awake, and who works."""

    name: str
    engine: Awake = "asleep"
    role: str = ""
    """The role whose model runs."""
    activity: Activity = ""
    uses: tuple[tuple[str, Part], ...] = field(default=())
    """What of each role must be on the device; the rest may be offloaded."""


def _all_parts(role: str) -> tuple[tuple[str, Part], ...]:
    return ((role, "weights"), (role, "gradients"), (role, "optimizer"))


SETUP = "setup"
CHECKPOINT = "checkpoint"
RESHARD = "reshard"
PHASES = (
    Phase(name=SETUP),
    Phase(name="rollout", engine="awake"),
    Phase(name="reward", engine="awake", role="reward", uses=(("reward", "weights"),)),
    Phase(name="log_prob", role="actor", activity="inference", uses=(("actor", "weights"),)),
    Phase(name="ref_log_prob", role="ref", activity="inference", uses=(("ref", "weights"),)),
    Phase(name="value", role="critic", activity="inference", uses=(("critic", "weights"),)),
    Phase(name="advantage"),
    Phase(name="update_critic", role="critic", activity="training", uses=_all_parts("critic")),
    Phase(name="update_actor", role="actor", activity="training", uses=_all_parts("actor")),
    Phase(name=RESHARD, engine="weights", role="actor", uses=(("actor", "weights"),)),
    Phase(name=CHECKPOINT, engine="awake"),
)
"""In the order of a step. setup: the engine is built, and looks for the memory that it may use."""
