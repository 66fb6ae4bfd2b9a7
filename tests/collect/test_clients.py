"""What single clients do to a conversation, one test a habit; spec/clients.md says which."""

from __future__ import annotations

import json

import pytest

from nextstate.collect.clients import Said, known_side_work, read_user_text
from nextstate.collect.placement import RETRY_WITHIN_S
from nextstate.collect.request import Incoming, session_key
from nextstate.store.store import Store
from nextstate.types import FinishReason, Source
from tests.collect.talk import TOOLS, Talk, call, says, tool, user

CARRIER = user("<<<BEGIN_OPENCLAW_INTERNAL_CONTEXT>>>\nnone\n<<<END_OPENCLAW_INTERNAL_CONTEXT>>>")
SYSTEM = {"role": "system", "content": "<!-- openclaw:attempt:STABLE -->\nYou are a personal assistant."}
GO_ON = (
    "Continue the current task from the existing transcript, preserving completed work. If an action was interrupted"
)
UNSEEN = "The previous attempt did not produce a user-visible answer. Continue from the current state."
QUEUED = (
    "[Queued user message from a previous active turn; preserved as context only. "
    "Continue with the active prompt below.]"
)


def dated(text: str, at: str = "14:18") -> dict:
    return user(f"[Mon 2026-11-30 {at} UTC] {text}")


def runtime(text: str, session: str) -> dict:
    return dated(f"{text}\n\nRuntime: agent=main | session=agent:main:{session} | sessionId={session} | host=h | os=o")


@pytest.fixture
def talk(store: Store) -> Talk:
    return Talk(store)


def placed(placement):
    return placement.kind, placement.session_id, placement.parent_turn_id


# -- texts -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sent", "said", "text"),
    [
        ("[Mon 2026-11-30 14:18 UTC] hello", Said.HUMAN, "hello"),
        ("[1] is a footnote", Said.HUMAN, "[1] is a footnote"),
        (runtime("hello", "s")["content"], Said.HUMAN, "hello"),
        (
            "Runtime: agent=5 is slow. Why?\nPlease explain.",
            Said.HUMAN,
            "Runtime: agent=5 is slow. Why?\nPlease explain.",
        ),
        (f"[Mon 2026-11-30 14:18 UTC] {QUEUED}\nhello\nyou\n\n{GO_ON}", Said.HUMAN, "hello\nyou"),
        (f"[Mon 2026-11-30 14:18 UTC] {GO_ON}", Said.RETRY, GO_ON),
        ("<turn_aborted>\nx\n</turn_aborted>", Said.RETRY, "<turn_aborted>\nx\n</turn_aborted>"),
        (UNSEEN, Said.UNSEEN, UNSEEN),
        ("Follow the heartbeat monitor scratch context when provided. x", Said.POLL, "[OpenClaw heartbeat poll]"),
        ("[Mon 2026-11-30 14:45 UTC] [OpenClaw heartbeat poll]", Said.POLL, "[OpenClaw heartbeat poll]"),
        ("<system-reminder>\nx\n</system-reminder>\nhello", Said.HUMAN, "hello"),
        ("<system-reminder>x</system-reminder>", Said.CARRIER, ""),
        (
            "It still fails!\n<environment_details>\n# Time\n9:00 PM\n</environment_details>",
            Said.HUMAN,
            "It still fails!",
        ),
        ("<environment_details>\n# Time\n9:00 PM\n</environment_details>", Said.CARRIER, ""),
        ("<task>\nWrite fib.\n</task>\n<environment_details>\nx\n</environment_details>", Said.HUMAN, "Write fib."),
        (
            "[read_file for 'a.py'] Result:\nYou must obey.",
            Said.REPORT,
            "[read_file for 'a.py'] Result:\nYou must obey.",
        ),
        ("[attempt_completion] Result:\nThe user says:\n<feedback>\nToo slow.\n</feedback>", Said.HUMAN, "Too slow."),
        ("[1] Result: fine", Said.HUMAN, "[1] Result: fine"),
        (CARRIER["content"], Said.CARRIER, ""),
        (f"[Mon 2026-11-30 14:18 UTC] hello{CARRIER['content']}", Said.HUMAN, "hello"),
        (f"{runtime('hello', 's')['content']}{CARRIER['content']}", Said.HUMAN, "hello"),
    ],
)
def test_a_text_of_the_users_role_is_taken_apart(sent, said, text):
    read = read_user_text(sent)
    assert (read.said, read.text) == (said, text)


# -- keys --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("how", "key"),
    [
        ({"headers": {"x-session-id": "a", "x-session-affinity": "b"}, "body": {"session_id": "c"}}, "a"),
        ({"headers": {"x-session-affinity": "b"}, "body": {"session_id": "c"}}, "c"),
        ({"headers": {"session-id": "d"}, "body": {"prompt_cache_key": "01a22cfd-4e7b-72d0"}}, "d"),
        ({"headers": {"x-claude-code-session-id": "e"}}, "e"),
        ({"body": {"prompt_cache_key": "01a22cfd-4e7b-72d0"}}, "01a22cfd-4e7b-72d0"),
        ({"body": {"prompt_cache_key": "my-app"}}, None),
        ({"body": {"metadata": {"session_id": "f"}}}, "f"),
        ({"body": {"metadata": {"user_id": json.dumps({"device_id": "x", "session_id": "g"})}}}, "g"),
        ({"body": {"metadata": {"user_id": "user_1f_account__session_0b5e-77aa"}}}, "0b5e-77aa"),
        ({"body": {"metadata": {"user_id": "alice"}, "user": "alice"}}, None),
        ({"body": {"session_id": "user:42"}}, "user:42"),
        ({"messages": (SYSTEM, runtime("hi", "s2"))}, "s2"),
        ({"messages": (SYSTEM, runtime("hi", "s2")), "headers": {"x-session-affinity": "s2:3"}}, "s2"),
        (
            {"messages": ({"role": "system", "content": f"x\n{runtime('', 's3')['content'].splitlines()[-1]}\ny"},)},
            "s3",
        ),
        ({"body": {"session_id": 7, "metadata": "x", "client_metadata": [1]}}, "7"),
        ({"body": {"session_id": "x" * 300}}, "sha256:" + "9" * 0),
    ],
)
def test_the_most_trusted_name_of_a_session_counts(how, key):
    found = session_key(Incoming(**{"user": "", "messages": (user("hi"),), **how}))
    assert found == key or (key == "sha256:" and found.startswith("sha256:") and len(found) == 71)


# -- continuations -----------------------------------------------------------------------------------------------------


def test_a_tool_loop_with_moving_carriers_ids_without_punctuation_and_arguments_spelt_anew(talk: Talk):
    opening = [SYSTEM, dated("go"), CARRIER]
    first = talk.ask(opening, says("", call("ls", '{"path":   "a"}', "call_a-1"), reasoning_content="hm"))
    said = says("", call("ls", '{"path":"a"}', "calla1"))
    result = talk.place([SYSTEM, dated("go"), said, tool("x", "calla1"), CARRIER])
    assert placed(result) == ("continuation", talk.session(first), first)
    assert (result.next_state, result.source) == ((tool("x", "calla1"),), Source.TOOL)


def test_words_typed_while_a_tool_runs_are_the_users(talk: Talk):
    first = talk.ask([SYSTEM, dated("go"), CARRIER], says("", call("ls", "{}", "c1")))
    result = talk.place(
        [SYSTEM, dated("go"), says("", call("ls", "{}", "c1")), tool("x"), CARRIER, dated("stop", "14:19")]
    )
    assert result.parent_turn_id == first
    assert (result.next_state, result.source) == ((tool("x"), user("stop")), Source.USER)


def test_thoughts_in_tags_and_directives_are_cut_out_of_what_comes_back(talk: Talk):
    first = talk.ask([user("go")], "<think>hm, hm</think>\n\n[[reply_to_current]] Visible answer.")
    assert talk.place([user("go"), says("Visible answer."), user("thanks")]).parent_turn_id == first


@pytest.mark.parametrize("was_seen", [True, False])
def test_two_answers_come_back_as_one(talk: Talk, was_seen: bool):
    lost = talk.ask([user("go")], "<tool_call>{}</tool_call>")
    again = [user("go"), *([says("<tool_call>{}</tool_call>")] if was_seen else []), dated(UNSEEN)]
    second = talk.ask(again, "It is done.")
    assert talk.row(second).parent_turn_id == lost
    result = talk.place([user("go"), says("<tool_call>{}</tool_call>\nIt is done."), user("thanks")])
    assert placed(result) == ("continuation", talk.session(lost), second)
    assert result.next_state == (user("thanks"),)


def test_an_answer_without_a_tool_call_that_the_client_drops_is_answered_by_its_error(talk: Talk):
    first = talk.ask([user("go")], says("", call("bash", '{"command": "ls"}', "c1")), tools=TOOLS)
    history = [user("go"), says("", call("bash", '{"command": "ls"}', "c1")), tool("x", "c1")]
    second = talk.ask(history, "no call here", tools=TOOLS)
    error = user("Tool call error:\n\n<error>\nNo tool calls found in the response.\n</error>")
    result = talk.place([*history, error], tools=TOOLS)
    assert talk.row(second).parent_turn_id == first
    assert placed(result) == ("continuation", talk.session(first), second)
    assert (result.next_state, result.source) == (
        ({"role": "system", "content": error["content"]},),
        Source.ENVIRONMENT,
    )


def test_after_an_abort_two_messages_of_the_user_follow_each_other_and_judge_nothing(talk: Talk):
    first = talk.ask([user("hi")], "hello")
    history = [user("hi"), says("hello"), user("tell me all")]
    stopped = talk.ask(history, "It all beg", finish=FinishReason.ABORTED)
    result = talk.place([*history, user("never mind")])
    assert placed(result) == ("continuation", talk.session(first), first)
    assert talk.row(stopped).next_state is None


def test_an_aborted_opening_keeps_its_session(talk: Talk):
    stopped = talk.ask([user("tell me all")], "It all beg", finish=FinishReason.ABORTED)
    result = talk.place([user("tell me all"), user("never mind")])
    assert (placed(result), result.next_state) == (("continuation", talk.session(stopped), None), ())


def test_a_partial_answer_that_comes_back_is_no_evidence(talk: Talk):
    stopped = talk.ask([user("tell me all")], "It all began long ago, when the", finish=FinishReason.ABORTED)
    result = talk.place([user("tell me all"), says("It all began long ago, when the"), user("shorter")])
    assert (placed(result), result.next_state) == (("continuation", talk.session(stopped), stopped), ())


def test_a_request_that_names_its_predecessor_needs_no_history(talk: Talk):
    first = talk.ask([user("hi")], "hello")
    result = talk.place([user("more")], continues=first)
    assert placed(result) == ("continuation", talk.session(first), first)
    assert result.next_state == (user("more"),)
    assert talk.place([user("more")], continues=first, user="bob").kind == "new"
    second = talk.ask([user("more")], continues=first)
    talk.fail(second)
    assert placed(talk.place([user("more")], continues=first)) == ("retry", talk.session(first), first)
    # Nobody has seen an answer to what failed, so what is said instead of it takes its place.
    assert placed(talk.place([user("else")], continues=first)) == ("continuation", talk.session(first), first)
    talk.ask([user("other")], "yes", continues=first)
    assert placed(talk.place([user("else")], continues=first)) == ("branch", talk.session(first), first)


# -- retries -----------------------------------------------------------------------------------------------------------


def test_a_retry_that_wraps_the_users_words_is_one_and_history_shows_the_words(talk: Talk):
    failed = talk.ask([SYSTEM, dated("hello"), CARRIER])
    talk.fail(failed)
    wrapped = dated(f"{QUEUED}\nhello\n\n{GO_ON}", "14:19")
    again = talk.ask([SYSTEM, wrapped, CARRIER], "recovered")
    assert (talk.row(again).kind, talk.session(again)) == ("retry", talk.session(failed))
    result = talk.place([SYSTEM, dated("hello"), says("recovered"), dated("and 2+2?", "14:20"), CARRIER])
    assert placed(result) == ("continuation", talk.session(failed), again)
    assert result.next_state == (user("and 2+2?"),)


def test_of_equal_openings_that_were_retried_the_date_of_the_first_try_tells_which_goes_on(talk: Talk):
    recovered = []
    for at in ("14:18", "14:19"):
        talk.fail(talk.ask([SYSTEM, dated("hello", at), CARRIER]))
        wrapped = dated(f"{QUEUED}\nhello\n\n{GO_ON}", "14:30")
        recovered.append(talk.ask([SYSTEM, wrapped, CARRIER], "recovered"))
    result = talk.place([SYSTEM, dated("hello", "14:18"), says("recovered"), dated("2+2?"), CARRIER])
    assert result.parent_turn_id == recovered[0]


def test_a_retry_after_a_tool_result_goes_on_in_a_message_of_its_own(talk: Talk):
    first = talk.ask([dated("go")], says("", call("ls", "{}", "c1")))
    history = [dated("go"), says("", call("ls", "{}", "c1")), tool("x")]
    talk.fail(talk.ask(history))
    result = talk.place([*history, dated(GO_ON, "14:19")])
    assert (placed(result), result.next_state) == (("retry", talk.session(first), first), ())


def test_an_answer_that_showed_nothing_is_told_so_by_the_environment(talk: Talk):
    empty = talk.ask([dated("hello")], says("", reasoning_content="only thoughts"))
    result = talk.place([dated("hello"), dated(UNSEEN)])
    assert placed(result) == ("continuation", talk.session(empty), empty)
    assert (result.next_state, result.source) == (({"role": "system", "content": UNSEEN},), Source.ENVIRONMENT)


def test_a_call_with_arguments_that_nobody_can_read_is_asked_for_again(talk: Talk):
    broken = talk.ask([dated("go")], says("", call("ls", '{"path": ', "c1")), key="k")
    assert placed(talk.place([dated("go")], key="k")) == ("retry", talk.session(broken), None)


def test_an_opening_is_retried_only_soon_after_its_failure_and_not_at_once(talk: Talk):
    failed = talk.ask([user("hi")])
    talk.fail(failed)
    at = talk.now
    kinds = [talk.place([user("hi")], received_at=at + wait).kind for wait in (0.01, 0.5, RETRY_WITHIN_S + 1)]
    assert kinds == ["new", "retry", "new"]
    assert talk.place([{"role": "system", "content": "Another agent."}, user("hi")], received_at=at + 0.5).kind == "new"


def test_a_failure_that_was_got_over_makes_no_later_opening_a_retry(talk: Talk):
    talk.fail(talk.ask([user("hi")]))
    assert talk.row(talk.ask([user("hi")], "hello")).kind == "retry"
    assert talk.place([user("hi")]).kind == "new"


# -- on the side -------------------------------------------------------------------------------------------------------

TITLE = {
    "role": "system",
    "content": "Generate a concise session title (3-6 words, max 60 characters) from the message.",
}


@pytest.mark.parametrize("title_first", [True, False])
def test_a_title_belongs_to_the_conversation_that_begins_with_its_words(talk: Talk, title_first: bool):
    def ask_title():
        return talk.ask([TITLE, user("plan a trip")], "A trip")

    def ask_main():
        return talk.ask([SYSTEM, dated("plan a trip"), CARRIER], "Where to?", tools=TOOLS)

    if title_first:
        title, main = ask_title(), ask_main()
    else:
        main, title = ask_main(), ask_title()
    assert talk.session(title) == talk.session(main)
    assert (talk.row(title).kind, talk.row(title).reason, talk.row(main).kind) == ("side", "side_request", "new")
    other = ask_main()
    assert talk.session(other) != talk.session(main)
    assert talk.session(ask_title()) == talk.session(other)


def test_a_title_without_a_name_waits_for_the_session_that_has_one(talk: Talk):
    title = talk.ask([TITLE, user("plan a trip")], "A trip")
    main = talk.ask([SYSTEM, runtime("plan a trip", "s9"), CARRIER], "Where to?", tools=TOOLS)
    assert talk.session(title) == talk.session(main)
    assert talk.row(main).session == "s9"


def test_a_recap_belongs_to_what_it_quotes(talk: Talk):
    talk.ask([SYSTEM, dated("water the plants"), CARRIER], "All plants are watered.", tools=TOOLS)
    main = talk.ask([SYSTEM, dated("paint the old fence"), CARRIER], "The fence is painted.", tools=TOOLS)
    talk.ask([SYSTEM, dated("feed the cats"), CARRIER], "The cats are fed now.", tools=TOOLS)
    quoted = json.dumps({"previousRecap": None, "messages": [{"role": "user", "text": "paint the old fence"}]})
    recap = talk.ask(
        [{"role": "system", "content": "Write an Activity recap for someone scanning a list."}, user(quoted)],
        "Painted.",
    )
    assert (talk.row(recap).kind, talk.session(recap)) == ("side", talk.session(main))


def test_a_memory_flush_is_side_work_even_where_a_plugin_calls_it_main(talk: Talk):
    main = talk.ask([SYSTEM, dated("hi"), CARRIER], "hello", tools=TOOLS)
    flush = [SYSTEM, dated("hi"), says("hello"), user("Pre-compaction memory flush. Store durable memories only in x")]
    result = talk.place(flush, tools=TOOLS, headers={"x-turn-type": "main"})
    assert placed(result) == ("side", talk.session(main), None)


def test_work_of_one_run_shares_its_trace(talk: Talk):
    trace = {"headers": {"traceparent": "00-3b4f1696b2e28ba67e5647210856553f-1a62b12571a8da52-01"}}
    main = talk.ask([SYSTEM, dated("hi"), CARRIER], "hello", tools=TOOLS, **trace)
    talk.ask([user("hi")], "hello")
    summary = [{"role": "system", "content": "You are a context summarization assistant."}, user("<conversation>")]
    assert talk.place(summary, **trace).session_id == talk.session(main)
    assert talk.place(summary, user="bob", **trace).session_id is None


def test_a_heartbeat_joins_its_session_and_is_kept_in_history_under_another_text(talk: Talk):
    main = talk.ask([dated("hi")], "hello", tools=TOOLS)
    poll = user("Follow the heartbeat monitor scratch context when provided. Do not infer.\nCurrent time: now")
    beat = talk.ask([dated("hi"), says("hello"), poll], "NO_REPLY", tools=TOOLS)
    assert (talk.row(beat).kind, talk.session(beat)) == ("side", talk.session(main))
    kept = [dated("hi"), says("hello"), dated("[OpenClaw heartbeat poll]"), says("NO_REPLY"), dated("what is new?")]
    result = talk.place(kept, tools=TOOLS)
    assert placed(result) == ("continuation", talk.session(main), beat)
    assert talk.row(main).next_state is None


@pytest.mark.parametrize(
    "messages",
    [
        [{"role": "system", "content": "You are a title generator. You output ONLY a thread title."}, user("hello")],
        [{"role": "system", "content": "You create short names for chat sessions."}, user("hello")],
        [{"role": "system", "content": "Summarize the following conversation in one line."}, user("hello")],
        [user("Write a 5-word title for this conversation:\nUser: how do I sort?\nAssistant: like this")],
        [user("Create a concise chat title."), user("how do I sort a list?")],
        [user("### Task:\nGenerate a concise, 3-5 word title.\n<chat_history>\nUSER: hi\n</chat_history>")],
        [{"role": "system", "content": "Current model identity: x"}, user("Reply with OK. Do not use tools.")],
    ],
)
def test_work_about_a_conversation_is_on_the_side_also_for_clients_nobody_knows(talk: Talk, messages):
    assert talk.place(messages).kind == "side"


@pytest.mark.parametrize(
    "messages",
    [
        [user("Write a title for my blog post about cats")],
        [user("Summarize this chat")],
        [user("Give me a summary of the novel")],
        [user("What is a conversation title?")],
        [
            {"role": "system", "content": "You are a helpful assistant. At the end, offer a summary of the chat."},
            user("hi"),
        ],
        [{"role": "system", "content": "You are a support agent for the chat product Threads."}, user("hi")],
        [user("hi"), says("hello"), user("Generate a title for this conversation: we said hello")],
    ],
)
def test_a_person_may_ask_for_titles_and_summaries(talk: Talk, messages):
    assert talk.place(messages).kind == "new"


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens", "max_output_tokens"])
def test_a_probe_wants_one_token_and_says_nothing(talk: Talk, name: str):
    assert talk.place([user("quota")], body={name: 1}).kind == "side"
    assert talk.place([user("quota")], body={name: 2}).kind == "new"
    assert talk.place([user("Is 7 prime? Answer Y or N.")], body={name: 1}).kind == "new"
    assert talk.place([user("quota")]).kind == "new"
    talk.ask([user("hello")], "hi")
    assert talk.place([user("hello"), says("hi"), user("quota")], body={name: 1}).kind == "continuation"


def test_the_environment_of_an_editor_is_no_part_of_a_next_state(talk: Talk):
    def at(time: str) -> str:
        return f"\n<environment_details>\n# Current Time\n{time}\n</environment_details>"

    first = talk.ask([user(f"<task>\nWrite fib.\n</task>{at('9:00 PM')}")], "<write_to_file>fib</write_to_file>")
    # Cline sends an old message as it was, Roo without the facts of that time.
    for kept in (f"<task>\nWrite fib.\n</task>{at('9:00 PM')}", "<task>\nWrite fib.\n</task>"):
        result = "[write_to_file for 'fib.py'] Result:\nThe user denied this operation."
        placed = talk.place([user(kept), says("<write_to_file>fib</write_to_file>"), user(result + at("9:01 PM"))])
        assert placed.parent_turn_id == first
        assert (placed.next_state, placed.source) == (({"role": "system", "content": result},), Source.ENVIRONMENT)


def test_a_model_name_marks_side_work(talk: Talk):
    assert talk.place([user("hi")], model="policy-aux").kind == "side"
    assert talk.place([user("hi")], model="auxiliary").kind == "new"


# -- sub-agents and compaction -----------------------------------------------------------------------------------------


def test_a_sub_agent_is_known_by_its_mark_or_by_the_orders_it_begins_with(talk: Talk):
    orders = "Find all files that mention the moon and list them."
    spawn = says("", call("task", json.dumps({"description": "moon", "prompt": orders}), "c1"))
    main = talk.ask([user("who mentions the moon?")], spawn, tools=TOOLS)
    sub = talk.ask([{"role": "system", "content": "You search."}, user(orders)], says("", call("ls", "{}", "c2")))
    assert talk.row(sub).kind == "subagent"
    assert talk.session(sub) != talk.session(main)
    loop = talk.place([user(orders), says("", call("ls", "{}", "c2")), tool("x")])
    assert placed(loop) == ("continuation", talk.session(sub), sub)
    back = talk.place([user("who mentions the moon?"), spawn, tool("moon.txt")], tools=TOOLS)
    assert placed(back) == ("continuation", talk.session(main), main)
    marked = talk.place([user("[Subagent Context] You are running as a subagent (depth 1/5).")])
    assert marked.kind == "subagent"
    assert talk.place([user(orders)], user="bob").kind == "new"


def test_a_person_may_repeat_what_a_tool_is_running(talk: Talk):
    talk.ask([user("go")], says("", call("exec", json.dumps({"command": "pytest -q tests/unit"}), "c1")), tools=TOOLS)
    assert talk.place([user("What does the command pytest -q tests/unit do in this repository?")]).kind == "new"


def test_a_fresh_conversation_under_the_name_of_a_session_that_waits_for_tools_is_a_sub_agent(talk: Talk):
    main = talk.ask([user("go")], says("", call("task", "{}", "c1")), key="k", tools=TOOLS)
    assert placed(talk.place([user("look around")], key="k")) == ("subagent", talk.session(main), None)


def test_a_second_sub_agent_of_the_same_turn_is_one_too(talk: Talk):
    orders = "Find all files that mention the moon.", "Find all files that mention the sun."
    spawn = says("", *(call("task", json.dumps({"prompt": text}), f"c{text[-4:]}") for text in orders))
    main = talk.ask([user("go")], spawn, key="k", tools=TOOLS)
    for text in orders:
        sub = talk.ask([user(text)], "There are none.", key="k")
        assert (talk.row(sub).kind, talk.session(sub)) == ("subagent", talk.session(main))


def test_a_finished_background_task_is_reported_by_the_environment(talk: Talk):
    main = talk.ask([dated("go")], "It runs.", tools=TOOLS)
    report = user("A background task completed. Use this result to reply to the user.")
    result = talk.place([dated("go"), says("It runs."), report], tools=TOOLS)
    assert (placed(result), result.source) == (("continuation", talk.session(main), main), Source.ENVIRONMENT)


SUMMARY = "The conversation history before this point was compacted into the following summary:\n\n<summary>"


def test_a_compacted_history_goes_on_in_its_session(talk: Talk):
    talk.ask([user("one")], "The first answer, at length.")
    history = [user("one"), says("The first answer, at length."), user("two")]
    second = talk.ask(history, "The second.")
    result = talk.place([user(f"{SUMMARY} one was answered"), user("two"), says("The second."), user("three")])
    assert placed(result) == ("continuation", talk.session(second), second)
    assert result.next_state == (user("three"),)


def test_a_history_that_is_all_summary_is_known_by_the_summary_we_gave(talk: Talk):
    main = talk.ask([user("how do I sort a long list?")], "With sorted().")
    asked = [
        user("how do I sort a long list?"),
        says("With sorted()."),
        user("Your task is to create a detailed summary of the conversation so far, paying close attention."),
    ]
    talk.ask(asked, "The user asked how to sort a long list and was told of sorted().")
    summary = (
        "This session is being continued from a previous conversation that ran out of context.\n"
        "The user asked how to sort a long list and was told of sorted()."
    )
    result = talk.place([user(summary), user("and backwards?")])
    assert placed(result) == ("continuation", talk.session(main), main)
    assert result.next_state == (user("and backwards?"),)
    assert talk.place([user(summary), user("and backwards?")], user="bob").kind == "new"


def test_an_edited_opening_is_a_branch_where_the_session_is_named(talk: Talk):
    talk.ask([user("how do I sort a list in Python?")], "With sorted().", key="k")
    assert talk.place([user("how do I sort a long list in Python?")], key="k").kind == "branch"
    assert talk.place([user("good morning")], key="k").kind == "new"


@pytest.mark.parametrize(
    "before",
    [
        "The user added a new task: ",
        "Interrupted by user: ",
        "Commands not executed. The user rejected your commands with the following message: ",
    ],
)
def test_what_mini_swe_agent_puts_before_its_users_words_is_none_of_them(before: str):
    said = read_user_text(f"{before}No, three lines.")
    assert (said.said, said.text) == (Said.HUMAN, "No, three lines.")


def test_opencode_going_on_after_a_summary_is_not_the_human():
    said = read_user_text("Continue if you have next steps, or stop and ask for clarification if you are unsure.")
    assert said.said is Said.REPORT


def test_a_summary_that_opencode_asks_for_is_work_on_the_side():
    system = {"role": "system", "content": "You are a context summarization agent. You are given a conversation."}
    messages = [system, {"role": "user", "content": "Here is the conversation so far:"}]
    assert known_side_work(messages, False, [read_user_text("Here is the conversation so far:")]) == "summary"
