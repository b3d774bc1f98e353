"""tools/plan_reshard.py: its figures against formulas and brute force, and what it refuses."""

import itertools
import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from layout_cases import small
from test_tools_data import tool

from rlhf_megatron.cli import TOOLS
from rlhf_megatron.layout.boxes import Box, Placement
from rlhf_megatron.reshard.minimum import Away, _least_cost, elements_minimum_over_numberings

LLAMA_70B = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "num_hidden_layers": 80,
    "hidden_size": 8192, "intermediate_size": 28672, "num_attention_heads": 64,
    "num_key_value_heads": 8, "vocab_size": 128256, "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False, "torch_dtype": "bfloat16",
}  # fmt: skip


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A config.json alone, under another name."""
    path = tmp_path / "llama.json"
    sizes = {"num_hidden_layers": 8, "hidden_size": 64, "intermediate_size": 96}
    path.write_text(json.dumps(LLAMA_70B | sizes | {"num_attention_heads": 8, "vocab_size": 512}))
    return path


def figures(capsys, *words: str) -> dict:
    assert tool("plan_reshard").main([*words, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert isinstance(found, dict)
    return found


def test_llama_70b_on_512_ranks(tmp_path: Path, capsys) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_70B))
    words = ("--model", str(tmp_path), "--train", "tp=8,pp=8,dp=8", "--rollout", "tp=8")
    found = figures(capsys, *words)
    assert found["ranks"] == 512 and found["ratio"] == 1.0
    assert found["bytes_received_total"] == found["bytes_minimum_total"]
    assert found["bytes_minimum_unconstrained_total"] == found["bytes_minimum_total"]
    assert found["proposed_order"] is None
    model_bytes = 2 * 70.55e9
    gather, own = (found[f"{k}_per_rank{m}"] for k, m in
                   (("full_gather_bytes", ""), ("bytes_received", "_mean")))  # fmt: skip
    assert gather == pytest.approx(model_bytes * (7 / 64 + 7 / 8), rel=1e-3)
    assert own == pytest.approx(model_bytes * (1 / 8 - 1 / 64), rel=1e-3)
    # Nodes hold replicas of one stage: all that moves crosses nodes, but for the norms' like.
    assert found["cross_node_bytes"] == pytest.approx(found["bytes_received_total"], rel=1e-3)
    assert found["plan_seconds"] > 0 and len(found["engines"]) == 64


def test_an_order_with_fewer_bytes_is_proposed_and_keeps_its_word(model: Path, capsys) -> None:
    found = figures(capsys, "--model", str(model), "--train", "tp=4,pp=2", "--rollout", "tp=8")
    assert found["proposed_order"] == "pp-tp-dp"
    fewer = found["proposed_order_bytes_minimum_total"]
    assert found["bytes_minimum_in_nodes_total"] == fewer < found["bytes_minimum_total"]
    train = "tp=4,pp=2,order=pp-tp-dp"
    again = figures(capsys, "--model", str(model), "--train", train, "--rollout", "tp=8")
    assert again["bytes_received_total"] == fewer and again["proposed_order"] is None
    assert again["train"]["order"] == "pp-tp-dp"


def test_strided_engines_virtual_stages_and_float32(model: Path, capsys) -> None:
    words = ("--model", str(model), "--rollout", "tp=2")
    bf16 = figures(capsys, *words, "--train", "tp=4,pp=2,vpp=2")
    assert bf16["engines"][:2] == [[0, 2], [1, 3]] and bf16["ratio"] == 1.0
    fp32 = figures(capsys, *words, "--train", "tp=4,pp=2,vpp=2", "--dtype", "fp32", "--all-ranks")
    assert fp32["bytes_received_total"] == 2 * bf16["bytes_received_total"]
    assert (bf16["ranks_planned"], fp32["ranks_planned"]) == (1, 8)


def test_nothing_to_move(model: Path, capsys) -> None:
    found = figures(capsys, "--model", str(model), "--train", "tp=2,dp=4", "--rollout", "tp=2")
    assert found["bytes_received_total"] == 0 and found["ratio"] == 1.0


def test_text_and_picture(model: Path, tmp_path: Path, capsys) -> None:
    pytest.importorskip("matplotlib")
    words = ["--model", str(model), "--train", "tp=2,pp=2,dp=2", "--rollout", "tp=2"]
    picture = tmp_path / "traffic.png"
    assert tool(TOOLS["plan-reshard"]).main([*words, "--plot", str(picture)]) == 0
    text = capsys.readouterr().out
    assert "ratio 1.000" in text and "8 ranks: TP2 PP2 DP2" in text and str(picture) in text
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"--train": "tp=3"}, "--train: attention heads 8 is no multiple"),
        ({"--train": "tp=2,pp=3"}, "layers 8 are no multiple of pipeline parallel size 3"),
        ({"--train": "tp=two"}, "tp='two' must be a whole number"),
        ({"--train": "tp=2,ep=2"}, "'ep=2' is not one of tp, pp, dp, vpp, order"),
        ({"--train": "tp=2,tp=4"}, "each given once"),
        ({"--train": "tp=2,vpp=2"}, "vpp=2 needs pp above 1"),
        ({"--train": "tp=2,order=tp-dp"}, "must name tp, dp and pp"),
        ({"--rollout": "tp=8"}, "does not divide the 2 ranks"),
        ({"--rollout": "tp=0"}, "must be a whole number of 1 or more"),
        ({"--model": "nowhere"}, "nowhere: no such directory"),
        ({"--gpus-per-node": "0"}, "must be 1 or more"),
        ({"--bucket-mb": "nan"}, "must be above 0"),
        ({"--plot": "nowhere/a.png"}, "there is no such folder"),
        ({"--train": "dp=2048", "--plot": "a.png"}, "2048 ranks; at most 1024"),
    ],
)
def test_bad_input_is_one_message_and_exit_code_2(model: Path, capsys, changes, message) -> None:
    words = {"--model": str(model), "--train": "tp=2", "--rollout": "tp=2"} | changes
    assert tool("plan_reshard").main([part for pair in words.items() for part in pair]) == 2
    said = capsys.readouterr()
    assert message in said.err and said.err.count("error:") == 1 and said.out == ""


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 6), st.integers(0, 2**32 - 1))
def test_least_cost_against_all_permutations(size: int, seed: int) -> None:
    costs = np.random.default_rng(seed).integers(0, 20, (size, size))
    best = min(
        sum(costs[row, column] for row, column in enumerate(order))
        for order in itertools.permutations(range(size))
    )
    assert _least_cost(costs) == best


def test_the_bound_over_numberings_against_brute_force() -> None:
    """Six ranks with thirds or halves of ten rows, two nodes, shards of a half each."""

    def rows(start: int, stop: int) -> tuple[Placement, ...]:
        return (Placement("t", Box((start,), (stop,)), "p", (0,)),)

    held = [(0, 4), (4, 7), (7, 10), (0, 5), (5, 10), (0, 5), (3, 8), (6, 9)]
    source = {rank: rows(*bounds) for rank, bounds in enumerate(held)}
    shards = [rows(0, 5), rows(5, 10)]

    def away(rank: int, shard: int) -> int:
        own = set(range(*held[rank]))
        return len(set(range(5 * shard, 5 * shard + 5)) - own)

    def brute(ranks: list[int]) -> int:
        half = len(ranks) // 2
        return min(
            sum(away(rank, 0 if rank in first else 1) for rank in ranks)
            for first in itertools.combinations(ranks, half)
        )

    def found(node_of) -> int | None:
        return elements_minimum_over_numberings(
            source, shards=shards, ranks=range(8), node_of=node_of, away=Away()
        )

    assert found(lambda rank: 0) == brute(list(range(8)))
    assert found(lambda rank: rank // 4) == brute([0, 1, 2, 3]) + brute([4, 5, 6, 7])


def test_known_minima_with_replicas() -> None:
    """TP2 with four replicas to TP8: every rank can hold its shard already."""
    from test_plan import shards, training

    arch = small(num_attention_heads=8, num_key_value_heads=8, ffn_hidden_size=32, vocab_size=64)
    source = training(arch, tp=2, pp=1, dp=4)
    elements = elements_minimum_over_numberings(
        source, shards=shards(arch, 8), ranks=range(8), node_of=lambda rank: 0, away=Away()
    )
    assert elements == 0
