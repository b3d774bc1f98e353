"""Rewards from a sequence-classification model of transformers with one label."""

from collections.abc import Sequence
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from torch import Tensor

from rlhf_megatron.errors import UserError
from rlhf_megatron.rewards.contract import ScoringInput


class ModelScorer:
    """Scores batches of conversations; the score is read at the last token.

    The text is the prompt's messages and the response through the model's own chat template, or
    prompt and response one after the other where the tokenizer has no template; a plain prompt goes
    through a template as the user's message.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        device: torch.device,
        dtype: torch.dtype = torch.float32,
        batch_samples: int = 16,
        trust_remote_code: bool = False,
    ) -> None:
        """`trust_remote_code`: run code that the directory brings with it.

        Raises UserError for a missing directory, one that cannot be read, a number of labels other
        than 1, and weights without a scoring head.
        """
        self._path = Path(path)
        self._device = device
        self._batch_samples = batch_samples
        self._trust_remote_code = trust_remote_code
        self._tokenizer = self._load_tokenizer()
        self._model = self._load_model(dtype)
        self._pad_token_id: int | None = self._model.config.pad_token_id
        self._max_tokens: int | None = getattr(self._model.config, "max_position_embeddings", None)

    def __call__(self, samples: Sequence[ScoringInput]) -> list[Any]:
        """A float for each sample; an exception for one that exceeds the model's context."""
        sequences = [self._tokenize(sample) for sample in samples]
        outcomes: list[Any] = [self._length_error(ids) for ids in sequences]
        fitting = [i for i, error in enumerate(outcomes) if error is None]
        fitting.sort(key=lambda i: len(sequences[i]))  # like lengths together: least padding
        for start in range(0, len(fitting), self._batch_samples):
            chosen = fitting[start : start + self._batch_samples]
            scores = self._score([sequences[i] for i in chosen])
            for i, score in zip(chosen, scores.tolist(), strict=True):
                outcomes[i] = score
        return outcomes

    def _tokenize(self, sample: ScoringInput) -> list[int]:
        if self._tokenizer.chat_template is None:
            return list(self._tokenizer(sample.prompt + sample.response).input_ids)
        messages = list(sample.messages or [{"role": "user", "content": sample.prompt}])
        messages.append({"role": "assistant", "content": sample.response})
        return list(self._tokenizer.apply_chat_template(messages, tokenize=True, return_dict=False))

    def _length_error(self, ids: list[int]) -> Exception | None:
        if not ids:
            return ValueError("the reward model's tokenizer makes no token of it")
        if self._max_tokens is not None and len(ids) > self._max_tokens:
            return ValueError(
                f"{len(ids)} tokens, more than the reward model's context of {self._max_tokens}"
            )
        return None

    @torch.no_grad()
    def _score(self, sequences: list[list[int]]) -> Tensor:
        """[N] float32 scores of one padded batch."""
        width = max(len(ids) for ids in sequences)
        pad = self._padding_id(sequences)
        tokens = torch.tensor([ids + [pad] * (width - len(ids)) for ids in sequences])
        mask = torch.tensor([[1] * len(ids) + [0] * (width - len(ids)) for ids in sequences])
        # transformers reads a decoder's score at the last token that is not this one.
        self._model.config.pad_token_id = pad
        logits: Tensor = self._model(
            input_ids=tokens.to(self._device), attention_mask=mask.to(self._device)
        ).logits
        return logits[:, 0].float().cpu()

    def _padding_id(self, sequences: list[list[int]]) -> int:
        """The model's own padding token, or, where it names none, an id the batch does not hold:
        EOS, the usual makeshift, would hide a real EOS at the end of a text."""
        if self._pad_token_id is not None:
            return self._pad_token_id
        held = set().union(*sequences)
        return next(i for i in range(len(held) + 1) if i not in held)

    def _load_tokenizer(self) -> Any:
        from transformers import AutoTokenizer

        if not self._path.is_dir():
            raise self._refusal("no such directory")
        try:
            return AutoTokenizer.from_pretrained(
                str(self._path), trust_remote_code=self._trust_remote_code, local_files_only=True
            )
        except Exception as error:  # transformers raises whatever its readers do
            raise self._refusal(f"no tokenizer can be read ({error})") from error

    def _load_model(self, dtype: torch.dtype) -> Any:
        from transformers import AutoConfig, AutoModelForSequenceClassification

        try:
            config = AutoConfig.from_pretrained(
                str(self._path), trust_remote_code=self._trust_remote_code
            )
            labels: int = config.num_labels
            if labels != 1:
                raise self._refusal(f"the model has {labels} labels, a reward model has 1")
            model, loaded = AutoModelForSequenceClassification.from_pretrained(
                str(self._path),
                dtype=dtype,
                local_files_only=True,
                trust_remote_code=self._trust_remote_code,
                weights_only=True,  # of pickled files: tensors, no code
                output_loading_info=True,
            )
        except UnpicklingError as error:
            rule = "its .bin file holds more than tensors, and is not unpickled; convert it to"
            raise self._refusal(f"{rule} safetensors where you trust it") from error
        except (OSError, ValueError, KeyError) as error:
            if isinstance(error, UserError):
                raise
            raise self._refusal(f"no model can be read ({error})") from error
        if loaded["missing_keys"]:
            missing = ", ".join(sorted(loaded["missing_keys"])[:3])
            raise self._refusal(f"the weights lack {missing}: not a trained reward model")
        return model.to(self._device).eval()

    def _refusal(self, rule: str) -> UserError:
        return UserError(
            f"reward.model={str(self._path)!r}: {rule}; give the directory of a transformers "
            "sequence-classification model with one label"
        )
