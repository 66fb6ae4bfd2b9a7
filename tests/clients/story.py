"""What the user says in every test of an agent, and what the policy says to it."""

from __future__ import annotations

from tests.clients.scripted import ENDLESS

GREETING = "Hello, who are you?"
TASK = "Write notes.txt with two lines, please."
CORRECTION = "No, that is wrong. I wanted three lines, the last one gamma."
THANKS = "Thank you, that is right."
TALE = "Tell me a very long tale."
CHANGE = "Never mind the tale. Say goodbye."

TWO_LINES, THREE_LINES = "alpha\nbeta\n", "alpha\nbeta\ngamma\n"

DONE, REDONE = "Done, notes.txt has two lines.", "Sorry. Now notes.txt has three lines."


def script(two_lines: str, three_lines: str) -> dict[str, list[str]]:
    """The policy's answers.

    Args:
        two_lines: the client's own tool called to write notes.txt with two lines.
        three_lines: the same with three.
    """
    return {
        GREETING: ["I am the policy, at your service."],
        TASK: [two_lines, DONE],
        CORRECTION: [three_lines, REDONE],
        THANKS: ["I am glad to hear that."],
        TALE: [ENDLESS],
        CHANGE: ["Goodbye, and good luck."],
    }


def too_long(characters: int = 100_000) -> str:
    """A message that together with an agent's own prompt is more than the policy can read: each digit is a token."""
    return ("Add these up:" + "\n39485736" * (characters // 9))[:characters]
