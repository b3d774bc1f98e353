"""Reward of the arithmetic task: is the number right?

The last number of the response counts, so that `17 + 25 = 42` is right as well as `42`.

reward: right 1.0; wrong, but nothing else than a number, as was asked, 0.1; anything else 0.0.
correct: right 1.0, else 0.0, so that its mean over held-out questions is the accuracy.
"""

import re
from decimal import Decimal

# 42, -7, 1,234 or 3.5; a minus straight after a digit is taken as subtraction, not as a sign.
NUMBER = re.compile(r"(?:(?<!\d)-)?\d+(?:,\d{3})*(?:\.\d+)?")
LONE_NUMBER_REWARD = 0.1


def correct(*, response: str, answer: str, **fields: object) -> float:
    numbers = NUMBER.findall(response)
    return float(bool(numbers) and Decimal(numbers[-1].replace(",", "")) == Decimal(answer))


def reward(*, response: str, answer: str, **fields: object) -> float:
    if correct(response=response, answer=answer):
        return 1.0
    lone = NUMBER.fullmatch(response.strip().rstrip(".")) is not None
    return LONE_NUMBER_REWARD if lone else 0.0
