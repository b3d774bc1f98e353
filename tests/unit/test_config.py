"""The configuration: loading, overrides, unknown keys, and every rule with its message."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest
from bad_configs import BAD, GOOD
from hypothesis import given
from hypothesis import strategies as st
from model_numbers import Numbers

from rlhf_megatron.algorithms.partition import pack_for_ranks
from rlhf_megatron.config import Config, load_config, resolved_yaml
from rlhf_megatron.distributed.config import ParallelConfig
from rlhf_megatron.errors import ConfigError, UserError
from rlhf_megatron.loader import nearest, options_of, sections_of
from rlhf_megatron.resolve import describe_batch, num_micro_batches, parallel_layout
from rlhf_megatron.validation import load_and_validate, validate, validate_paths
from rlhf_megatron.validation_model import (
    broken_tensor_rules,
    broken_training_rules,
    validate_model,
)


def write(folder: Path, text: str, *, name: str = "config.yaml") -> str:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return str(path)


def problems_of(path: str, *overrides: str, world_size: int = 4) -> list[str]:
    """The problems of a configuration, [] if it is sound; files are not looked for."""
    try:
        load_and_validate([path], overrides=overrides, world_size=world_size, check_paths=False)
    except ConfigError as error:
        return error.problems
    return []


@pytest.fixture
def good(tmp_path: Path) -> str:
    return write(tmp_path, GOOD)


def test_the_good_configuration_is_good(good: str) -> None:
    assert problems_of(good) == []
    assert len(BAD) >= 40


@pytest.mark.parametrize(("overrides", "parts"), BAD, ids=lambda value: value[0])
def test_bad_configuration(good: str, overrides: list[str], parts: list[str]) -> None:
    problems = problems_of(good, *overrides)
    assert len(problems) == 1, problems
    assert problems[0].startswith(parts[0]) or parts[0] in problems[0].split(": ")[0]
    for part in parts:
        assert part in problems[0], problems[0]


def test_five_faults_are_reported_at_once(tmp_path: Path) -> None:
    text = GOOD + "rollout:\n  temprature: 1\n  top_p: 0.9\nppo: {epochs: 0, gamma: much}\n"
    path = write(tmp_path, text)
    problems = problems_of(path, "actor.parallel.tensor_model_parallel_size=3")
    assert len(problems) == 5
    message = str(ConfigError(problems))
    assert message.startswith("configuration: 5 problems\n")
    for part in ("temprature", "top_p=0.9", "epochs=0", "gamma=much", "parallel_size=3"):
        assert part in message


def test_a_misspelt_required_key_is_one_problem(tmp_path: Path) -> None:
    path = write(tmp_path, GOOD.replace("prompts:", "promts:"))
    assert len(problems_of(path)) == 1
    assert "data.promts: unknown key; did you mean data.prompts?" in problems_of(path)[0]


def test_load_config_raises_all_problems_of_the_files(tmp_path: Path) -> None:
    path = write(tmp_path, "run:\n  stesp: 1\nppo:\n  gamma: 2\n")
    with pytest.raises(ConfigError) as caught:
        load_config([path], overrides=["nonsense"])
    assert len(caught.value.problems) == 3
    assert "run.stesp: unknown key; did you mean run.steps?" in str(caught.value)
    assert f"({path} line 2)" in str(caught.value)
    assert f"({path} line 4)" in str(caught.value)


def test_files_merge_in_order_and_overrides_win(tmp_path: Path) -> None:
    first = write(tmp_path, GOOD + "ppo: {epochs: 2, gamma: 0.9}\n", name="a.yaml")
    second = write(tmp_path, "ppo: {epochs: 3}\nrun:\n", name="b.yaml")
    config = load_config([first, second], overrides=["ppo.gamma=0.5", "run.steps=7"])
    assert (config.ppo.epochs, config.ppo.gamma, config.run.steps) == (3, 0.5, 7)
    assert config.run.output_dir == "runs/x"
    assert config.critic.optimizer.learning_rate == 5e-6


def test_an_override_mends_a_bad_value(tmp_path: Path) -> None:
    path = write(tmp_path, GOOD + "ppo: {epochs: many}\n")
    assert len(problems_of(path)) == 1
    assert problems_of(path, "ppo.epochs=2") == []


def test_scientific_notation_is_a_number(tmp_path: Path) -> None:
    text = "actor: {optimizer: {learning_rate: 1e-6, epsilon: 1E-10}}\nppo: {gamma: 5e-1}\n"
    config = load_config([write(tmp_path, text)], overrides=["critic.optimizer.learning_rate=2e-5"])
    assert config.actor.optimizer.learning_rate == 1e-6
    assert config.actor.optimizer.epsilon == 1e-10
    assert config.ppo.gamma == 0.5
    assert config.critic.optimizer.learning_rate == 2e-5
    assert isinstance(config.actor.optimizer.learning_rate, float)


def test_off_yes_and_leading_zeros_stay_text(tmp_path: Path) -> None:
    text = "ppo: {kl: {place: off}}\ndata: {add_bos: yes}\nrun: {name: 007, overwrite: on}\n"
    config = load_config([write(tmp_path, text)], overrides=["logging.wandb.mode=off"])
    assert config.ppo.kl.place == "off"
    assert config.data.add_bos == "yes"
    assert config.run.name == "007"
    assert config.run.overwrite is True
    assert config.logging.wandb.mode == "off"


def test_text_overrides_are_taken_as_they_are() -> None:
    config = load_config(
        [],
        overrides=[
            "rollout.engines=0,2;1,3",
            "run.name=a: b # c",
            "data.prompts='quoted.jsonl'",
            "actor.parallel.ranks=0",
            "actor.model=dir=x",
            "run.output_dir=1e-3",
        ],
    )
    assert config.rollout.engines == "0,2;1,3"
    assert config.run.name == "a: b # c"
    assert config.data.prompts == "quoted.jsonl"
    assert config.actor.parallel.ranks == "0"
    assert config.actor.model == "dir=x"
    assert config.run.output_dir == "1e-3"


def test_lists_and_engine_arguments(tmp_path: Path) -> None:
    text = "rollout: {stop_token_ids: [3, 4], engine_args: {block_size: 16, extra: {a: 1}}}\n"
    path = write(tmp_path, text)
    config = load_config([path], overrides=["rollout.engine_args.extra.b=[1, x]"])
    assert config.rollout.stop_token_ids == [3, 4]
    assert config.rollout.engine_args == {"block_size": 16, "extra": {"a": 1, "b": [1, "x"]}}
    assert load_config([], overrides=["rollout.engine_args={a: 2}"]).rollout.engine_args == {"a": 2}
    assert Config().rollout.engine_args == {}


def test_environment_and_references(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLHF_TEST_STEPS", "12")
    text = "run: {steps: '${oc.env:RLHF_TEST_STEPS}', name: x, output_dir: 'runs/${run.name}'}\n"
    path = write(tmp_path, text)
    config = load_config([path], overrides=["critic.model=${oc.env:RLHF_TEST_NONE,fallback}"])
    assert config.run.steps == 12
    assert config.run.output_dir == "runs/x"
    assert config.critic.model == "fallback"
    monkeypatch.setenv("RLHF_TEST_STEPS", "twelve")
    assert "run.steps=${oc.env:RLHF_TEST_STEPS}" in problems_of(path)[0]
    monkeypatch.setenv("RLHF_TEST_STEPS", "-2")
    assert any("run.steps=-2: must be at least 0" in p for p in problems_of(path))


def test_broken_files(tmp_path: Path) -> None:
    missing = str(tmp_path / "none.yaml")
    assert "none.yaml: no such file; give the path" in problems_of(missing)[0]
    assert "cannot be read" in problems_of(str(tmp_path))[0]
    broken = write(tmp_path, "run:\n  steps: 1\n  name: [a\nppo: {}\n", name="broken.yaml")
    assert "broken.yaml line 4" in problems_of(broken)[0]
    assert "not valid YAML" in problems_of(broken)[0]
    tabbed = write(tmp_path, "run:\n\tsteps: 1\n", name="tab.yaml")
    assert "tab.yaml line 2" in problems_of(tabbed)[0]
    listed = write(tmp_path, "- run\n", name="list.yaml")
    assert "must hold keys and values" in problems_of(listed)[0]
    control = write(tmp_path, "run: {name: \x01}\n", name="control.yaml")
    assert "not valid YAML" in problems_of(control)[0]
    (tmp_path / "latin.yaml").write_bytes(b"run: {name: \xff}")
    assert "UTF-8" in problems_of(str(tmp_path / "latin.yaml"))[0]
    cyclic = write(tmp_path, "run: &a {name: *a}\n", name="cyclic.yaml")
    assert "contains itself" in problems_of(cyclic)[0]
    assert load_config([write(tmp_path, "", name="empty.yaml")], overrides=[]) == Config()


def test_an_unread_file_is_the_only_news_but_for_other_settings(tmp_path: Path) -> None:
    problems = problems_of(str(tmp_path / "none.yaml"), "ppo.gamma=2")
    assert [p.split(":")[0] for p in problems][1:] == ["ppo.gamma=2.0"]


def test_a_key_given_twice(tmp_path: Path) -> None:
    path = write(tmp_path, GOOD + "ppo:\n  epochs: 1\n  epochs: 2\n")
    assert any("ppo.epochs: given twice" in p and "line 8" in p for p in problems_of(path))


def test_anchors_and_merge_keys(tmp_path: Path) -> None:
    text = "actor: {parallel: &p {tensor_model_parallel_size: 2}}\ncritic: {parallel: {<<: *p}}\n"
    config = load_config([write(tmp_path, text)], overrides=[])
    assert config.critic.parallel.tensor_model_parallel_size == 2


def test_nearest_prefers_the_ending() -> None:
    candidates = [*options_of(Config), *sections_of(Config)]
    assert nearest("warmup_steps", candidates=candidates).endswith(".optimizer.warmup_steps")
    assert nearest("actor.lr", candidates=candidates).startswith("actor")
    assert "actor.parallel" in sections_of(Config)
    assert "ppo.kl.place" in options_of(Config)


def test_resolved_yaml_loads_to_the_same(good: str, tmp_path: Path) -> None:
    overrides = [
        "ppo.kl.place=off",
        "rollout.engines=0,2;1,3",
        "actor.optimizer.learning_rate=1e-7",
    ]
    overrides += ["rollout.stop_tokens=['\\n', 'no']", "run.name=1e-3", "data.add_bos=no"]
    config = load_config([good], overrides=overrides)
    again = load_config([write(tmp_path, resolved_yaml(config), name="r.yaml")], overrides=[])
    assert again == config


def test_no_reference_no_rules_for_it(good: str) -> None:
    off = ["ppo.kl.place=off", "ref.precision=fp32", "ref.parallel.tensor_model_parallel_size=3"]
    assert problems_of(good, *off) == []
    assert len(problems_of(good, *off[1:])) == 2


def test_layouts_that_fit(good: str) -> None:
    fits = [
        "actor.parallel.tensor_model_parallel_size=2",
        "actor.parallel.pipeline_model_parallel_size=2",
        "actor.parallel.sequence_parallel=true",
        "actor.parallel.grid_order=pp-tp-dp",
        "actor.parallel.ranks=0-3",
        "critic.parallel.data_parallel_size=4",
        "rollout.tensor_parallel_size=2",
        "rollout.engines=0,2;1,3",
    ]
    assert problems_of(good, *fits) == []
    assert problems_of(good, *fits[:3], "rollout.ranks=1-3", world_size=8) == []


def test_paths(tmp_path: Path, good: str) -> None:
    config = load_config([good], overrides=[])
    for key, path in (("critic", "c"), ("ref", "r")):
        getattr(config, key).model = str(tmp_path / path)
    config.data.tokenizer = str(tmp_path / "t")
    config.data.prompts = str(tmp_path / "p.jsonl")
    config.evaluation.prompts = str(tmp_path / "e.jsonl")
    config.warmup.demonstrations = str(tmp_path / "d.jsonl")
    config.reward.function = f"{tmp_path}/score.py:score"
    (tmp_path / "c").mkdir()
    problems = validate_paths(config)
    starts = [p.split("=")[0] for p in problems]
    assert starts == [
        "actor.model",
        "critic.model",
        "ref.model",
        "data.prompts",
        "evaluation.prompts",
        "warmup.demonstrations",
        "data.tokenizer",
        "reward.function",
    ]
    assert "holds no config.json" in problems[1]
    for name in ("p.jsonl", "e.jsonl", "d.jsonl", "t", "score.py", "c/config.json"):
        (tmp_path / name).write_text("")
    config.actor.model = config.ref.model = str(tmp_path / "c")
    assert validate_paths(config) == []


def test_an_output_folder_with_a_run_is_refused(tmp_path: Path) -> None:
    config = Config()
    config.run.output_dir = str(tmp_path)
    assert validate_paths(config) == []
    (tmp_path / "metrics.jsonl").write_text("{}\n")
    assert "already holds a run; give another folder" in validate_paths(config)[0]
    assert validate_paths(config, check_output=False) == []
    config.run.overwrite = True
    assert validate_paths(config) == []
    config.run.output_dir = str(tmp_path / "metrics.jsonl")
    assert "is a file; give a folder" in validate_paths(config)[0]


def model_problems(*overrides: str, **models: Numbers) -> list[str]:
    config = load_config([], overrides=["actor.model=DIR", "critic.model=CRITIC", *overrides])
    return validate_model(config, **{"actor": Numbers(), **models})


@pytest.mark.parametrize(
    ("overrides", "models", "parts"),
    [
        (
            ["actor.parallel.tensor_model_parallel_size=3"],
            {},
            [
                "actor.parallel.tensor_model_parallel_size=3: must divide the 8 attention heads",
                "DIR",
            ],
        ),
        (
            ["critic.parallel.tensor_model_parallel_size=16"],
            {},
            ["critic.parallel.tensor_model_parallel_size=16: ", "CRITIC; take 1, 2, 4 or 8"],
        ),
        (
            ["actor.parallel.tensor_model_parallel_size=8"],
            {"actor": Numbers(ffn_hidden_size=100), "critic": Numbers(), "ref": Numbers()},
            ["actor.parallel.", "=8: must divide the feed-forward width 100", "take 1, 2 or 4"],
        ),
        (
            ["ref.parallel.tensor_model_parallel_size=2"],
            {"ref": Numbers(num_key_value_heads=3, num_attention_heads=12, hidden_size=96)},
            [
                "ref.parallel.tensor_model_parallel_size=2",
                "3 key-value heads",
                "take 1, 3, 6 or 12",
            ],
        ),
        (
            ["rollout.tensor_parallel_size=5"],
            {},
            ["rollout.tensor_parallel_size=5: must divide the 8 attention heads", "1, 2, 4 or 8"],
        ),
        (
            ["critic.parallel.pipeline_model_parallel_size=3"],
            {},
            ["critic.parallel.pipeline_model_parallel_size=3", "4 layers of CRITIC", "1, 2 or 4"],
        ),
        (
            [
                "critic.parallel.pipeline_model_parallel_size=2",
                "critic.parallel.virtual_pipeline_model_parallel_size=3",
            ],
            {},
            [
                "critic.parallel.virtual_pipeline_model_parallel_size=3",
                "must divide the 2 layers of a stage of CRITIC",
                "1 or 2",
            ],
        ),
        (
            [
                "actor.parallel.pipeline_model_parallel_size=2",
                "actor.recompute.granularity=full",
                "actor.recompute.num_layers=3",
            ],
            {},
            ["actor.recompute.num_layers=3: a stage has 2 layers", "at most 2, or 0 for all"],
        ),
        (
            ["rollout.max_response_tokens=1025"],
            {},
            ["rollout.max_response_tokens=1025", "context of 2048 tokens", "at most 1024"],
        ),
        (
            ["rollout.max_prompt_tokens=2048", "rollout.max_response_tokens=1"],
            {"critic": Numbers(max_position_embeddings=4096)},
            ["rollout.max_response_tokens=1", "actor's model", "max_prompt_tokens below 2048"],
        ),
        (
            ["evaluation.max_response_tokens=1500"],
            {"critic": Numbers(max_position_embeddings=2500)},
            ["evaluation.max_response_tokens=1500", "context of 2048", "at most 1024"],
        ),
        ([], {"critic": Numbers(vocab_size=99)}, ["critic.model=CRITIC", "99", "actor's of 100"]),
        (
            ["rollout.stop_token_ids=[3, 100]"],
            {},
            ["rollout.stop_token_ids=[3, 100]: 100", "vocabulary of 100 tokens", "below 100"],
        ),
    ],
)
def test_model_rules(overrides: list[str], models: dict[str, Numbers], parts: list[str]) -> None:
    problems = model_problems(*overrides, **models)
    assert problems, overrides
    for part in parts:
        assert any(part in p for p in problems), problems


def test_models_that_fit() -> None:
    assert model_problems() == []
    size = "tensor_model_parallel_size"
    assert model_problems(f"actor.parallel.{size}=8", f"critic.parallel.{size}=1") == []
    # One key-value head is replicated on any tensor-parallel size.
    one = Numbers(num_key_value_heads=1)
    assert [n for n in range(1, 9) if not broken_tensor_rules(n, model=one)] == [1, 2, 4, 8]
    # 8 + 2 heads of 6 rows: Megatron-Core cuts 60 rows into 4 shards, not into 8.
    rows = Numbers(num_key_value_heads=1, head_dim=6)
    assert [n for n in range(1, 9) if not broken_training_rules(n, model=rows)] == [1, 2, 4]
    # The reference's vocabulary does not matter where there is no reference.
    assert model_problems("ppo.kl.place=off", ref=Numbers(vocab_size=5)) == []
    assert len(model_problems(ref=Numbers(vocab_size=5))) == 1


def test_parallel_layout_resolves_data_parallel() -> None:
    layout = parallel_layout(
        ParallelConfig(tensor_model_parallel_size=2, grid_order="pp-tp-dp"), world_size=8
    )
    assert (layout.data_parallel_size, layout.order) == (4, ("pp", "tp", "dp"))
    assert layout.ranks == tuple(range(8))
    assert parallel_layout(ParallelConfig(ranks="2-3"), world_size=8).ranks == (2, 3)
    with pytest.raises(UserError, match="must give the 8 ranks"):
        parallel_layout(ParallelConfig(tensor_model_parallel_size=3), world_size=8)
    with pytest.raises(UserError, match="ascending"):
        parallel_layout(ParallelConfig(ranks="3,2"), world_size=8)


def test_describe_batch() -> None:
    overrides = ["rollout.responses_per_prompt=4", "ppo.mini_batch_samples=128", "ppo.epochs=2"]
    overrides += ["actor.parallel.tensor_model_parallel_size=2", "rollout.tensor_parallel_size=2"]
    text = describe_batch(load_config([], overrides=overrides), world_size=4)
    assert "64 prompts x 4 responses = 256 samples per step" in text
    assert "2 mini-batches of 128 samples x 2 epochs = 4 optimizer steps" in text
    assert "2 engines of TP2, about 32 prompts per engine" in text
    assert "actor: TP2 x PP1 x DP2, about 64 samples per replica and mini-batch" in text
    assert "critic: TP1 x PP1 x DP4, about 32 samples" in text
    # 64 samples of 1024 tokens, 16 in 16384; of 2048 tokens, 8 in 16384.
    words = "in about 4 packed micro-batches of at most 16384 tokens (8 if every sample is of full"
    assert words in text
    limited = load_config([], overrides=[*overrides, "ppo.micro_batch_samples=5"])
    words = "in about 13 packed micro-batches of at most 16384 tokens and 5 samples (13 if every"
    assert words in describe_batch(limited, world_size=4)


@given(
    samples=st.integers(1, 300),
    replicas=st.integers(1, 9),
    sample_tokens=st.integers(1, 40),
    micro_batch_tokens=st.integers(1, 100),
    limit=st.integers(0, 5),
)
def test_the_number_of_micro_batches_is_the_packers(
    samples: int, replicas: int, sample_tokens: int, micro_batch_tokens: int, limit: int
) -> None:
    config = Config()
    config.ppo.mini_batch_samples = samples
    config.ppo.micro_batch_tokens, config.ppo.micro_batch_samples = micro_batch_tokens, limit
    shares = [samples // replicas + (i < samples % replicas) for i in range(replicas)]
    packed = pack_for_ranks(
        [[sample_tokens] * share for share in shares],
        micro_batch_tokens=micro_batch_tokens,
        micro_batch_samples=limit,
    )
    found = num_micro_batches(config, replicas=replicas, sample_tokens=sample_tokens)
    assert {found} == {len(packs) for packs in packed}


def test_validate_takes_a_plain_config() -> None:
    starts = {p.split("=")[0] for p in validate(Config(), world_size=1)}
    assert starts == {"run.output_dir", "actor.model", "data.prompts", "reward.function"}


def test_every_option_is_documented_where_it_is_declared() -> None:
    """Each declared field is followed by a docstring."""
    room = Path(__file__).parents[2] / "rlhf_megatron"
    for path in [room / "config.py", *room.glob("*/config.py")]:
        for node in ast.parse(path.read_text()).body:
            if not isinstance(node, ast.ClassDef) or node.name == "Config":
                continue
            body = node.body[1:]
            for declared, described in zip(body[::2], body[1::2], strict=True):
                assert isinstance(declared, ast.AnnAssign), (path, node.name)
                assert isinstance(described, ast.Expr), (path, ast.unparse(declared))


def test_errors_come_before_anything_slow_is_imported() -> None:
    code = (
        "import sys, rlhf_megatron.validation, rlhf_megatron.validation_model, "
        "rlhf_megatron.resolve; "
        "print(sorted({'torch', 'megatron', 'vllm', 'transformers', 'numpy'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_a_dry_run_imports_neither_torch_nor_engines() -> None:
    """They take seconds, many on a busy machine."""
    code = (
        "import sys, rlhf_megatron.main, rlhf_megatron.dry_run; "
        "print(sorted({'torch', 'megatron', 'vllm', 'transformers'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
