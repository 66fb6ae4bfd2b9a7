"""Requests about the conversation that clients put into the conversation: known by their text, or by what follows."""

from __future__ import annotations

import pytest

from nextstate.collect.clients import asks_like_a_machine, may_be_the_clients
from nextstate.store import judging, learning
from nextstate.store.store import Store
from nextstate.types import Feedback, FinishReason, Source, Vote
from tests.collect.talk import TOOLS, Talk, says, user
from tests.rows import a_verdict

OPENING = user("How do tides work in practice, with details?")
ANSWER = says("They follow the moon, with many details of interest.")
WRONG = user("That is wrong, try again.")
FOREIGN = user("Fasse unser Gespräch bitte in drei Worten zusammen.")
"""An instruction that no rule of ours takes for the client's at once."""


@pytest.fixture
def talk(store: Store) -> Talk:
    return Talk(store)


# -- by the text -------------------------------------------------------------------------------------------------------

OF_CLIENTS = [
    "Generate a concise 3-7 word title for this conversation, omitting punctuation. Go straight to the title.",
    "Generate a detailed summary of this conversation. Include:\n1. A brief overview\n2. Key facts discovered\n"
    "Format it in Markdown with headings and bullet points.",
    "Please generate a four to five word title summarizing our conversation without any lead-in or punctuation.",
    "Summarize the discussion briefly in 200 words or less to use as a prompt for future context.",
    "Based on the chat history, give this conversation a name.\nKeep it short - 10 characters max, no quotes.",
    "Based on the conversation so far, provide a concise description of this session in 4 words or less. "
    "This will be used for finding it later - reply *ONLY* with the description",
    "Please write a short title (max 6 words) for the above conversation. Reply with only the title.",
    "Generate a concise 3-5 word title for this conversation.",
    "Name this conversation in 2 to 4 words.",
    "Describe our chat so far in one sentence, without quotes.",
    "Provide a concise, 5-word-or-less title for the conversation above. Only return the title itself.",
    "Create tags for the above conversation. Return a JSON array of strings and nothing else.",
    "Suggest three follow-up questions for this chat, comma-separated.",
    "Write a recap of our discussion. Cover:\n- decisions\n- open questions\nUse the same language as the user.",
]
OF_PEOPLE = [
    "Can you summarize the conversation so far in one line for me?",
    "Summarize our discussion.",
    "Please summarize this conversation in 100 words.",
    "Give me a title for our chat, without quotes.",
    "Generate a title for it.",
    "Could you write a summary of our conversation, only the decisions, nothing else?",
    "Write a function that returns the names of all threads as a JSON array, nothing else.",
    "Reply with only the name of the session variable.",
    "I want a 3-5 word title for this conversation.",
    "Our conversation is going nowhere. Answer in 5 to 10 words, without any preamble.",
    "Describe how a chat server keeps its sessions, in markdown with bullet points.",
]


@pytest.mark.parametrize("text", OF_CLIENTS)
def test_an_instruction_for_a_machine_is_on_the_side_and_judges_nothing(talk: Talk, text: str):
    first = talk.ask([OPENING], "They follow the moon, with many details of interest.", tools=TOOLS)
    aside = talk.ask([OPENING, ANSWER, user(text)], "Tides", tools=TOOLS)
    assert (talk.row(aside).kind, talk.session(aside)) == ("side", talk.session(first))
    assert talk.row(first).next_state is None
    talk.ask([OPENING, ANSWER, WRONG], tools=TOOLS)
    assert talk.row(first).next_state == [WRONG]


@pytest.mark.parametrize("text", OF_PEOPLE)
def test_a_person_who_asks_about_the_conversation_is_the_conversation(talk: Talk, text: str):
    assert not asks_like_a_machine(text)
    first = talk.ask([OPENING], "They follow the moon, with many details of interest.")
    placed = talk.place([OPENING, ANSWER, user(text)])
    assert (placed.kind, placed.parent_turn_id, placed.next_state) == ("continuation", first, (user(text),))


def test_a_client_that_says_it_is_the_conversation_is_believed(talk: Talk):
    talk.ask([OPENING], ANSWER)
    placed = talk.place([OPENING, ANSWER, user(OF_CLIENTS[0])], headers={"x-turn-type": "main"})
    assert placed.kind == "continuation"


def test_orders_to_name_a_conversation_of_ours_are_on_the_side(talk: Talk):
    agent = {"role": "system", "content": "You help sailors."}
    orders = {"role": "system", "content": "Generate a short title for the conversation."}
    first = talk.ask([agent, OPENING], ANSWER)
    placed = talk.place([orders, OPENING, ANSWER])
    assert (placed.kind, placed.session_id, placed.next_state) == ("side", talk.session(first), ())
    assert talk.place([agent, OPENING, ANSWER, WRONG]).kind == "continuation"


# -- by what follows ---------------------------------------------------------------------------------------------------


def test_what_goes_on_without_an_instruction_takes_its_place(talk: Talk, store: Store):
    first = talk.ask([OPENING], ANSWER)
    aside = talk.ask([OPENING, ANSWER, FOREIGN], "Mond, Meer, Ebbe")
    assert talk.row(first).next_state == [FOREIGN]
    store.write_now(judging.write_verdict, a_verdict(first, Vote.GOOD))
    assert store.read_now(learning.waiting_samples)[0] == 1
    real = talk.ask([OPENING, ANSWER, WRONG], "Sorry.")
    assert (talk.row(real).kind, talk.row(real).parent_turn_id) == ("continuation", first)
    assert talk.row(first).next_state == [WRONG]
    # Judged afresh, by what was really said; what rested on the instruction is gone.
    assert (talk.row(first).state, store.read_now(learning.waiting_samples)[0]) == ("continued", 0)
    assert (talk.row(aside).kind, talk.row(aside).reason) == ("side", "side_request")
    events = store.read_now(lambda db: db.exec_driver_sql("SELECT kind, turn_id, data FROM events").fetchall())
    assert [(kind, turn) for kind, turn, _ in events] == [("next_state_replaced", first)]


def test_a_request_that_names_the_answer_takes_the_place_of_an_instruction_too(talk: Talk):
    first = talk.ask([OPENING], ANSWER)
    talk.ask([FOREIGN], "Mond, Meer, Ebbe", continues=first)
    real = talk.ask([WRONG], "Sorry.", continues=first)
    assert (talk.row(real).kind, talk.row(first).next_state) == ("continuation", [WRONG])
    assert talk.row(talk.ask([user("And in the Baltic?")], continues=first)).kind == "branch"


def test_a_client_that_shortens_its_history_takes_the_place_of_an_instruction_too(talk: Talk):
    talk.ask([user("Hi")], "Hello")
    second = talk.ask([user("Hi"), says("Hello"), OPENING], ANSWER)
    talk.ask([OPENING, ANSWER, FOREIGN], "Mond, Meer, Ebbe")
    assert talk.row(second).next_state == [FOREIGN]
    talk.ask([OPENING, ANSWER, WRONG], "Sorry.")
    assert talk.row(second).next_state == [WRONG]


def test_several_instructions_one_after_another_are_got_over(talk: Talk):
    first = talk.ask([OPENING], ANSWER)
    talk.ask([OPENING, ANSWER, FOREIGN], "Mond, Meer, Ebbe")
    talk.ask([OPENING, ANSWER, user("请总结一下")], "潮汐")
    talk.ask([OPENING, ANSWER, WRONG], "Sorry.")
    assert talk.row(first).next_state == [WRONG]


def test_an_instruction_that_is_still_being_answered_is_got_over(talk: Talk):
    first = talk.ask([OPENING], ANSWER)
    aside = talk.ask([OPENING, ANSWER, FOREIGN])
    talk.ask([OPENING, ANSWER, WRONG], "Sorry.")
    talk.finish(aside, [OPENING, ANSWER, FOREIGN], "Mond, Meer, Ebbe")
    assert talk.row(first).next_state == [WRONG]
    assert (talk.row(aside).state, talk.row(aside).reason) == ("left_out", "side_request")


@pytest.mark.parametrize("how", ["aborted", "failed"])
def test_words_whose_answer_never_came_give_way_to_those_that_replaced_them(talk: Talk, how: str):
    first = talk.ask([OPENING], ANSWER)
    asked = [OPENING, ANSWER, user("And in the Baltic?")]
    if how == "aborted":
        stopped = talk.ask(asked, "In the Bal", finish=FinishReason.ABORTED)
    else:
        stopped = talk.ask(asked)
        talk.fail(stopped)
    talk.ask([OPENING, ANSWER, WRONG], "Sorry.")
    assert talk.row(first).next_state == [WRONG]
    assert talk.row(stopped).kind == "continuation"


def test_an_edited_message_does_not_take_the_place_of_the_first(talk: Talk):
    first = talk.ask([OPENING], ANSWER)
    talk.ask([OPENING, ANSWER, WRONG], "Sorry.")
    edit = talk.ask([OPENING, ANSWER, user("And in the Baltic?")], "Hardly any.")
    assert talk.row(edit).kind == "branch"
    assert talk.row(first).next_state == [WRONG]


def test_a_summary_that_the_conversation_went_on_from_keeps_its_place(talk: Talk):
    first = talk.ask([OPENING], ANSWER)
    talk.ask([OPENING, ANSWER, FOREIGN], "Mond, Meer, Ebbe")
    talk.ask([OPENING, ANSWER, FOREIGN, says("Mond, Meer, Ebbe"), user("Danke")])
    assert talk.row(talk.ask([OPENING, ANSWER, WRONG])).kind == "branch"
    assert talk.row(first).next_state == [FOREIGN]


def test_an_instruction_takes_nobodys_place(talk: Talk):
    first = talk.ask([OPENING], ANSWER)
    talk.ask([OPENING, ANSWER, user("And in the Baltic?")], "In", finish=FinishReason.ABORTED)
    assert talk.place([OPENING, ANSWER, FOREIGN]).kind == "branch"
    assert talk.row(first).next_state == [user("And in the Baltic?")]


def test_what_is_in_an_update_keeps_its_next_state(talk: Talk, store: Store):
    first = talk.ask([OPENING], ANSWER)
    talk.ask([OPENING, ANSWER, FOREIGN], "Mond, Meer, Ebbe")
    store.write_now(judging.write_verdict, a_verdict(first, Vote.GOOD))
    store.write_now(learning.start_update, limit=8)
    real = talk.ask([OPENING, ANSWER, WRONG], "Sorry.")
    assert (talk.row(real).kind, talk.row(first).state) == ("branch", "training")
    assert talk.row(first).next_state == [FOREIGN]


def test_a_verdict_by_feedback_stays(talk: Talk, store: Store):
    first = talk.ask([OPENING], ANSWER)
    talk.ask([OPENING, ANSWER, FOREIGN], "Mond, Meer, Ebbe")
    store.write_now(judging.add_feedback, first, Feedback(value=Vote.GOOD))
    store.write_now(judging.write_verdict, a_verdict(first, Vote.GOOD))
    talk.ask([OPENING, ANSWER, WRONG], "Sorry.")
    assert (talk.row(first).state, store.read_now(learning.waiting_samples)[0]) == ("judged", 1)


def test_a_judge_that_read_what_was_replaced_comes_too_late(talk: Talk, store: Store):
    first = talk.ask([OPENING], ANSWER)
    talk.ask([OPENING, ANSWER, FOREIGN], "Mond, Meer, Ebbe")
    (old,) = store.write_now(judging.claim_unjudged, limit=5, lease_s=60)
    talk.ask([OPENING, ANSWER, WRONG], "Sorry.")
    (new,) = store.write_now(judging.claim_unjudged, limit=5, lease_s=60)
    assert not store.write_now(judging.write_verdict, a_verdict(first, Vote.GOOD), old.lease_until)
    assert store.write_now(judging.write_verdict, a_verdict(first, Vote.BAD), new.lease_until)
    assert new.next_state == (WRONG,)
    assert [verdict.value for verdict in store.read_now(judging.list_verdicts, first)] == [Vote.BAD]


@pytest.mark.parametrize(
    "text",
    [
        *OF_CLIENTS,
        FOREIGN["content"],
        "Donne un titre court à cette conversation.",
        "为这段对话生成一个标题",
        "Summarize.",
    ],
)
def test_what_may_be_an_instruction(text: str):
    assert may_be_the_clients(text)


@pytest.mark.parametrize("text", ["That is wrong.", "Write a function that names the files.", "And the next topic?"])
def test_what_is_none(text: str):
    assert not may_be_the_clients(text)


def test_a_placement_says_what_it_replaces(talk: Talk):
    talk.ask([OPENING], ANSWER)
    talk.ask([OPENING, ANSWER, FOREIGN], "Mond, Meer, Ebbe")
    placed = talk.place([OPENING, ANSWER, WRONG])
    assert (placed.source, placed.instead_of) == (Source.USER, 2)
