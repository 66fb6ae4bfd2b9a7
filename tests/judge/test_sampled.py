import asyncio
import json

import httpx
import pytest

from nextstate.judge.errors import JudgeUnavailable
from nextstate.judge.sampled import Opinion, SampledJudge, parse_opinion
from nextstate.types import Source, Vote

from .rows import a_turn, tool, user

BAD_ANSWER = "The user wants less text.\nHINT: Answer in one short sentence.\nVERDICT: bad"


def a_judge(*answers, **settings):
    """A judge whose model gives these answers in turn, and the list of requests that it gets."""
    requests = []

    async def handle(request: httpx.Request) -> httpx.Response:
        answer = answers[len(requests) % len(answers)]
        requests.append(request)
        if isinstance(answer, Exception):
            raise answer
        if isinstance(answer, httpx.Response):
            return answer
        return httpx.Response(200, json={"choices": [{"message": {"role": "assistant", "content": answer}}]})

    judge = SampledJudge(
        base_url="http://user:hunter2@judge.test/v1/",
        model="big",
        api_key="sk-secret",
        transport=httpx.MockTransport(handle),
        **settings,
    )
    return judge, requests


@pytest.mark.parametrize(
    ("text", "opinion"),
    [
        (BAD_ANSWER, Opinion(vote=Vote.BAD, hint="Answer in one short sentence.")),
        ("HINT: none\nVERDICT: good", Opinion(vote=Vote.GOOD, hint="")),
        ("**Hint:** none\n**Verdict: Neutral**\n\n", Opinion(vote=Vote.NEUTRAL, hint="")),
        ("VERDICT: bad", Opinion(vote=Vote.BAD, hint="")),
        ("HINT: ten letter\nVERDICT: bad", Opinion(vote=Vote.BAD, hint="")),  # 10 characters are not more than 10
        ("VERDICT: good\nBut then again, who knows.", None),
        ("VERDICT: good or bad", None),
        ("VERDICT: 1", None),
        ("The text says 'VERDICT: good'", None),
        ("", None),
    ],
)
def test_only_the_fixed_form_at_the_end_is_read(text, opinion):
    assert parse_opinion(text) == opinion


async def test_three_votes_make_a_verdict_with_the_hints_of_those_who_won():
    judge, requests = a_judge(BAD_ANSWER, "HINT: Make it much longer.\nVERDICT: good", BAD_ANSWER)
    async with judge:
        verdict = await judge.verdict(a_turn(user("too long")))
    assert verdict.value is Vote.BAD
    assert sorted(verdict.votes) == [Vote.BAD, Vote.BAD, Vote.GOOD]
    assert verdict.probabilities == pytest.approx({"good": 1 / 3, "neutral": 0.0, "bad": 2 / 3})
    assert [(hint.text, hint.source) for hint in verdict.hints] == [("Answer in one short sentence.", Source.USER)]
    sent = json.loads(requests[0].content)
    assert (sent["model"], sent["temperature"]) == ("big", 0.6)
    assert str(requests[0].url.copy_with(userinfo=b"")) == "http://judge.test/v1/chat/completions"


async def test_an_answer_that_cannot_be_read_is_an_abstention_and_is_counted():
    judge, _ = a_judge("I like it.", BAD_ANSWER, httpx.Response(200, json={"choices": []}))
    verdict = await judge.verdict(a_turn(user("too long")))
    assert verdict.value is Vote.BAD  # one vote, two abstentions
    assert verdict.votes.count(None) == 2
    assert judge.counts == {"unparsable": 2, "votes": 1}
    assert "2 abstained" in verdict.reason


async def test_when_no_answer_can_be_read_there_is_no_verdict_and_not_a_neutral_one():
    judge, _ = a_judge("score: 1")
    verdict = await judge.verdict(a_turn(user("too long")))
    assert (verdict.value, verdict.votes, verdict.probabilities) == (None, (None, None, None), None)


@pytest.mark.parametrize(
    "answer",
    [
        httpx.ConnectError("refused"),
        httpx.ReadTimeout("slow"),
        httpx.Response(500),
        httpx.Response(503, text="sk-secret"),
        httpx.Response(429),
        httpx.Response(401),
        httpx.Response(200, text="<html>"),
    ],
)
async def test_a_judge_that_cannot_be_asked_leaves_the_turn_waiting_and_tells_no_secret(answer):
    judge, _ = a_judge(answer)
    with pytest.raises(JudgeUnavailable) as raised:
        await judge.verdict(a_turn(user("too long")))
    assert "waits" in str(raised.value)
    assert "secret" not in str(raised.value)
    assert "hunter2" not in str(raised.value)


async def test_one_failed_request_of_three_is_enough_to_wait():
    judge, _ = a_judge(BAD_ANSWER, httpx.Response(502), BAD_ANSWER)
    with pytest.raises(JudgeUnavailable, match="502"):
        await judge.verdict(a_turn(user("too long")))


async def test_the_deadline_holds_for_a_server_that_trickles():
    async def trickle(request):
        await asyncio.sleep(30)

    judge = SampledJudge(
        base_url="http://judge.test", model="big", deadline_s=0.05, transport=httpx.MockTransport(trickle)
    )
    with pytest.raises(JudgeUnavailable, match=r"within 0\.05 s"):
        await judge.verdict(a_turn(user("too long")))


async def test_no_more_requests_are_under_way_than_allowed():
    under_way, most = 0, 0

    async def handle(request):
        nonlocal under_way, most
        under_way += 1
        most = max(most, under_way)
        await asyncio.sleep(0.01)
        under_way -= 1
        return httpx.Response(200, json={"choices": [{"message": {"content": "VERDICT: good"}}]})

    judge = SampledJudge(
        base_url="http://judge.test", model="big", max_concurrency=2, transport=httpx.MockTransport(handle)
    )
    await asyncio.gather(*(judge.verdict(a_turn(user("thanks"))) for _ in range(3)))
    assert most == 2


async def test_text_of_a_tool_is_judged_only_where_the_configuration_says_so_and_never_gives_a_hint():
    judge, requests = a_judge(BAD_ANSWER)
    verdict = await judge.verdict(a_turn(tool("unknown entity 'lamp_kitchn'")))
    assert (verdict.value, requests) == (None, [])
    judge, _ = a_judge(BAD_ANSWER, judge_tool_text=True)
    verdict = await judge.verdict(a_turn(tool("unknown entity 'lamp_kitchn'")))
    assert (verdict.value, verdict.hints) == (Vote.BAD, ())
