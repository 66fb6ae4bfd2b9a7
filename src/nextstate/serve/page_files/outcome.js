// What happened to an answer, beside it: what followed, how it was judged and by which votes, and what came of it.

import { post } from "./api.js";
import { announce, el, iconButton } from "./dom.js";
import { showTokens } from "./tokens.js";

/** The line under an answer, with all that is known behind it. `open` keeps what was unfolded when it is drawn anew. */
export function outcomeOf(turn, open) {
  const verdict = turn.verdicts.at(-1);
  const line = el("summary", { className: "outcome-line" });
  if (verdict) {
    const votes = verdict.votes ? ` (${verdict.votes})` : "";
    line.append(el("span", { className: `chip ${verdict.value}` }, `judged ${verdict.value}${votes}`));
  }
  line.append(el("span", { className: `chip ${turn.outcome.tone}` }, turn.outcome.headline));
  line.append(el("span", { className: "version" }, versions(turn)));
  const more = el("details", { className: "outcome", open: open.has(turn.turn_id) }, line, facts(turn));
  more.ontoggle = () => (more.open ? open.add(turn.turn_id) : open.delete(turn.turn_id));
  return more;
}

function versions(turn) {
  const made = (turn.reply_versions ?? []).map(([version]) => version);
  return made.length ? `by version ${made.join(", then ")}` : "";
}

function facts(turn) {
  const list = el("dl", { className: "facts" });
  const fact = (name, ...what) => list.append(el("div", {}, el("dt", {}, name), el("dd", {}, ...what)));
  if (turn.next_state) {
    const texts = turn.next_state.messages.map((message) => el("q", {}, shorten(String(message.content ?? ""))));
    fact(`What followed, from the ${turn.next_state.source}`, ...texts);
  }
  for (const { value, words } of turn.feedback) fact("Your thumb", value, words ? el("q", {}, words) : "");
  for (const verdict of turn.verdicts) {
    fact("Verdict", `${verdict.value}, by ${verdict.judge}${verdict.votes ? `: ${verdict.votes}` : ""}. ${verdict.reason}`);
    for (const hint of verdict.hints) fact(`Hint, from the ${hint.source}`, el("q", {}, hint.text));
  }
  fact("Where it stands", turn.outcome.headline, ". ", turn.detail ?? "", " ", turn.outcome.explanation ?? "");
  const length = turn.reply_tokens === null ? "" : `${turn.reply_tokens} tokens after a prompt of ${turn.prompt_tokens}. `;
  fact("Turn", `${turn.turn_id}, ${turn.kind.replace("_", " ")}. ${length}${turn.placed_because}`);
  return list;
}

function shorten(text) {
  return text.length > 400 ? `${text.slice(0, 400)}…` : text;
}

const CAME_OF_IT = {
  will_be_judged: "Thank you. The answer is judged by this.",
  already_trained: "Thank you. It is kept; the answer had been trained already.",
  kept: "Thank you. It is kept; this answer cannot be trained.",
};

/** Thumbs, and a line for words once one is given. `changed` is called when the server has it. */
export function thumbs(turn, changed) {
  const given = turn.feedback.at(-1)?.value;
  const box = el("span", { className: "thumbs" });
  const words = el("form", { className: "words", hidden: true });
  const field = el("input", { type: "text", maxLength: 10000, placeholder: "What should be different?", "aria-label": "In words, what should be different" });
  words.append(field, el("button", { type: "submit", className: "quiet" }, "Send"));
  let value = given;
  const tell = async (text) => {
    const answer = await post("/v1/feedback", { turn_id: turn.turn_id, value, ...(text ? { words: text } : {}) });
    announce(CAME_OF_IT[(await answer.json()).outcome]);
    await changed();
  };
  const buttons = [["good", "Good answer"], ["bad", "Bad answer"]].map(([name, label]) =>
    iconButton(name, label, async () => {
      value = name;
      for (const button of buttons) button.setAttribute("aria-pressed", String(button.dataset.value === name));
      words.hidden = false;
      field.focus();
      await tell("");
    }, { "aria-pressed": String(given === name) }),
  );
  buttons.forEach((button, n) => (button.dataset.value = ["good", "bad"][n]));
  words.onsubmit = async (event) => {
    event.preventDefault();
    if (!field.value.trim()) return;
    words.hidden = true;
    await tell(field.value.trim());
  };
  box.append(...buttons);
  return [box, words];
}

export function tokensButton(turn) {
  return iconButton("tokens", "Show the tokens", () => showTokens(turn), { disabled: !turn.reply_tokens });
}
