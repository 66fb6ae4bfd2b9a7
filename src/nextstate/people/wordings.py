"""The words of simulated users: everyday English, from polite to annoyed, never a number and never a grade.

A correction is a complaint, mostly followed by a directive. Directives ask for one sentence rather than for "short":
put into the prompt of the built-in model, those change its answers most.
"""

from __future__ import annotations

from nextstate.people.wishes import Fault

COMPLAINTS: dict[Fault, tuple[str, ...]] = {
    Fault.TOO_LONG: (
        "Too long.",
        "That was too long.",
        "Way too long.",
        "Much too wordy.",
        "Too many words.",
        "That is far too much text.",
        "Sorry, that was too long for me.",
        "Thanks, but that was a lot more than I needed.",
        "That's more than I can read right now.",
        "I appreciate the effort, but this is too long.",
        "Hmm, that was quite a lot of text.",
        "I asked for an answer, not an essay.",
        "I asked a simple question, I did not ask for a lecture.",
        "You lost me halfway through.",
        "I stopped reading after the first line.",
        "Who has time to read all that?",
        "Please stop rambling.",
        "You keep going on and on.",
        "I only wanted the gist.",
        "No, that is much longer than it should be.",
        "Why so long?",
        "That's a wall of text.",
    ),
    Fault.BROKEN_OFF: (
        "That just breaks off.",
        "You did not finish your sentence.",
        "Your answer stops in the middle.",
        "Something is missing at the end.",
        "The end of that is missing.",
    ),
    Fault.NO_SENTENCE: (
        "That is not a sentence.",
        "I can't make anything of that.",
        "Is that all?",
        "I did not get a real answer there.",
        "That tells me nothing.",
    ),
}
"""What the user says is wrong; each is true of every reply with that fault."""

DIRECTIVES: dict[Fault, tuple[str, ...]] = {
    Fault.TOO_LONG: (
        "One short sentence, please.",
        "Just one short sentence, please.",
        "Answer in one short sentence.",
        "Please answer in one short sentence.",
        "One sentence is enough.",
        "Please keep it to one short sentence.",
        "A single short sentence will do.",
        "Give me one short sentence.",
        "Can you say it in one short sentence?",
        "Keep it to a single sentence, please.",
        "Next time, one short sentence.",
        "I only need one short sentence.",
    ),
    Fault.BROKEN_OFF: (
        "One short, complete sentence, please.",
        "Please finish your sentence.",
        "Give me one whole sentence.",
    ),
    Fault.NO_SENTENCE: (
        "One short, complete sentence, please.",
        "Please answer in one short sentence.",
        "A full sentence, please.",
    ),
}
"""What the user asks for instead."""

PRAISE = (
    "Thanks, that's exactly what I needed.",
    "Perfect, thank you!",
    "Great, thanks.",
    "Perfect.",
    "Nice, short and clear.",
    "Good answer, thanks.",
    "That's just what I wanted.",
    "Lovely, thank you.",
    "Exactly, thanks!",
    "That helps, thank you.",
    "Great answer.",
    "Thanks, that was quick and clear.",
    "I like that answer.",
    "Just right, thanks.",
    "Wonderful, that's all I wanted to know.",
    "Yes, that's how I like it.",
    "Very helpful, thanks.",
    "Brilliant, thank you.",
    "Cheers, that's perfect.",
    "Nice one, thanks.",
    "Thank you, that is clear.",
    "Awesome, thanks a lot.",
    "Good, that's the kind of answer I like.",
    "Well put, thank you.",
)
"""What a user says to a reply that meets the wish."""

OFF_TOPIC = (
    "Sorry, the phone rang.",
    "My tea has gone cold by now.",
    "It has started to rain here.",
    "The neighbors are mowing the lawn again.",
    "I have to buy bread later.",
    "My cat just jumped on the table.",
    "I am writing this on the bus.",
    "It is my day off today.",
    "The kids are home from school.",
    "My battery is nearly empty.",
)
"""Remarks that say nothing about the reply."""

QUESTION_LEADS = ("", "", "", "Next question: ", "Another question: ", "Something else: ")
"""What may stand before the next question; none of it can be read as approval or complaint."""

REPEAT_LEADS = ("", "", "Again: ", "I'll ask again: ", "Once more: ")
"""What may stand before the same question asked again."""
