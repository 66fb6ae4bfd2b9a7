"""The page as people use it, in a real browser against a real server: by pointer, by keys, and by ear."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio
from browser import chromium_or_skip
from gated_engine import GatedEngine, eventually
from playwright.async_api import Browser, Page, expect
from scripted_engine import ScriptedEngine
from tests.conftest import RunningServer, ServerFactory
from tests.rows import a_verdict, finished_turn, judged_turn, new_turn

from nextstate.engines.local import LocalEngine
from nextstate.store import judging, learning, turns
from nextstate.store.keys import add_key
from nextstate.store.store import Store
from nextstate.store.turns import Placement
from nextstate.types import SkipReason, Vote

# One browser, and so one loop, for all of them: it takes longer to start than most of them take.
pytestmark = [pytest.mark.browser, pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]

EVIL = "<img src=x onerror=\"document.title='owned'\"><script>document.title='owned'</script>"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def browser() -> AsyncIterator[Browser]:
    async with chromium_or_skip() as running:
        yield running


@pytest_asyncio.fixture(loop_scope="module")
async def page(browser: Browser) -> AsyncIterator[Page]:
    """A page that fails the test when a script fails, the policy stops something, or anything is asked elsewhere."""
    opened = await browser.new_page(viewport={"width": 1200, "height": 800})
    wrong: list[str] = []
    opened.on("pageerror", lambda error: wrong.append(str(error)))
    opened.on("console", lambda said: wrong.append(said.text) if "Content Security" in said.text else None)
    opened.on("request", lambda sent: None if "//127.0.0.1:" in sent.url else wrong.append(sent.url))
    yield opened
    await opened.close()
    assert wrong == []


@pytest_asyncio.fixture(loop_scope="module")
async def talking(start_server: ServerFactory, engine: LocalEngine) -> AsyncIterator[RunningServer]:
    """A server whose model always says the same."""
    async with start_server(with_engine=ScriptedEngine(engine, "the quick brown fox")) as server:
        yield server


async def say(page: Page, text: str) -> None:
    await page.get_by_label("Message", exact=True).fill(text)
    await page.keyboard.press("Enter")


def turn(page: Page, n: int) -> Any:
    return page.locator("article").nth(n)


async def mine(server: RunningServer, n: int) -> list[Any]:
    """All turns, once there are so many and none is under way."""

    async def done() -> bool:
        rows = await server.turns()
        return len(rows) == n and all(row.state != "generating" for row in rows)

    await eventually(done)
    return await server.turns()


async def test_a_conversation_is_one_session_and_shows_live_what_happens_to_each_answer(
    page: Page, talking: RunningServer, store: Store
):
    await page.goto(talking.url)
    await say(page, "a fox?")
    await expect(turn(page, 0)).to_contain_text("the quick brown fox")
    await expect(turn(page, 0)).to_contain_text("waiting for what comes next")
    await say(page, "too long")
    await expect(turn(page, 0)).to_contain_text("waiting for the judge")
    first, second = await mine(talking, 2)
    assert (second.parent_turn_id, second.kind) == (first.turn_id, "continuation")
    assert first.session == second.session
    assert first.session.startswith("page-")

    store.write_now(judging.write_verdict, a_verdict(first.turn_id, Vote.BAD))
    await expect(turn(page, 0)).to_contain_text("judged bad (1 bad)")
    await expect(turn(page, 0)).to_contain_text("waiting for an update")
    update_id = store.write_now(learning.start_update, limit=8)
    store.write_now(learning.finish_update, update_id, artifact="versions/000001", metrics={})
    await expect(turn(page, 0)).to_contain_text("trained in version 1, which is being examined")
    store.write_now(learning.promote, 1, {})
    await expect(turn(page, 0)).to_contain_text("trained in version 1, which serves")
    await expect(page.locator("#serving")).to_contain_text("version 1")
    store.write_now(turns.leave_out, [second.turn_id], SkipReason.ABSTAINED, "Nobody could tell.")
    await expect(turn(page, 1)).to_contain_text("not trained: abstained")

    await turn(page, 1).locator("summary.outcome-line").click()
    await expect(turn(page, 1)).to_contain_text("Explicit feedback settles it.")
    await turn(page, 0).locator("summary.outcome-line").click()
    await expect(turn(page, 0)).to_contain_text("be brief, please")


async def test_thumbs_and_words_are_feedback_and_what_is_being_typed_is_not_lost(
    page: Page, talking: RunningServer, store: Store
):
    await page.goto(talking.url)
    await say(page, "a fox?")
    await turn(page, 0).get_by_label("Bad answer").click()
    await expect(turn(page, 0)).to_contain_text("waiting for the judge")
    await expect(turn(page, 0).get_by_label("Bad answer")).to_have_attribute("aria-pressed", "true")
    words = turn(page, 0).get_by_label("In words, what should be different")
    await expect(words).to_be_focused()
    await page.keyboard.type("Be")
    (row,) = await mine(talking, 1)
    store.write_now(judging.write_verdict, a_verdict(row.turn_id, Vote.BAD))
    await expect(turn(page, 0)).to_contain_text("judged bad")
    await page.keyboard.type(" brief.")
    await page.keyboard.press("Enter")
    await expect(page.locator("#announce")).to_contain_text("judged by this")
    (shown,) = (await talking.http.get(f"/api/turns/{row.turn_id}")).json()["verdicts"]
    assert shown["value"] == "bad"
    given = (await talking.http.get(f"/api/turns/{row.turn_id}")).json()["feedback"]
    assert given == [{"value": "bad", "words": ""}, {"value": "bad", "words": "Be brief."}]


async def test_an_answer_can_be_had_again_and_a_message_edited_and_all_of_them_stay(page: Page, talking: RunningServer):
    await page.goto(talking.url)
    await say(page, "a fox?")
    await turn(page, 0).get_by_label("Answer again").click()
    await expect(turn(page, 0)).to_contain_text("2 of 2")
    await turn(page, 0).locator(".bubble").hover()
    await turn(page, 0).get_by_label("Edit your message").click()
    await turn(page, 0).get_by_label("Your message").fill("a dog?")
    await turn(page, 0).get_by_role("button", name="Ask this instead").click()
    await expect(turn(page, 0)).to_contain_text("3 of 3")
    await expect(turn(page, 0)).to_contain_text("a dog?")
    await turn(page, 0).get_by_label("The one before").click()
    await expect(turn(page, 0)).to_contain_text("a fox?")
    rows = await mine(talking, 3)
    assert [row.messages[0]["content"] for row in rows] == ["a fox?", "a fox?", "a dog?"]
    assert rows[1].kind == "regeneration"
    assert len({row.session_id for row in rows}) == 1


@pytest.mark.parametrize("with_key", [True, False])
async def test_an_answer_is_stopped_and_says_so(
    page: Page, start_server: ServerFactory, engine: LocalEngine, with_key: bool
):
    halting = GatedEngine(ScriptedEngine(engine, "the quick brown fox"), tokens_before=3)
    async with start_server(with_engine=halting) as server:
        await page.goto(server.url)
        await say(page, "a fox?")
        await expect(page.locator(".coming")).to_contain_text("the")
        if with_key:
            await page.keyboard.press("Escape")
        else:
            await page.get_by_label("Stop the answer").click()
        await expect(turn(page, 0)).to_contain_text("not trained: aborted")
        await expect(page.get_by_label("Send", exact=True)).to_be_visible()
        (row,) = await mine(server, 1)
        assert row.reason == "aborted"


async def test_what_somebody_wrote_stays_text_wherever_it_is_shown(page: Page, talking: RunningServer, store: Store):
    message = {"role": "user", "content": EVIL}
    place = Placement(session_id=None, session_key=EVIL, parent_turn_id=None, kind="new", because=EVIL)
    new = new_turn(user="", messages=(message,), placement=place)
    answer = {"role": "assistant", "content": EVIL, "reasoning_content": EVIL}
    turn_id = judged_turn(store, new=new, said=EVIL, answer=answer)
    store.write_now(judging.add_feedback, turn_id, judging.Feedback(value=Vote.BAD, words=EVIL))
    store.write_now(judging.write_verdict, a_verdict(turn_id, Vote.BAD, hint=EVIL))
    store.write_now(turns.leave_out, [turn_id], SkipReason.NEUTRAL, EVIL)
    await page.goto(talking.url)
    await page.get_by_label("Search all sessions").fill("<img")
    await page.keyboard.press("Enter")
    await page.locator("#sessions button").first.click()
    await turn(page, 0).locator("summary.outcome-line").click()
    await expect(turn(page, 0).locator(".facts")).to_contain_text(EVIL)
    await turn(page, 0).get_by_label("Show the tokens").click()
    await page.get_by_role("button", name="Close").click()
    await page.get_by_role("tab", name="Learning").click()
    await page.locator(".row", has_text="neutral").click()
    await expect(page.locator(".example").first).to_contain_text(EVIL)
    assert await page.title() == "nextstate"
    assert await page.locator("main img, main script, #view-learning img").count() == 0


async def test_a_key_is_asked_for_and_shows_only_its_users_sessions(
    page: Page, start_server: ServerFactory, store: Store
):
    key = store.write_now(add_key, "laptop", "ann", learn=True)
    finished_turn(store, new=new_turn(user="ann", messages=({"role": "user", "content": "mine"},)))
    finished_turn(store, new=new_turn(user="bob", messages=({"role": "user", "content": "his"},)))
    async with start_server() as server:
        await page.goto(server.url)
        field = page.get_by_label("Key", exact=True)
        await field.fill("wrong")
        await page.keyboard.press("Enter")
        await expect(page.locator("#key-error")).to_contain_text("did not accept")
        await field.fill(key)
        await page.keyboard.press("Enter")
        await expect(page.locator("#sessions li")).to_have_count(1)
        await expect(page.locator("#sessions")).to_contain_text("mine")


async def test_what_is_said_with_the_switch_off_is_not_learned_from_and_the_session_remembers(
    page: Page, talking: RunningServer
):
    await page.goto(talking.url)
    switch = page.get_by_role("switch", name="Learn from this session")
    await switch.focus()
    await page.keyboard.press("Space")
    await say(page, "a fox?")
    await expect(turn(page, 0)).to_contain_text("not trained: learning off")
    assert (await mine(talking, 1))[0].learn is False
    await page.get_by_role("button", name="New session").click()
    await expect(switch).to_be_checked()
    await page.locator("#sessions button").first.click()
    await expect(switch).not_to_be_checked()


async def test_the_session_of_another_client_is_followed_and_not_gone_on_with(page: Page, talking: RunningServer):
    async def ask(*texts: str) -> None:
        messages: Any = [{"role": "assistant" if n % 2 else "user", "content": text} for n, text in enumerate(texts)]
        headers = {"X-Session-Id": "agent"}
        await talking.client.chat.completions.create(model="policy", messages=messages, extra_headers=headers)

    await ask("a fox?")
    await page.goto(talking.url)
    await page.locator("#sessions button").first.click()
    await expect(page.locator("article")).to_have_count(1)
    await expect(page.get_by_label("Message", exact=True)).to_be_disabled()
    await ask("a fox?", "the quick brown fox", "and a dog?")
    await expect(page.locator("article")).to_have_count(2)
    await expect(turn(page, 1)).to_contain_text("and a dog?")


async def test_the_learning_view_leads_from_a_reason_to_its_turn_and_to_its_tokens(
    page: Page, talking: RunningServer, store: Store
):
    await page.goto(talking.url)
    await say(page, "a fox?")
    (row,) = await mine(talking, 1)
    store.write_now(turns.leave_out, [row.turn_id], SkipReason.TRUNCATED, "The answer reached the token limit.")
    await page.get_by_role("tab", name="Chat").focus()
    await page.keyboard.press("ArrowRight")
    await expect(page.get_by_role("tab", name="Learning")).to_be_focused()
    await expect(page.locator(".chart")).to_contain_text("no good or bad verdict yet")
    await page.locator(".row", has_text="truncated").click()
    await expect(page.locator(".card", has_text="truncated").first).to_contain_text("Raise max_tokens")
    await page.locator(".example").first.click()
    await turn(page, 0).get_by_label("Show the tokens").click()
    dialog = page.get_by_role("dialog", name=f"Tokens of turn {row.turn_id}")
    await expect(dialog.locator(".tokens .token")).to_have_count(row.reply_tokens)
    await page.keyboard.press("Escape")
    await expect(dialog).not_to_be_visible()


async def test_everything_can_be_reached_and_named_without_a_pointer(page: Page, talking: RunningServer):
    await page.goto(talking.url)
    await say(page, "a fox?")
    await expect(page.locator("#announce")).to_have_text("The answer is complete.")
    nameless = []
    for button in await page.locator("button:visible, input:visible, textarea:visible, select:visible").all():
        name = await button.evaluate(
            "e => e.getAttribute('aria-label') || e.innerText || (e.labels && e.labels[0] && e.labels[0].innerText)"
        )
        if not (name or "").strip():
            nameless.append(await button.evaluate("e => e.outerHTML"))
    assert nameless == []
    seen = set()
    for _ in range(40):
        await page.keyboard.press("Tab")
        seen.add(await page.evaluate("document.activeElement.getAttribute('aria-label') || document.activeElement.id"))
    assert {
        "tab-chat",
        "new-session",
        "search-words",
        "Good answer",
        "Show the tokens",
        "composer-text",
        "learn",
    } <= seen


@pytest.mark.parametrize("width", [320, 390, 768, 1280])
async def test_nothing_is_wider_than_the_screen(browser: Browser, talking: RunningServer, width: int):
    page = await browser.new_page(viewport={"width": width, "height": 700})
    await page.goto(talking.url)
    await say(page, "a fox? " + "x" * 200)
    await expect(turn(page, 0)).to_contain_text("waiting for what comes next")
    await turn(page, 0).locator("summary.outcome-line").click()
    assert await page.evaluate(_TOO_WIDE) == []
    if width < 700:
        await expect(page.locator("#sessions")).not_to_be_visible()
        await page.get_by_role("button", name="Sessions").click()
        await expect(page.locator("#sessions button").first).to_be_visible()
        await asyncio.sleep(0.3)  # it slides in
        await page.locator("#sessions button").first.click()
        await expect(page.locator("#sessions")).not_to_be_visible()
    await page.get_by_role("tab", name="Learning").click()
    await expect(page.locator(".tile").first).to_be_visible()
    assert await page.evaluate(_TOO_WIDE) == []
    await page.close()


_TOO_WIDE = """
[...document.querySelectorAll("body *")]
  .filter((e) => e.checkVisibility({ visibilityProperty: true }) && e.getBoundingClientRect().right > innerWidth + 1)
  .filter((e) => !e.closest(".chart-card, .wide-table, .hidden, pre"))
  .map((e) => e.outerHTML.slice(0, 200))
"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
async def test_texts_stand_out_from_what_is_behind_them(browser: Browser, talking: RunningServer, scheme: Any):
    page = await browser.new_page(color_scheme=scheme)
    await page.goto(talking.url)
    await say(page, "a fox?")
    await expect(turn(page, 0)).to_contain_text("waiting for what comes next")
    for place in (
        ".bubble",
        ".answer",
        ".chip.waiting",
        ".outcome .version",
        ".tabs button",
        "#new-session",
        ".switch",
    ):
        colours = await page.locator(place).first.evaluate(_COLOURS)
        assert _contrast(*colours) >= 4.5, (place, colours)
    await page.close()


_COLOURS = """e => {
  const behind = (node) => {
    const colour = getComputedStyle(node).backgroundColor;
    return colour === "rgba(0, 0, 0, 0)" && node.parentElement ? behind(node.parentElement) : colour;
  };
  return [getComputedStyle(e).color, behind(e)];
}"""


def _contrast(front: str, behind: str) -> float:
    """WCAG's ratio of the relative luminances of two colours, 1 to 21; text needs 4.5."""

    def luminance(colour: str) -> float:
        parts = [int(part) / 255 for part in colour.removeprefix("rgb(").rstrip(")").split(",")]
        linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
        return sum(weight * part for weight, part in zip((0.2126, 0.7152, 0.0722), linear, strict=True))

    light, dark = sorted((luminance(front), luminance(behind)), reverse=True)
    return (light + 0.05) / (dark + 0.05)
