"""Arithmetic word problems for the personas, made by the grade-school generator of `reasoning-gym`.

It is an extra, `pip install 'nextstate[people]'`, and nothing else here needs it.
"""

from __future__ import annotations

import random
import re
from dataclasses import dataclass

from nextstate.errors import ConfigError

MAX_CHARS = 360
"""Of problem and steps together, so that small models can hold them and prompts are short: about half of all."""

_GENERATOR = "gsm_symbolic"
# What the generator puts behind each question; it is about how its own scorer reads an answer.
_FOR_THE_SCORER = " Give the result as your final answer. Do not include units."
_RESULT = re.compile(r"=\s*[$€£]?(\d+)(?!.*=\s*[$€£]?\d)", re.DOTALL)
"""The number behind the last equals sign."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """A word problem, and a student's way to its answer."""

    problem: str
    steps: str
    """One line for each step of the solution as a student wrote it down."""
    planted_error: bool
    """Whether the last result in `steps` was made wrong on purpose."""


def make_tasks(count: int, *, seed: int, error_share: float = 0.0) -> tuple[Task, ...]:
    """Different tasks; the same count, seed and share give the same.

    Args:
        error_share: of the tasks, about this share has a planted error: a student made a mistake in the last step.

    Raises:
        ConfigError: `reasoning-gym` is not installed.
    """
    try:
        import reasoning_gym
    except ImportError as error:
        raise ConfigError(
            f"the word problems come from reasoning-gym, which cannot be imported ({error}). Nothing was started. "
            "Install it: pip install 'nextstate[people]'."
        ) from error
    chance = random.Random(seed)
    found: dict[str, Task] = {}
    # Of an endless row: the generator makes entries one by one, and some come twice or are too long.
    for entry in reasoning_gym.create_dataset(_GENERATOR, seed=seed, size=20 * count):
        problem = entry["question"].removesuffix(_FOR_THE_SCORER)
        steps = entry["metadata"]["answer_cot"].split("\n####")[0].strip()
        if len(problem) + len(steps) > MAX_CHARS or problem in found:
            continue
        wrong = with_error(steps, chance) if chance.random() < error_share else None
        found[problem] = Task(problem=problem, steps=wrong or steps, planted_error=wrong is not None)
        if len(found) == count:
            break
    return tuple(found.values())


def with_error(steps: str, chance: random.Random) -> str | None:
    """`steps` with another number after the last equals sign; None where no whole number stands there."""
    result = _RESULT.search(steps)
    if result is None:
        return None
    wrong = int(result[1]) + chance.choice((1, 2, 10))
    return f"{steps[: result.start(1)]}{wrong}{steps[result.end(1) :]}"
