"""The order in which prompts are drawn: the same for the same seed, also after a resume."""

import random
from typing import Any

from rlhf_megatron.data.prompts import PromptRow, PromptSet
from rlhf_megatron.errors import UserError


class PromptLoader:
    """Gives `prompts_per_step` distinct prompts a step, pass after pass over the set.

    The order of a pass depends on (seed, number of the pass) alone. A step may span two passes:
    the rows it took from the first go last in the second, so that no prompt is twice in one step.
    """

    def __init__(
        self, prompt_set: PromptSet, *, prompts_per_step: int, seed: int, shuffle: bool = True
    ) -> None:
        """Raises UserError for fewer prompts than prompts_per_step."""
        if len(prompt_set) < prompts_per_step:
            raise UserError(
                f"rollout.prompts_per_step={prompts_per_step}: {str(prompt_set.path)!r} has only "
                f"{len(prompt_set)} prompts and a step takes each at most once; "
                f"lower it to {len(prompt_set)} or raise rollout.responses_per_prompt"
            )
        self._prompt_set = prompt_set
        self._prompts_per_step = prompts_per_step
        self._seed = seed
        self._shuffle = shuffle
        self._start_epoch(0, carried=[])

    def next_step(self) -> list[PromptRow]:
        """The prompts of the next step, exactly prompts_per_step of them, all distinct."""
        taken = self._take(self._prompts_per_step)
        if len(taken) < self._prompts_per_step:
            self._start_epoch(self._epoch + 1, carried=taken)
            taken = taken + self._take(self._prompts_per_step - len(taken))
        return [self._prompt_set.rows[i] for i in taken]

    def state_dict(self) -> dict[str, Any]:
        """Everything that `load_state_dict` needs, as plain JSON values."""
        return {
            "seed": self._seed,
            "shuffle": self._shuffle,
            "prompts": self._prompt_set.fingerprint,
            "epoch": self._epoch,
            "carried": list(self._carried),
            "position": self._position,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where `state` was taken.

        Raises UserError where seed, shuffle or the prompts themselves differ, or a key is missing:
        the order could not be continued.
        """
        own = self.state_dict()
        missing = sorted(own.keys() - state.keys())
        if missing:
            raise UserError(f"resume: the data position lacks {', '.join(missing)}")
        names = {"seed": "run.seed", "shuffle": "data.shuffle", "prompts": "data.prompts"}
        changed = [names[key] for key in names if state[key] != own[key]]
        if changed:
            raise UserError(
                f"resume: {', '.join(changed)} changed since the checkpoint, so the order of the "
                "prompts cannot be continued; put it back or start a new run"
            )
        self._start_epoch(state["epoch"], carried=list(state["carried"]))
        self._position = state["position"]

    def _start_epoch(self, epoch: int, *, carried: list[int]) -> None:
        order = list(range(len(self._prompt_set)))
        if self._shuffle:
            # A string seed is hashed by Random itself: the same on every machine and Python.
            random.Random(f"prompts {self._seed} {epoch}").shuffle(order)
        held = set(carried)
        self._epoch = epoch
        self._carried = carried
        self._position = 0
        self._order = [i for i in order if i not in held] + [i for i in order if i in held]

    def _take(self, count: int) -> list[int]:
        taken = self._order[self._position : self._position + count]
        self._position += len(taken)
        return taken
