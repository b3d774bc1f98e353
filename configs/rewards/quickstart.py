"""Reward of the quickstart: the share of letters that are right.

`nilok>` asks for `NILOK`. Letters are compared place by place and divided by the longer of the two
texts, so a response that ends too early or runs on loses as much as one with wrong letters: `NILOK`
1.0, `NIlok` 0.4, `NILO` 0.8, `NILOKK` 0.83, `` 0.0.
"""


def reward(*, prompt: str, response: str, answer: str, **fields: object) -> float:
    right = sum(given == wanted for given, wanted in zip(response, answer, strict=False))
    return right / max(len(response), len(answer))
