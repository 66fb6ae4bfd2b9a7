// One answer token by token: what was sampled, how likely it was, and by which version.

import { get } from "./api.js";
import { $, el } from "./dom.js";

const STEPS = [0.9, 0.5, 0.2, 0.05];
const NAMES = ["90% and more", "50 to 90%", "20 to 50%", "5 to 20%", "below 5%"];

/** 0 for what was nearly certain, 4 for what was least expected. */
function step(logprob) {
  const found = STEPS.findIndex((least) => Math.exp(logprob) >= least);
  return found < 0 ? STEPS.length : found;
}

const percent = (logprob) => `${(100 * Math.exp(logprob)).toFixed(1)}%`;
const visible = (text) => text.replaceAll("\n", "↵\n").replaceAll("\t", "⇥");

export async function showTokens(turn) {
  const { tokens, temperature } = await get(`/api/turns/${turn.turn_id}/tokens`);
  const surprises = tokens.toSorted((a, b) => a.logprob - b.logprob).slice(0, 8);
  const mean = tokens.reduce((sum, token) => sum + token.logprob, 0) / tokens.length;
  const made = new Set(tokens.map((token) => token.version));
  const verdict = turn.verdicts.at(-1);
  const close = el("button", { type: "button", className: "quiet", onclick: () => $("token-dialog").close() }, "Close");
  $("token-dialog").replaceChildren(
    el("div", { className: "dialog-head" }, el("h2", { id: "token-title" }, `Tokens of turn ${turn.turn_id}`), close),
    el("p", {}, `${tokens.length} tokens, drawn at temperature ${temperature} by version ${[...made].join(", ")}. On average a token had ${mean.toFixed(2)} nats.`),
    el("ul", { className: "legend", "aria-label": "Colours" }, ...NAMES.map((name, n) => el("li", {}, el("span", { className: `token p${n}` }, " "), ` ${name}`))),
    el("p", { className: "tokens" }, ...tokens.map(shown)),
    el("h3", {}, "Least expected"),
    el("ol", { className: "surprises" }, ...surprises.map((token) => el("li", {}, el("code", {}, visible(token.text)), ` ${percent(token.logprob)}, ${token.logprob.toFixed(2)} nats`))),
    el("p", { className: "note" }, about(verdict)),
  );
  $("token-dialog").showModal();
}

function shown(token) {
  const title = `${percent(token.logprob)}, ${token.logprob.toFixed(3)} nats, version ${token.version}, token ${token.id}`;
  return el("span", { className: `token p${step(token.logprob)}`, title }, visible(token.text));
}

function about(verdict) {
  const signed = verdict && ["good", "bad"].includes(verdict.value);
  const whole = signed ? `This answer was judged ${verdict.value}, which counts for all of its tokens alike. ` : "";
  return `${whole}Colours show how likely each token was when it was drawn. The advantage of each single token, and what a teacher with a hint gave it, exist only while an update trains and are not stored.`;
}
