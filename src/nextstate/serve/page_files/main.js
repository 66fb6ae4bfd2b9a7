// The page: two views, the list of sessions, and who serves.

import { get } from "./api.js";
import { newSession, openSession, shownSession, startChat } from "./chat.js";
import { $, announce, el, icon, when } from "./dom.js";
import { leaveLearning, showLearning, startLearning } from "./learning.js";

const VIEWS = ["chat", "learning"];

let model = "";
let version = null;
let found = null; // what a search has found; null: all sessions are shown
let listed = []; // sessions, as far as they were asked for
let older = null; // where the list goes on

function show(view) {
  for (const name of VIEWS) {
    $(`view-${name}`).hidden = name !== view;
    $(`tab-${name}`).setAttribute("aria-selected", String(name === view));
    $(`tab-${name}`).tabIndex = name === view ? 0 : -1;
  }
  $("menu").hidden = view !== "chat";
  history.replaceState(null, "", view === "chat" ? "#" : "#learning");
  if (view === "learning") showLearning();
  else leaveLearning();
}

function serving(now) {
  const isNew = version !== null && now !== version;
  if (isNew) announce(`Version ${now} serves now.`);
  if (now !== version) $("serving").replaceChildren(el("span", { className: "model" }, `${model} `), el("span", { className: "chip" }, `version ${now}`));
  version = now;
  return isNew;
}

// ---- sessions

async function listSessions() {
  const page = await get("/api/sessions", { user: $("user").value });
  listed = page.sessions;
  older = page.before;
  drawSessions();
}

async function moreSessions() {
  if (found) return search(found.words, found.before);
  const page = await get("/api/sessions", { user: $("user").value, before: older });
  listed.push(...page.sessions);
  older = page.before;
  return drawSessions();
}

async function search(words, before = null) {
  const page = await get("/api/search", { words, before, user: $("user").value });
  const turns = before === null ? page.turns : [...found.turns, ...page.turns];
  found = { words, turns, before: page.before };
  announce(`${turns.length} found.`);
  drawSessions();
}

function drawSessions() {
  const shown = shownSession();
  const row = (id, turn, title, note) => {
    const open = async () => {
      await openSession(id, turn);
      menu(false);
    };
    const current = id === shown.id && turn === null;
    return el("li", {}, el("button", { type: "button", onclick: open, ...(current ? { "aria-current": "true" } : {}) }, el("span", { className: "title" }, title || "(no text)"), el("span", { className: "note" }, note)));
  };
  const rows = found
    ? found.turns.map((turn) => row(turn.session_id, turn.turn_id, turn.text, `turn ${turn.turn_id}, ${when(turn.created_at)}`))
    : listed.map((one) => row(one.session_id, null, one.title, `${one.turns} ${one.turns === 1 ? "turn" : "turns"}, ${when(one.last_at)}`));
  if (!rows.length) rows.push(el("li", { className: "note" }, found ? "Nothing found." : "No session yet."));
  $("sessions").replaceChildren(...rows);
  const more = found ? found.before : older;
  $("more-sessions").hidden = more === null;
  $("more-sessions").textContent = found ? "Search further back" : "Older";
}

function menu(open) {
  $("side").classList.toggle("open", open);
  $("menu").setAttribute("aria-expanded", String(open));
}

// ---- start

async function start() {
  $("menu").append(icon("menu"));
  $("menu").onclick = () => menu(!$("side").classList.contains("open"));
  for (const [n, name] of VIEWS.entries()) {
    $(`tab-${name}`).onclick = () => show(name);
    $(`tab-${name}`).onkeydown = (event) => {
      if (event.key !== "ArrowLeft" && event.key !== "ArrowRight") return;
      const other = VIEWS[(n + 1) % VIEWS.length];
      show(other);
      $(`tab-${other}`).focus();
    };
  }
  // All before the first answer of the server: whoever is quicker must not send a form in the browser's own way.
  $("user").onchange = listSessions;
  $("new-session").onclick = () => {
    newSession();
    menu(false);
  };
  $("more-sessions").onclick = moreSessions;
  $("search-form").onsubmit = (event) => {
    event.preventDefault();
    const words = $("search-words").value.trim();
    if (words) search(words);
  };
  $("search-words").oninput = () => {
    if ($("search-words").value.trim()) return;
    found = null;
    drawSessions();
  };
  startLearning(async (id, turn) => {
    show("chat");
    await openSession(id, turn);
  });
  startChat(listSessions, serving);
  const me = await get("/api/me");
  model = me.model;
  serving(me.version);
  if (!me.learned_from) {
    $("learn").checked = false;
    $("learn").disabled = true;
    $("learn").title = "Learning is off for this server or this key.";
  }
  $("user-label").hidden = !me.users.length;
  $("user").append(el("option", { value: "" }, "nobody in particular"), ...me.users.map((name) => el("option", { value: name }, name)));
  await listSessions();
  if (location.hash === "#learning") show("learning");
}

start().catch((error) => {
  $("messages").replaceChildren(el("p", { className: "error", role: "alert" }, error.message));
});
