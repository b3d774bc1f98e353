"""Runs a Megatron model over micro-batches: inference and training steps. Knows no PPO.

Every method is collective over the role's ranks. Results come back the same on every rank of the
role, through one sum over these in which each value is contributed once.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from rlhf_megatron.engine.microbatch import MicroBatch, equal_micro_batches
from rlhf_megatron.engine.offload import (
    GRADIENTS,
    KINDS,
    OPTIMIZER,
    WEIGHTS,
    Copier,
    HostMemory,
    OffloadedPart,
    RoleMemory,
)
from rlhf_megatron.engine.optimizer import (
    LateGather,
    as_float,
    build_optimizer,
    gradients_are_finite,
    in_model_precision,
    set_rates,
    wrap_for_training,
)
from rlhf_megatron.engine.parts import named_parts
from rlhf_megatron.models.build import VALUE_HEAD, RoleModel
from rlhf_megatron.models.config import OptimizerConfig
from rlhf_megatron.models.vocab_parallel import TokenLogProbs, token_log_probs

FP8_TOKENS = 16
"""Products in 8-bit floats take rows in multiples of it (cuBLAS, Transformer Engine)."""


@dataclass(frozen=True, kw_only=True)
class LossResult:
    """A micro-batch's loss as a sum and its count.

    The gradient of an optimizer step is that of (sum of loss_sum over micro-batches and replicas)
    / (sum of count): exact for any split, never a mean of means.
    """

    loss_sum: Tensor  # scalar, differentiable
    count: Tensor  # integer scalar
    sums: dict[str, Tensor] = field(default_factory=dict)
    """name -> [2] float64 (sum, count); they add up over micro-batches and replicas."""
    maxima: dict[str, Tensor] = field(default_factory=dict)
    """name -> float64 scalar, not negative."""


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """One optimizer step, or the gradient for it. The same on every rank of the role."""

    grad_norm: float
    """Before clipping. Of a gradient that is not taken: NaN where none was computed."""
    updated: bool
    metrics: dict[str, float]
    """Of the whole mini-batch: sum / count of each name, and the maxima."""
    nonfinite_rank: int = -1
    """A rank in whose share of the gradient is NaN, infinity, or a square that is; -1: none."""


Judgement = Callable[[StepResult], bool]
"""Whether a gradient is to be taken, by what all ranks know of it, so that all decide alike."""

LossFunction = Callable[[Tensor, MicroBatch], LossResult]
"""(the model's output [T, H or 1], micro-batch) -> loss, on the last pipeline stage. Of a model
with both heads the output is [T, H], and the micro-batch has the `values`."""


class ModelEngine:
    """One role's model on this rank, with its optimizer where it is trained."""

    def __init__(
        self,
        model: RoleModel,
        *,
        device: torch.device,
        optimizer_config: OptimizerConfig | None = None,
        kept_logits_bytes: int = 0,
    ) -> None:
        """kept_logits_bytes: as in vocab_parallel.token_log_probs."""
        self.model = model
        self._kept_logits_bytes = kept_logits_bytes
        self.device = device
        self.optimizer_config = optimizer_config
        self.optimizer: Any = None
        self.memory = RoleMemory()
        with model.groups.active():
            if optimizer_config is None:
                self._modules = in_model_precision(model)
                for module in self._modules:
                    module.requires_grad_(False)
            else:
                self._modules = wrap_for_training(model, config=optimizer_config)
                self._gather = LateGather(self._modules)
                self.reset_optimizer()

    @property
    def pad_to_multiple(self) -> int:
        """Micro-batches' token counts must be a multiple of this."""
        config = self.model.config
        shards = config.tensor_model_parallel_size if config.sequence_parallel else 1
        return shards * FP8_TOKENS if config.fp8 else shards

    def reset_optimizer(self) -> None:
        """A fresh optimizer over the present weights."""
        assert self.optimizer_config is not None
        assert not self.memory.parts, "the host's copies would be those of the old one"
        with self.model.groups.active():
            self.optimizer = build_optimizer(
                self.model, wrapped=self._modules, config=self.optimizer_config
            )

    def make_offloadable(self, kinds: Sequence[str], *, copier: Copier, moves: bool) -> None:
        """From now on `memory` can put these kinds (engine/offload.py) off the device and back.
        moves: False only counts."""
        host = HostMemory(pin=self.device.type == "cuda")
        tensors = named_parts(self.model, optimizer=self.optimizer)
        self.memory.parts = {
            kind: OffloadedPart(
                kind,
                tensors=tensors[kind],
                copier=copier,
                host=host,
                keeps_values=kind != GRADIENTS,
                moves=moves,
            )
            for kind in kinds
        }

    def weights_changed(self) -> None:
        """The weights were written from outside: bring the optimizer's master copies in line."""
        self.memory.assert_here(WEIGHTS, OPTIMIZER)
        self.memory.will_change(WEIGHTS, OPTIMIZER)
        if self.optimizer is not None:
            with self.model.groups.active():
                self.optimizer.reload_model_params()

    def log_probs(
        self, hidden: Tensor, *, micro_batch: MicroBatch, temperature: float
    ) -> TokenLogProbs:
        """Log-prob and entropy of each response token from the output [T, H]: each [R]."""
        return token_log_probs(
            hidden[micro_batch.state_indices],
            weight=self.model.output_weight,
            targets=micro_batch.targets,
            shard=self.model.vocab_shard,
            temperature=temperature,
            kept_logits_bytes=self._kept_logits_bytes,
        )

    def infer(
        self,
        micro_batches: Sequence[MicroBatch],
        *,
        outputs: Callable[[Tensor, MicroBatch], dict[str, tuple[Tensor, Tensor]]],
        sizes: dict[str, int],
    ) -> dict[str, Tensor]:
        """Forward without gradients.

        `outputs` turns the model's output into name -> (values, rows of the whole batch); the
        result holds, for each name of `sizes`, a float32 CPU tensor of that length with the values
        of all replicas in place.
        """
        found: dict[str, list[tuple[Tensor, Tensor]]] = {name: [] for name in sizes}

        def collect(output: Tensor, micro_batch: MicroBatch) -> tuple[Tensor, Tensor, dict]:
            if self.model.groups.coordinates.tp == 0:
                for name, (values, rows) in outputs(output, micro_batch).items():
                    found[name].append((values.float(), rows))
            elif self.model.head != VALUE_HEAD:
                outputs(output, micro_batch)  # its collectives span the TP ranks
            return output.new_zeros(()), torch.zeros((), dtype=torch.int, device=self.device), {}

        self.memory.assert_here(WEIGHTS)
        for module in self._modules:
            module.eval()
        with torch.no_grad():
            self._run(micro_batches, collect, forward_only=True)
        buffers = {name: torch.zeros(n, device=self.device) for name, n in sizes.items()}
        for name, pieces in found.items():
            if pieces:  # put in place at the end: a copy of rows waits for all that was asked for
                values, rows = (torch.cat(parts) for parts in zip(*pieces, strict=True))
                buffers[name][rows.to(self.device)] = values
        for buffer in buffers.values():
            dist.all_reduce(buffer, group=self.model.groups.everyone)
        return {name: buffer.cpu() for name, buffer in buffers.items()}

    @contextmanager
    def consecutive_updates(self) -> Iterator[None]:
        """Around the `train_step`s of a phase, between which nobody else reads weights: with
        overlap_param_gather they may be whole only at the end. Collective."""
        with self._gather.between_updates():
            yield

    def train_step(
        self,
        micro_batches: Sequence[MicroBatch],
        *,
        loss: LossFunction,
        learning_rate: float,
        takes: Judgement | None = None,
        with_norm: bool = False,
    ) -> StepResult:
        """Accumulate gradients over the micro-batches, clip, and take one optimizer step.

        Where `takes` is given and refuses the gradient, weights and optimizer stay as they are.
        It sees the gradient's norm only `with_norm`, which costs an all-reduce of one number.
        """
        assert self.optimizer is not None and self.optimizer_config is not None
        self.memory.assert_here(*KINDS)
        self.memory.will_change(*KINDS)
        collected: list[LossResult] = []

        def weighed(output: Tensor, micro_batch: MicroBatch) -> tuple[Tensor, Tensor, dict]:
            result = loss(output, micro_batch)
            collected.append(result)
            # Keeps the output in the graph of a micro-batch without response tokens, and a head
            # that the loss leaves out: overlap_grad_reduce waits for all parameters' gradients.
            loss_sum = result.loss_sum + 0.0 * output.sum()
            if micro_batch.values is not None:
                loss_sum = loss_sum + 0.0 * micro_batch.values.sum()
            return loss_sum, result.count.to(torch.int), {}

        for module in self._modules:
            module.train()
            module.zero_grad_buffer()
        self.optimizer.zero_grad()
        self._run(micro_batches, weighed, forward_only=False)
        with self.model.groups.active():
            # As the optimizer's step begins; done twice it does the same.
            self.optimizer.prepare_grads()
            metrics, nonfinite_rank = self._agree(
                collected, grads_are_finite=gradients_are_finite(self.optimizer)
            )
            norm = as_float(self.optimizer.get_grad_norm()) if with_norm else math.nan
        found = StepResult(
            grad_norm=norm, updated=False, metrics=metrics, nonfinite_rank=nonfinite_rank
        )
        if takes is not None and not takes(found):
            return found
        set_rates(
            self.optimizer,
            learning_rate=learning_rate,
            weight_decay=self.optimizer_config.weight_decay,
        )
        with self.model.groups.active():
            updated, grad_norm, _ = self.optimizer.step()
            self._gather.updated()
        return replace(found, grad_norm=as_float(grad_norm), updated=bool(updated))

    def nonfinite_weights(self) -> list[str]:
        """The parameters of this rank that hold NaN or infinity, with how many. Not collective."""
        with self.memory.on_device(WEIGHTS):
            return self._nonfinite_weights()

    def _nonfinite_weights(self) -> list[str]:
        parameters = {n: p for n, p in self.model.parameters().items() if p.numel() > 0}
        if not parameters:
            return []
        # One pass without a copy, as NaN goes into both extremes; one wait for the device.
        extremes = [torch.stack(torch.aminmax(p.detach())) for p in parameters.values()]
        finite = [torch.isfinite(e).all() for e in extremes]
        return [
            f"{name} ({int((~torch.isfinite(p)).sum())} of {p.numel()} values)"
            for (name, p), is_finite in zip(
                parameters.items(), torch.stack(finite).tolist(), strict=True
            )
            if not is_finite
        ]

    def _run(
        self,
        micro_batches: Sequence[MicroBatch],
        loss: Callable[[Tensor, MicroBatch], tuple[Tensor, Tensor, dict]],
        *,
        forward_only: bool,
    ) -> None:
        def forward_step(batches: Iterator[MicroBatch], module: Any) -> tuple[Tensor, Any]:
            micro_batch = next(batches)
            options = {"fp32_output": False} if self.model.config.bf16 else {}
            output = module(
                micro_batch.tokens,
                micro_batch.packed.position_ids[None],  # type: ignore[index]
                None,
                packed_seq_params=micro_batch.packed,
                **options,
            )
            values = self.model.take_values() if module is self._modules[-1] else None
            return output, partial(_last_stage_loss, loss, replace(micro_batch, values=values))

        groups = self.model.groups
        stages = groups.layout.pipeline_model_parallel_size
        virtual = self.model.config.virtual_pipeline_model_parallel_size
        if virtual is not None:
            micro_batches = equal_micro_batches(micro_batches, number_multiple=stages)
        with groups.active():
            get_forward_backward_func(pp_size=stages, vp_size=virtual)(
                forward_step_func=forward_step,
                data_iterator=[iter(micro_batches) for _ in self._modules],
                model=self._modules,
                num_microbatches=len(micro_batches),
                seq_length=max(m.tokens.size(1) for m in micro_batches),
                micro_batch_size=1,
                forward_only=forward_only,
                pg_collection=groups.collection,
                **_pipeline_options(self.model),
            )

    def _agree(
        self, collected: Sequence[LossResult], *, grads_are_finite: bool
    ) -> tuple[dict[str, float], int]:
        """The metrics added up over micro-batches and replicas, where only the last stage knows
        them; and a rank whose gradients are not finite, or -1."""
        groups = self.model.groups
        contributes = groups.is_last_stage and groups.coordinates.tp == 0
        shared: list[Any] = [None]
        if contributes:
            shared = [(sorted(collected[0].sums), sorted(collected[0].maxima))]
        source = groups.layout.rank(tp=0, dp=0, pp=groups.layout.pipeline_model_parallel_size - 1)
        dist.broadcast_object_list(shared, src=source, group=groups.everyone)
        sum_names, maximum_names = shared[0]
        sums = torch.zeros(len(sum_names), 2, dtype=torch.float64, device=self.device)
        maxima = torch.zeros(len(maximum_names) + 1, dtype=torch.float64, device=self.device)
        maxima[-1] = -1 if grads_are_finite else dist.get_rank()
        for result in collected if contributes else ():
            for row, name in enumerate(sum_names):
                sums[row] += result.sums[name]
            for row, name in enumerate(maximum_names):
                maxima[row] = torch.maximum(maxima[row], result.maxima[name])
        dist.all_reduce(sums, group=groups.everyone)
        dist.all_reduce(maxima, op=dist.ReduceOp.MAX, group=groups.everyone)
        means = {n: s / max(c, 1.0) for n, (s, c) in zip(sum_names, sums.tolist(), strict=True)}
        *largest, nonfinite_rank = maxima.tolist()
        return means | dict(zip(maximum_names, largest, strict=True)), int(nonfinite_rank)


def _last_stage_loss(
    loss: Callable[[Tensor, MicroBatch], tuple[Tensor, Tensor, dict]],
    micro_batch: MicroBatch,
    output: Tensor,
) -> tuple[Tensor, Tensor, dict]:
    """The schedule hands over the model's output, [1, T, H or 1]."""
    return loss(output[0], micro_batch)


def _pipeline_options(model: RoleModel) -> dict[str, Any]:
    """With explicit groups the pipelined schedule wants its communicator as well."""
    if model.groups.layout.pipeline_model_parallel_size == 1:
        return {}
    from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator

    return {
        "p2p_communicator": P2PCommunicator(
            pp_group=model.groups.collection.pp, config=model.config
        )
    }
