from nextstate.judge.judge import EvidenceFirst, Judge
from nextstate.judge.sampled import SampledJudge
from nextstate.judge.scored import ScoredJudge
from nextstate.types import Feedback, Hint, Source, TurnToJudge, Verdict, Vote

from .rows import a_turn, tool, user


class FixedJudge:
    """Always of the same opinion, with a hint of its own."""

    name = "fixed"

    def __init__(self, value: Vote | None):
        self.value = value
        self.asked = 0

    async def verdict(self, turn: TurnToJudge) -> Verdict:
        self.asked += 1
        hints = (Hint(text="Say it in one sentence.", source=Source.USER),)
        return Verdict(
            turn_id=turn.turn_id, judge=self.name, value=self.value, votes=(self.value,), reason="", hints=hints
        )


def either(sampled: SampledJudge, scored: ScoredJudge, composed: EvidenceFirst) -> list[Judge]:
    """For the type checker: all three are judges."""
    return [sampled, scored, composed]


async def test_evidence_decides_and_the_inner_judge_is_not_asked():
    inner = FixedJudge(Vote.GOOD)
    verdict = await EvidenceFirst(inner).verdict(a_turn(tool("exit code: 2")))
    assert (verdict.value, verdict.judge, inner.asked) == (Vote.BAD, "evidence", 0)


async def test_without_evidence_the_inner_judge_decides_under_its_own_name():
    verdict = await EvidenceFirst(FixedJudge(Vote.GOOD)).verdict(a_turn(user("Perfect, thanks!")))
    assert (verdict.value, verdict.judge, verdict.votes) == (Vote.GOOD, "fixed", (Vote.GOOD,))


async def test_a_bad_verdict_carries_the_users_words_before_the_judges():
    verdict = await EvidenceFirst(FixedJudge(Vote.BAD)).verdict(a_turn(user("Way too long, make it short.")))
    assert [hint.text for hint in verdict.hints] == ["Way too long, make it short.", "Say it in one sentence."]


async def test_other_verdicts_carry_no_hint():
    for value in (Vote.GOOD, Vote.NEUTRAL, None):
        verdict = await EvidenceFirst(FixedJudge(value)).verdict(a_turn(user("Way too long, make it short.")))
        assert (verdict.value, verdict.hints) == (value, ())


async def test_bad_feedback_with_words_gives_a_hint_from_feedback():
    feedback = Feedback(value=Vote.BAD, words="One short sentence, please.")
    verdict = await EvidenceFirst(FixedJudge(None)).verdict(a_turn(feedback=feedback))
    assert verdict.hints == (Hint(text="One short sentence, please.", source=Source.FEEDBACK),)
