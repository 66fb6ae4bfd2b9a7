from __future__ import annotations

import itertools

import pytest

from nextstate.judge.hints import directive
from nextstate.people.personas import ASSISTANT_TEACHER, COMPLAINTS, PERSONAS, STUDENT, TEACHER, Persona
from nextstate.people.tasks import Task
from nextstate.people.wishes import HANDWRITTEN, THOROUGH, WARM, Fault, count_tokens

PLAIN = "Half of 48 is 24, so she sold 24 clips in May. Together that makes 48 + 24 = 72 clips."


@pytest.mark.parametrize(
    ("reply", "fault"),
    [
        (PLAIN, None),
        ("First we halve 48 and get 24.\n- Then we add 48 and 24.\n- That makes 72.", None),  # dashes are no numbers
        ("In 2024. she sold 48 clips, then 24, in all 72.", None),  # a year at a line's start, not a list's number
        ("So 48 ** 2 and 3 ** 2 are squares of 48 and 3.", None),  # a power, not bold
        ("**Step one:** half of 48 is 24, and 48 + 24 = 72.", Fault.BOLD),
        ("Half of 48 is 24, so the answer is <b>72</b>.", Fault.BOLD),
        ("1. Halve 48 to get 24.\n2. Add 48 and 24 to get 72.", Fault.NUMBERED_LIST),
        ("We do this:\n  1) halve 48 to get 24\n  2) add them to get 72", Fault.NUMBERED_LIST),
        ("Step 1: Halve 48 to get 24.\nStep 2: Add them to get 72.", Fault.NUMBERED_LIST),
        ("### Step 1.\nHalve 48 to get 24, and add to get 72.", Fault.NUMBERED_LIST),
        (r"Half of 48 is 24, so the answer is \boxed{72}.", Fault.BOXED),
        ("She sold 72 clips in all.", Fault.STEPS_MISSING),  # one number where 48 + 24 = 72 has three
        ("", Fault.NO_SENTENCE),
    ],
)
def test_the_student_wants_it_plain_and_with_its_steps(reply: str, fault: Fault | None):
    assert HANDWRITTEN.fault(reply) is fault


def test_what_the_student_minds_most_is_said_first():
    assert HANDWRITTEN.fault("1. **Halve** 48 to get 24.") is Fault.BOLD


def test_words_numbers_and_marks_are_tokens():
    assert count_tokens("Well done, Anna!") == 5  # Well, done, the comma, Anna, !
    assert count_tokens("48 + 24 = 72") == 5


def test_a_hundred_tokens_are_enough_for_the_assistant_teacher_and_ninety_nine_are_not():
    words = " ".join(f"word{number}" for number in range(98))
    assert THOROUGH.fault(words + ".") is Fault.TOO_SHORT  # 98 words and a full stop
    assert THOROUGH.met(words + " more.")


@pytest.mark.parametrize(
    ("reply", "met"),
    [
        ("Well done, Anna! Your steps are right.", True),
        ("Your solution is EXCELLENT work.", True),
        ("Good job on finding 72, Anna.", True),
        ("I am proud of you, Anna.", True),
        ("Your steps are right, and 72 is the answer.", False),
        ("It is a good idea to check the last step.", False),  # good, and no praise
        ("The job was done well enough to be counted.", False),
    ],
)
def test_the_teacher_wants_praise(reply: str, met: bool):
    assert WARM.met(reply) is met


@pytest.mark.parametrize("persona", PERSONAS.values(), ids=lambda persona: persona.name)
def test_what_a_persona_says_varies_and_never_thanks_and_complains_at_once(persona: Persona):
    for words in (COMPLAINTS, persona.directives, persona.thanks):
        assert len(set(words)) == len(words) >= 5
    assert not set(persona.thanks) & {*COMPLAINTS, *persona.directives}


@pytest.mark.parametrize("persona", PERSONAS.values(), ids=lambda persona: persona.name)
def test_what_reaches_the_teacher_as_a_hint_is_the_wish_and_not_the_complaint(persona: Persona):
    for complaint, wish in itertools.product(COMPLAINTS, persona.directives):
        assert directive(f"{complaint} {wish}") == wish


@pytest.mark.parametrize("persona", PERSONAS.values(), ids=lambda persona: persona.name)
def test_a_session_opens_with_the_task_and_without_the_wish(persona: Persona):
    task = Task(problem="How many clips?", steps="48 + 24 = 72", planted_error=False)
    opening = persona.open(task)
    assert "How many clips?" in opening
    assert ("48 + 24 = 72" in opening) is (persona is not STUDENT)
    for named in ("number", "bold", "box", "plain", "long", "detail", "praise", "warm", "friendly", "well done"):
        assert named not in opening.lower()


def test_there_are_three():
    assert list(PERSONAS) == ["student", "assistant-teacher", "teacher"]
    assert [STUDENT.wish, ASSISTANT_TEACHER.wish, TEACHER.wish] == [HANDWRITTEN, THOROUGH, WARM]
