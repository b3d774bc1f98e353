"""Rollout speed: the project's vLLM engine against bare vllm.LLM.generate.

    python benchmarks/rollout.py --shape llama-3.2-1b
    python benchmarks/rollout.py --shape tiny --device cpu --rounds 2

Both drive the same LLM object in this process, on the same prompts, with the same response lengths
(gpu_shapes.py) and the log-prob of each sampled token. Rounds alternate which goes first; the ratio
is the median of the rounds' ratios. Bare vLLM without log-probs goes once a round, for information.
The engine's time runs from prompts to a RaggedBatch, that of bare vLLM to its outputs.
"""

import argparse
import json
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from gpu_engine import (
    BareVllm,
    drop_cached_prompts,
    fill_with_noise,
    fix_lengths,
    rollout_config,
    vllm_engine,
)
from gpu_machine import describe, join, print_header, seconds_of
from gpu_shapes import SHAPES, Lengths, draw_lengths, prompt_token_ids, random_batch

from rlhf_megatron.distributed.start import finish
from rlhf_megatron.rollout.contract import Prompt, RolloutEngine, SamplingParameters

OURS, BARE, WITHOUT = "engine", "bare vLLM", "bare, no log-probs"


@dataclass(frozen=True, kw_only=True)
class Found:
    """Seconds of each round, by way."""

    seconds: dict[str, list[float]]
    response_tokens: int

    @property
    def ratio(self) -> float:
        """Our tokens per second over those of bare vLLM."""
        pairs = zip(self.seconds[OURS], self.seconds[BARE], strict=True)
        return median(bare / ours for ours, bare in pairs)

    def rate(self, way: str) -> float:
        return self.response_tokens / median(self.seconds[way])


def measure(
    engine: RolloutEngine, *, lengths: Lengths, vocab_size: int, rounds: int, responses: int
) -> Found:
    """One call of each way that is not counted, then the rounds."""
    device = engine.parameters()[next(iter(engine.parameters()))].device
    requests = prompt_token_ids(random_batch(lengths, vocab_size=vocab_size))
    wanted = lengths.responses.tolist()
    # The samples of one prompt share its tokens.
    requests = [requests[i - i % responses] for i in range(len(requests))]
    prompts = [
        Prompt(prompt_id=number, token_ids=tokens)
        for number, tokens in enumerate(requests[::responses])
    ]
    sampling = SamplingParameters(
        temperature=1.0,
        max_response_tokens=max(wanted),
        responses_per_prompt=responses,
        stop_token_ids=(),
    )
    fix_lengths(engine, wanted)

    def ours(step: int) -> float:
        drop_cached_prompts(engine)
        found: list[Any] = []
        took = seconds_of(
            lambda: found.append(engine.generate(prompts, sampling=sampling, step=step)),
            device=device,
        )
        assert found[0].response_lengths.tolist() == wanted
        return took

    def bare(logprobs: int | None) -> Callable[[int], float]:
        calls = BareVllm(engine, prompts=requests, lengths=wanted, logprobs=logprobs)

        def run(step: int) -> float:
            with calls.ready():
                return seconds_of(calls.run, device=device)

        return run

    ways = {OURS: ours, BARE: bare(0), WITHOUT: bare(None)}
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    for way in (OURS, BARE):
        ways[way](0)
    for number in range(1, rounds + 1):
        order = [OURS, BARE] if number % 2 else [BARE, OURS]
        for way in (*order, WITHOUT):
            seconds[way].append(ways[way](number))
    return Found(seconds=seconds, response_tokens=sum(wanted))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--shape", choices=SHAPES, default="llama-3.2-1b")
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--responses-per-prompt", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--max-num-seqs", type=int, default=256)
    parser.add_argument("--gpu-memory-utilization", type=float, default=0.5)
    parser.add_argument("--seed-per", choices=("engine", "request"), default="engine")
    parser.add_argument("--precision", choices=("bf16", "fp32"), help="default: bf16 on a GPU")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    options = parser.parse_args()

    context = join(options.device)
    machine = describe(context.device)
    shape, responses = SHAPES[options.shape], options.responses_per_prompt
    lengths = draw_lengths(
        shape, num_samples=options.prompts * responses, responses_per_prompt=responses
    )
    print_header(f"rollout, {shape.name}", machine=machine)
    config = rollout_config(
        gpu_memory_utilization=options.gpu_memory_utilization,
        max_num_seqs=options.max_num_seqs,
    )
    config.seed_per = options.seed_per
    with tempfile.TemporaryDirectory() as folder:
        arch = shape.write(folder)
        engine = vllm_engine(
            shape,
            model_dir=folder,
            config=config,
            precision=options.precision or ("bf16" if context.is_cuda else "fp32"),
            context=context,
        )
        fill_with_noise(engine)
        with torch.no_grad():
            found = measure(
                engine,
                lengths=lengths,
                vocab_size=arch.vocab_size,
                rounds=options.rounds,
                responses=responses,
            )
    print(
        f"  {len(lengths.prompts)} responses to {options.prompts} prompts, "
        f"{int(lengths.prompts.sum())} prompt and {found.response_tokens} response tokens, "
        f"seed_per={options.seed_per}; median of {options.rounds} rounds"
    )
    print(f"{'':<22}{'seconds':>10}{'tokens/s':>12}")
    for way, seconds in found.seconds.items():
        print(f"{way:<22}{median(seconds):>10.3f}{found.rate(way):>12,.0f}")
    print(f"{OURS} / {BARE}, tokens per second: {found.ratio:.3f}")
    if options.json is not None:
        report = asdict(found) | {
            "machine": machine,
            "options": {name: str(value) for name, value in vars(options).items()},
            "ratio": found.ratio,
            "tokens_per_second": {way: found.rate(way) for way in found.seconds},
        }
        options.json.write_text(json.dumps(report, indent=1) + "\n")
    finish(0)


if __name__ == "__main__":
    main()
