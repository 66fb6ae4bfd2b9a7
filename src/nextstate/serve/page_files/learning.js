// The learning view: how content people were, what each version came from, and why the rest was not trained.

import { get } from "./api.js";
import { $, el, plural, svg, when } from "./dom.js";

const EVERY_MS = 4000;
const FEW = 8; // versions that are shown at once

let cursor = null;
let timer = null;
let openSession = () => {};
const open = new Set();

export function startLearning(goToSession) {
  openSession = goToSession;
}

export async function showLearning() {
  clearTimeout(timer);
  try {
    if (!document.hidden) {
      const made = await get("/api/learning", { seen: cursor });
      if (made.cursor !== cursor) draw(made);
      cursor = made.cursor;
    }
  } catch (error) {
    if (cursor === null) $("view-learning").replaceChildren(el("p", { className: "error", role: "alert" }, error.message));
  }
  timer = setTimeout(showLearning, EVERY_MS);
}

export function leaveLearning() {
  clearTimeout(timer);
}

function draw(made) {
  const { counts } = made;
  const scrolled = $("view-learning").scrollTop;
  const sum = (parts) => Object.values(parts).reduce((a, b) => a + b, 0);
  $("view-learning").replaceChildren(
    el("div", { className: "learning-inside" },
      el("section", { className: "tiles", "aria-label": "At a glance" },
        tile("version", String(counts.version), "serves now"),
        tile("answers", counts.turns.toLocaleString(), plural(counts.sessions, "session")),
        tile("trained", counts.trained.toLocaleString(), plural(counts.updates.done ?? 0, "update")),
        tile("waiting", sum(counts.waiting).toLocaleString(), "may still be trained"),
        tile("not trained", sum(counts.left_out).toLocaleString(), "each with its reason"),
        tile("good", share(made.said), made.said.total ? `${span(made.said)} of ${plural(made.said.total, "verdict")}` : "no good or bad verdict yet"),
      ),
      el("section", { "aria-labelledby": "satisfaction-title" },
        el("h2", { id: "satisfaction-title" }, "How content people were"),
        el("p", { className: "note" }, "Share of good verdicts among the good and bad ones, with its 95% band. A line stands where a version began to serve."),
        el("div", { className: "card chart-card" }, svg(made.chart)),
        numbers(made.satisfaction),
      ),
      el("section", { "aria-labelledby": "reasons-title" },
        el("h2", { id: "reasons-title" }, "Why answers were not trained"),
        ...(made.reasons.length ? [] : [el("p", { className: "note" }, "Every answer was trained, or there is none yet.")]),
        el("div", { className: "cards" }, ...made.reasons.map((line) => reason(line, counts.turns))),
      ),
      el("section", { "aria-labelledby": "versions-title" },
        el("h2", { id: "versions-title" }, "Versions"),
        el("div", { className: "cards" }, ...made.versions.slice(0, FEW).map(version)),
        ...(made.versions.length > FEW ? [fold("versions", el("summary", { className: "note" }, `${made.versions.length - FEW} before them`), el("div", { className: "cards" }, ...made.versions.slice(FEW).map(version)))] : []),
      ),
    ),
  );
  $("view-learning").scrollTop = scrolled;
}

function tile(name, value, more) {
  return el("div", { className: "tile" }, el("span", { className: "tile-name" }, name), el("strong", {}, value), el("span", { className: "note" }, more));
}

const share = (rate) => (rate.total ? `${Math.round(100 * rate.share)}%` : "–");
const span = (rate) => `${Math.round(100 * rate.interval_95[0])} to ${Math.round(100 * rate.interval_95[1])}%`;

function numbers(bins) {
  if (!bins.length) return "";
  const rows = bins.map((one) => el("tr", {}, ...[when(one.first_at), `${one.rate.hits} of ${one.rate.total}`, share(one.rate), span(one.rate)].map((text) => el("td", {}, text))));
  const head = el("tr", {}, ...["from", "good", "share", "95%"].map((text) => el("th", { scope: "col" }, text)));
  return fold("numbers", el("summary", { className: "note" }, "The same in numbers"), el("div", { className: "wide-table" }, el("table", {}, el("thead", {}, head), el("tbody", {}, ...rows))));
}

/** A <details> that stays open when the view is drawn anew. */
function fold(name, ...children) {
  const made = el("details", { open: open.has(name) }, ...children);
  made.addEventListener("toggle", () => (made.open ? open.add(name) : open.delete(name)));
  return made;
}

const digits = (value) => (value === null || value === undefined ? "not measured" : Number(value.toPrecision(3)).toString());

function version(line) {
  const name = `version ${line.version}`;
  const trained = line.turns === null ? (line.version === 0 ? "the model as it came" : "no update of its own") : `${plural(line.turns, "turn")}: ${line.good ?? "?"} good, ${line.bad ?? "?"} bad, ${line.hints ?? 0} with a hint`;
  const list = el("dl", { className: "facts" });
  const fact = (title, ...what) => list.append(el("div", {}, el("dt", {}, title), el("dd", {}, ...what)));
  fact("People since", line.said.total ? `${line.said.hits} of ${line.said.total} verdicts on its answers are good, ${share(line.said)} (${span(line.said)})` : "no good or bad verdict on its answers yet");
  if (line.watch) {
    const { live_good: good, live_bad: bad, reference_good: before, reference_bad: worse, e_value: evidence } = line.watch;
    fact("Watch", `${good} of ${good + bad} good since, ${before} of ${before + worse} before. Evidence that it is worse: e = ${digits(evidence)}; 100 would take it back.`);
  }
  if (line.why) fact("Gate", line.why);
  for (const [title, value] of Object.entries(line.gate)) fact(title.replaceAll("_", " "), digits(value));
  if (line.turns !== null) {
    fact("Divergence from the base", line.divergence === null ? "not measured" : `${digits(line.divergence)} nats a token`);
    for (const [title, value] of Object.entries(line.terms)) fact(`Loss: ${title.replaceAll("_", " ")}`, digits(value));
    fact("Tokens", `${line.reply_tokens ?? "?"} trained, ${line.stale_tokens ?? 0} of them too stale; ${plural(line.off_policy ?? 0, "turn")} left out as off policy; ${digits(line.seconds)} s`);
  }
  if (line.parent_version !== null) fact("Built on", `version ${line.parent_version}, ${when(line.created_at)}`);
  const used = el("div", { className: "examples" });
  const made = fold(name,
    el("summary", { className: "row" },
      el("strong", {}, `v${line.version}`),
      el("span", { className: `chip version-${line.state}` }, line.state.replace("_", " ")),
      el("span", { className: "row-text" }, trained),
      el("span", { className: "row-end" }, line.said.total ? `${share(line.said)} good since` : ""),
    ),
    el("div", { className: "inside" }, list, used),
  );
  made.className = "card";
  const load = async () => {
    const { own_turns: own, turns } = await get(`/api/versions/${line.version}`);
    const more = turns > own.length ? ` of ${turns}; the others are other people's, or too many to list` : "";
    used.replaceChildren(el("h3", {}, `Turns that you can see: ${own.length}${more}`), ...own.map((turn) => exampleOf(turn, turn.verdict)));
  };
  if (line.turns !== null) made.addEventListener("toggle", () => made.open && load());
  return made;
}

function reason(line, turns) {
  const bar = el("span", { className: `bar ${line.final ? "left_out" : "waiting"}`, "aria-hidden": "true" }, el("span"));
  bar.firstChild.style.width = `${Math.max(1, (100 * line.count) / Math.max(1, turns))}%`;
  const made = fold(line.reason,
    el("summary", { className: "row" },
      el("strong", {}, line.count.toLocaleString()),
      el("span", { className: "row-text" }, line.reason.replaceAll("_", " ")),
      bar,
      el("span", { className: `chip ${line.final ? "left_out" : "waiting"}` }, line.final ? "left out" : "waiting"),
    ),
    el("div", { className: "inside" }, el("p", {}, line.explanation), el("div", { className: "examples" }, ...line.examples.map((turn) => exampleOf(turn, null)))),
  );
  made.className = "card";
  return made;
}

function exampleOf(turn, verdict) {
  return el("button", { type: "button", className: "example", onclick: () => openSession(turn.session_id, turn.turn_id) },
    verdict ? el("span", { className: `chip ${verdict}` }, verdict) : "",
    el("span", {}, turn.asked || "(no text)"),
    el("span", { className: "note" }, turn.answer || "(no answer)"),
    turn.detail ? el("span", { className: "note" }, turn.detail) : "",
  );
}
