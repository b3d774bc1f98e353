"""Large-scale PPO for language models: Megatron-Core training, vLLM rollout, one SPMD program."""

__version__ = "0.1.0"
