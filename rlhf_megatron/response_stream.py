"""An engine's responses on their way to this rank's scorer, each as it finishes."""

from collections.abc import Callable, Sequence

from rlhf_megatron.rewards.contract import PendingScores, ScoringInput


class ResponseStream:
    """A ResponseListener for one call of `RolloutEngine.generate`, closed after it.

    All ranks of an engine hear of all its responses; each hands those of its share to its scorer.
    """

    def __init__(
        self,
        pending: PendingScores,
        *,
        share: range,
        to_sample: Callable[[int, Sequence[int]], ScoringInput],
    ) -> None:
        """share: indices in the engine's batch. to_sample: makes a sample from such an index and
        the response's tokens."""
        self.pending = pending
        self.samples: list[ScoringInput] = []
        """In the order in which they finished, as the scores will be."""
        self.places: list[int] = []
        """Of each of them, its place in the share."""
        self.num_scored = 0
        """Samples whose score was there when the last response of the engine was."""
        self._share, self._to_sample = share, to_sample

    def __call__(self, index: int, *, token_ids: Sequence[int]) -> None:
        if index not in self._share:
            return
        sample = self._to_sample(index, token_ids)
        self.samples.append(sample)
        self.places.append(self._share.index(index))
        self.pending.add(sample)

    def close(self) -> None:
        """The engine has finished."""
        self.num_scored = self.pending.num_scored
        self.pending.all_added()
        assert sorted(self.places) == list(range(len(self._share))), "responses missing or twice"
