"""The memory planner: what every role and the rollout engine need on each GPU, phase by phase.

Integers only, from a configuration and a world size: no torch, no processes, no GPU. docs/memory.md
says how to read its table and where its formulas come from.
"""
