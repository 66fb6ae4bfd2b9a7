// The conversation: asking, streaming, stopping, asking again, editing; and what happened to each answer, as it happens.

import { get, streamAnswer } from "./api.js";
import { $, announce, el, icon, iconButton } from "./dom.js";
import { outcomeOf, thumbs, tokensButton } from "./outcome.js";
import { Session, said } from "./session.js";

const FOLLOW_MS = 1500;
const PLACEHOLDER = "Say something. What you say next is what it learns from.";

let session = Session.fresh();
let asked = null; // the request under way: {messages, parent, text, reasoning, stop}
let changed = () => {};
let served = () => {};
const unfolded = new Set();
const drawn = new Map(); // turn id -> {node, outcome}: what stands on the page; {said, became}: what it was drawn from

/** @param whenChanged called when the list of sessions is out of date; whenServed with the version that serves. */
export function startChat(whenChanged, whenServed) {
  changed = whenChanged;
  served = whenServed;
  $("send").append(icon("send"));
  $("stop").append(icon("stop"));
  $("composer").onsubmit = (event) => {
    event.preventDefault();
    send();
  };
  $("composer-text").onkeydown = (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      send();
    }
  };
  $("composer-text").oninput = fit;
  $("stop").onclick = stop;
  $("earlier").onclick = earlier;
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape" && asked && !document.querySelector("dialog[open]")) stop();
  });
  follow();
  draw();
}

export function newSession() {
  leave(Session.fresh());
  $("learn").checked = !$("learn").disabled;
  $("composer-text").focus();
}

export async function openSession(id, turnId = null) {
  const shown = await get(`/api/sessions/${id}`);
  const opened = new Session(shown.key, id);
  take(opened, shown);
  while (turnId !== null && !opened.turns.has(turnId) && opened.before !== null) {
    take(opened, await get(`/api/sessions/${id}`, { before: opened.before }));
  }
  opened.showNewest();
  const wanted = opened.turns.get(turnId);
  if (wanted) opened.tip = opened.newestAfter(wanted);
  leave(opened);
  const newest = opened.turns.get(opened.tip);
  $("learn").checked = !$("learn").disabled && (newest?.learn ?? true);
  const target = wanted ? document.getElementById(`turn-${turnId}`) : null;
  if (target) target.scrollIntoView({ block: "center" });
  else toEnd();
}

export const shownSession = () => session;

function take(into, shown) {
  into.add(shown.turns);
  into.cursor ??= shown.cursor;
  into.before = shown.before;
}

function leave(next) {
  if (asked) stop();
  session = next;
  drawn.clear();
  draw();
  changed();
}

async function earlier() {
  const height = $("scroll").scrollHeight;
  take(session, await get(`/api/sessions/${session.id}`, { before: session.before }));
  draw();
  $("scroll").scrollTop += $("scroll").scrollHeight - height;
}

// ---- asking

function send() {
  const text = $("composer-text").value.trim();
  if (!text || asked || !session.own) return;
  $("composer-text").value = "";
  fit();
  const tip = session.turns.get(session.tip) ?? null;
  ask(tip, [{ role: "user", content: text }]);
}

/** Ask for an answer to new messages behind a turn. */
async function ask(parent, messages) {
  const abort = new AbortController();
  const mine = { session, parent, messages, text: "", reasoning: "", stop: () => abort.abort(), error: null };
  asked = mine;
  session.tip = parent?.turn_id ?? null;
  draw();
  toEnd();
  announce("The answer is being written.");
  let turnId = null;
  try {
    await streamAnswer(
      { model: "policy", messages: [...session.messagesAfter(parent), ...messages] },
      {
        headers: { "X-Session-Id": session.key, ...($("learn").checked ? {} : { "X-Nextstate-Learn": "off" }) },
        signal: abort.signal,
        begun: (headers) => (turnId = Number(headers.get("x-nextstate-turn-id"))),
        piece: (delta) => {
          mine.text += delta.content ?? "";
          mine.reasoning += delta.reasoning_content ?? "";
          if (asked === mine) drawAsked();
        },
      },
    );
    announce("The answer is complete.");
  } catch (error) {
    if (error.name !== "AbortError") mine.error = error.message;
    announce(mine.error ?? "The answer was stopped.");
  }
  if (turnId !== null) await settle(mine, turnId);
  if (asked === mine) asked = null;
  if (session !== mine.session) return;
  if (turnId === null && messages.length === 1) $("composer-text").value ||= messages[0].content; // nothing was lost
  draw();
  if (mine.error) $("messages").append(el("p", { className: "error", role: "alert" }, mine.error));
  toEnd();
  changed();
}

/** The turn as the store has it, once it is written down: soon after a stop, at once after an end. */
async function settle(mine, turnId) {
  for (let tries = 0; tries < 20; tries += 1) {
    const turn = await get(`/api/turns/${turnId}`);
    mine.session.add([turn]);
    mine.session.id = turn.session_id;
    mine.session.tip = turnId;
    if (turn.state !== "generating") return;
    await new Promise((resolve) => setTimeout(resolve, 150));
  }
}

function stop() {
  asked?.stop();
}

function again(turn) {
  ask(session.turns.get(turn.parent_turn_id) ?? null, said(turn));
}

function edit(turn, node) {
  const before = said(turn);
  const field = el("textarea", { value: before.at(-1).content, rows: 3, "aria-label": "Your message" });
  const form = el("form", { className: "edit" }, field, el("div", { className: "actions" },
    el("button", { type: "submit", className: "primary" }, "Ask this instead"),
    el("button", { type: "button", className: "quiet", onclick: () => (drawn.delete(turn.turn_id), draw()) }, "Leave it"),
  ));
  form.onsubmit = (event) => {
    event.preventDefault();
    const text = field.value.trim();
    if (text && !asked) ask(session.turns.get(turn.parent_turn_id) ?? null, [...before.slice(0, -1), { ...before.at(-1), content: text }]);
  };
  node.replaceChildren(form);
  field.focus();
}

// ---- following what happens to answers

async function follow() {
  try {
    if (!document.hidden && session.id !== null && !asked) await look();
  } catch {
    // The server is away or starts again: the next look will tell. What is shown stays true as of the last one.
  }
  setTimeout(follow, FOLLOW_MS);
}

async function look() {
  const mine = session;
  const now = await get(`/api/sessions/${mine.id}/changes`, { seen: mine.cursor });
  const published = served(now.version);
  if (mine !== session || asked) return;
  const stale = new Set();
  for (const { turn_id: id, state, reason } of now.turns ?? []) {
    const known = mine.turns.get(id);
    if (known ? known.state !== state || known.reason !== reason : mine.before === null || id > Math.min(...mine.turns.keys())) stale.add(id);
  }
  if (published) for (const turn of mine.branch) if (turn.state === "trained") stale.add(turn.turn_id);
  const tip = mine.tip;
  for (const id of stale) {
    const turn = await get(`/api/turns/${id}`);
    const known = mine.turns.get(id);
    mine.add([turn]);
    if (turn.parent_turn_id === mine.tip && turn.kind !== "side" && !known) mine.tip = id; // another client went on
    if (known && known.outcome.headline !== turn.outcome.headline) announce(`Turn ${id}: ${turn.outcome.headline}.`);
  }
  mine.cursor = now.cursor;
  if (mine !== session || asked || (!stale.size && tip === mine.tip)) return;
  draw();
}

// ---- drawing

function draw() {
  const nodes = session.branch.map(nodeOf);
  if (asked && asked.session === session) nodes.push(drawAsked());
  if (!nodes.length) nodes.push(welcome());
  const current = $("messages");
  const same = current.children.length === nodes.length && nodes.every((node, n) => node === current.children[n]);
  if (!same) current.replaceChildren(...nodes);
  $("earlier").hidden = session.before === null;
  $("send").hidden = asked !== null;
  $("stop").hidden = asked === null;
  for (const name of ["composer-text", "send"]) $(name).disabled = !session.own;
  $("composer-text").placeholder = session.own ? PLACEHOLDER : "Another client's session: go on there. Thumbs and words count here, too.";
}

/** A turn on the page. What has not changed stays as it is, with whatever somebody is typing into it. */
function nodeOf(turn) {
  const beside = session.beside(turn).map((other) => other.turn_id);
  const { messages, answer: text, reasoning, tool_calls: calls, finish_reason: finish } = turn;
  const said = JSON.stringify([messages, text, reasoning, calls, finish, beside, session.own]);
  const became = JSON.stringify([turn.outcome, turn.verdicts, turn.feedback, turn.next_state, turn.version]);
  let known = drawn.get(turn.turn_id);
  if (known?.said !== said) {
    const outcome = outcomeOf(turn, unfolded);
    known = { said, became, outcome, node: drawTurn(turn, outcome) };
    drawn.set(turn.turn_id, known);
  } else if (known.became !== became) {
    const outcome = outcomeOf(turn, unfolded);
    known.outcome.replaceWith(outcome);
    Object.assign(known, { became, outcome });
  }
  return known.node;
}

function welcome() {
  return el("div", { className: "welcome" },
    el("h2", {}, "Talk to it, and it learns"),
    el("p", {}, "What you say after an answer tells how good it was. “Too long. One sentence, please.” is a lesson; so is a thumb. Beside each answer you see what came of it: how it was judged, which version was trained on it, or why it was not."),
  );
}

function drawTurn(turn, outcome) {
  const node = el("article", { id: `turn-${turn.turn_id}`, className: "turn", "aria-label": `Turn ${turn.turn_id}` });
  const messages = said(turn);
  const user = el("div", { className: "said" }, ...messages.map(bubble));
  const beside = session.beside(turn);
  const position = beside.findIndex((other) => other.turn_id === turn.turn_id);
  const reload = async () => {
    session.add([await get(`/api/turns/${turn.turn_id}`)]);
    draw();
  };
  const [thumbBox, words] = thumbs(turn, reload);
  const actions = el("div", { className: "actions" }, thumbBox);
  if (session.own) {
    actions.append(iconButton("again", "Answer again", () => !asked && again(turn)));
    if (messages.at(-1)?.role === "user") user.lastChild.append(iconButton("edit", "Edit your message", () => !asked && edit(turn, user)));
  }
  actions.append(iconButton("copy", "Copy the answer", () => navigator.clipboard.writeText(turn.answer ?? "")), tokensButton(turn));
  if (beside.length > 1) {
    const go = (n) => ((session.tip = session.newestAfter(beside[n])), draw());
    actions.append(el("span", { className: "beside" },
      iconButton("back", "The one before", () => go(position - 1), { disabled: position === 0 }),
      `${position + 1} of ${beside.length}`,
      iconButton("forth", "The next one", () => go(position + 1), { disabled: position === beside.length - 1 }),
    ));
  }
  node.append(user, answer(turn.answer, turn.reasoning, turn.tool_calls), actions, words, outcome);
  if (turn.finish_reason === "aborted") node.querySelector(".answer").append(el("p", { className: "note" }, "Stopped here."));
  return node;
}

const ROLES = { system: "Instruction", developer: "Instruction", tool: "Tool", assistant: "Answer" };

function bubble(message) {
  const text = typeof message.content === "string" ? message.content : "";
  if (message.role === "user") return el("div", { className: "bubble" }, el("span", { className: "hidden" }, "You: "), text);
  return el("details", { className: "aside" }, el("summary", {}, ROLES[message.role] ?? message.role), el("pre", {}, text));
}

function answer(text, reasoning, calls) {
  const node = el("div", { className: "answer" }, el("span", { className: "hidden" }, "Answer: "));
  if (reasoning) node.append(el("details", { className: "aside" }, el("summary", {}, "What it thought"), el("pre", {}, reasoning)));
  // Between fences of code, text; nothing else of what a model writes is given a form.
  for (const [n, part] of (text ?? "").split(/^```.*$/m).entries()) {
    if (n % 2) node.append(el("pre", { tabIndex: 0 }, part.replace(/^\n|\n$/g, "")));
    else if (part.trim()) node.append(el("p", {}, part.trim()));
  }
  for (const call of calls ?? []) node.append(el("pre", { className: "call" }, `${call.function.name}(${call.function.arguments})`));
  return node;
}

let askedNode = null;

/** The answer as far as it has come. */
function drawAsked() {
  if (askedNode?.of !== asked) {
    const body = el("div", { className: "coming" });
    const node = el("article", { className: "turn", "aria-busy": "true" }, el("div", { className: "said" }, ...asked.messages.map(bubble)), body);
    askedNode = { of: asked, node, body };
  }
  const end = atEnd();
  const waits = el("span", { className: "waits", "aria-label": "Being written" });
  askedNode.body.replaceChildren(answer(asked.text, asked.reasoning, []), waits);
  if (end) toEnd();
  return askedNode.node;
}

function atEnd() {
  const area = $("scroll");
  return area.scrollHeight - area.scrollTop - area.clientHeight < 80;
}

function toEnd() {
  $("scroll").scrollTop = $("scroll").scrollHeight;
}

function fit() {
  const field = $("composer-text");
  field.style.height = "auto";
  field.style.height = `${Math.min(field.scrollHeight, 220)}px`;
}
