"""What can keep a judge from judging."""

from __future__ import annotations

from nextstate.errors import NextstateError


class JudgeUnavailable(NextstateError):
    """Nobody could be asked. The turn waits and is judged later; this is neither a neutral vote nor an abstention."""
