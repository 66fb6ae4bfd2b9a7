"""Loop 3: hard evidence, votes, verdicts and hints."""

from nextstate.judge.errors import JudgeUnavailable

__all__ = ["JudgeUnavailable"]
