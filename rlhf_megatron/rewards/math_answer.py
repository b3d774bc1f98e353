"""Is the response's answer the right one, as mathematics? A ready reward, through math-verify.

    reward.function=rlhf_megatron.rewards.math_answer:reward

Each prompt row needs a field `answer`: a number, an expression, or LaTeX (`1/2`, `\\frac{1}{2}`,
`$x^2+1$`). The last \\boxed{...} of the response counts, else its last formula or number. 1.0 where
both mean the same, 0.0 otherwise. Needs `pip install -e '.[math]'`.

SymPy can take for ever on what a policy writes. math-verify's own time limits are alarms in whole
seconds that do not nest, so they are off here, and `time_limit` takes their place: a comparison
beyond LIMIT_SECONDS is 0.0. A power tower is computed outside Python, where no alarm is heeded:
run with reward.workers and reward.timeout_seconds, which kill the process.
"""

import logging
import re
from typing import Any

from rlhf_megatron.rewards.time_limit import time_limit

LIMIT_SECONDS = 5.0
LONGEST_RESPONSE_CHARACTERS = 8000
"""Of a longer one the end is read: the answer is there."""
_BOX = "\\boxed{"
_DELIMITED = re.compile(r"\$|\\\(|\\\[|\\boxed")
_LONG_NUMBER = re.compile(r"\d{200,}")


def reward(*, prompt: str, response: str, answer: Any, **fields: object) -> float:
    """1.0 or 0.0. Raises ValueError where the row's `answer` cannot be read: the data's fault."""
    gold = _parse_answer(str(answer))
    end = response[-LONGEST_RESPONSE_CHARACTERS:]
    if _LONG_NUMBER.search(end):  # SymPy would factor it
        return 0.0
    try:
        with time_limit(LIMIT_SECONDS, name="the comparison's limit of"):
            return float(_means(gold, response=end))
    except TimeoutError:
        return 0.0


def _parse_answer(text: str) -> list[Any]:
    # Bare LaTeX would be read up to its first number.
    is_bare = not _DELIMITED.search(text) and any(sign in text for sign in "\\^_{")
    found = (_parse(f"${text}$") if is_bare else []) or _parse(text) or _parse(f"${text}$")
    if not found:
        raise ValueError(f"answer {text[:80]!r} is neither a number nor an expression")
    return found


def _means(gold: list[Any], *, response: str) -> bool:
    from math_verify import verify

    return bool(verify(gold, _parse(_last_box(response) or response), timeout_seconds=None))


def _last_box(text: str) -> str:
    """The last \\boxed{...} with its braces; "" where there is none, or it does not end. Of
    several, math-verify would take all."""
    at = text.rfind(_BOX)
    if at < 0:
        return ""
    depth = 0
    for place in range(at + len(_BOX) - 1, len(text)):
        depth += {"{": 1, "}": -1}.get(text[place], 0)
        if depth == 0:
            return text[at : place + 1]
    return ""


def _parse(text: str) -> list[Any]:
    from math_verify import parse

    # It warns on each first call that its time limits are off.
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    return list(parse(text, parsing_timeout=None))
