"""Reward of the arithmetic task: is the number right?

The last number of the response counts, so that `17 + 25 = 42` is right as well as `42`. Right: 1.0.
Wrong, but nothing else than a number, as was asked: 0.1. Anything else: 0.0.
"""

import re
from decimal import Decimal

# 42, -7, 1,234 or 3.5; a minus straight after a digit is taken as subtraction, not as a sign.
NUMBER = re.compile(r"(?:(?<!\d)-)?\d+(?:,\d{3})*(?:\.\d+)?")
LONE_NUMBER_REWARD = 0.1


def reward(*, prompt: str, response: str, answer: str, **fields: object) -> float:
    numbers = NUMBER.findall(response)
    if not numbers:
        return 0.0
    if Decimal(numbers[-1].replace(",", "")) == Decimal(answer):
        return 1.0
    lone = NUMBER.fullmatch(response.strip().rstrip(".")) is not None
    return LONE_NUMBER_REWARD if lone else 0.0
