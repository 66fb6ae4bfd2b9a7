"""Everyday questions: some to learn from, others, on other topics, to see what was learned.

The forms were chosen by measuring the built-in model, SmolLM2-135M-Instruct, at temperature 0.7: about nine in ten
answers end by themselves within 160 tokens, so that few are cut off and lost to training. "What is X?",
"How does X work?" and "Give me a tip" were measured too and left out: between a quarter and two thirds of their answers
run on past that limit.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from importlib.resources import files


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """What a person asks, as it is typed."""

    text: str
    topic: str
    subject: str
    """What fills the gap in the form: 'coal' in 'What color is coal?'."""


@cache
def training_questions() -> tuple[Question, ...]:
    """Questions that simulated users ask while the model learns."""
    return _read("training")


@cache
def held_out_questions() -> tuple[Question, ...]:
    """Questions that are asked only to measure; no topic and no subject of theirs occurs in training."""
    return _read("held_out")


def _read(part: str) -> tuple[Question, ...]:
    """questions.json holds part -> topic -> form with one gap -> what fills it."""
    topics: dict[str, dict[str, list[str]]] = json.loads(
        files("nextstate.people").joinpath("questions.json").read_text(encoding="utf-8")
    )[part]
    return tuple(
        Question(text=form.format(subject), topic=topic, subject=subject)
        for topic, forms in topics.items()
        for form, subjects in forms.items()
        for subject in subjects
    )
