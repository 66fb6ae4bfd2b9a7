// Talking to the server: the API that every client uses, and what /api tells beside it.

import { $ } from "./dom.js";

const KEY = "nextstate-key";

export class Refused extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

async function request(path, options = {}) {
  for (;;) {
    const key = sessionStorage.getItem(KEY);
    const headers = { ...options.headers, ...(key ? { Authorization: `Bearer ${key}` } : {}) };
    const answer = await fetch(path, { ...options, headers, credentials: "omit" });
    if (answer.status === 401) {
      await askForKey(key !== null);
      continue;
    }
    if (!answer.ok) {
      const body = await answer.json().catch(() => null);
      throw new Refused(answer.status, body?.error?.message ?? `The server answered ${answer.status}.`);
    }
    return answer;
  }
}

export async function get(path, parameters = {}) {
  const given = Object.entries(parameters).filter(([, value]) => value !== null && value !== undefined && value !== "");
  const query = new URLSearchParams(given).toString();
  return (await request(query ? `${path}?${query}` : path)).json();
}

export async function post(path, body, options = {}) {
  const headers = { "Content-Type": "application/json", ...options.headers };
  return request(path, { method: "POST", body: JSON.stringify(body), signal: options.signal, headers });
}

/**
 * Stream an answer. Calls `begun` with the reply's headers, then `piece` with each {content, reasoning_content}.
 * @throws Refused when the server says no, or fails in the middle; AbortError when the signal says stop.
 */
export async function streamAnswer(body, { headers, signal, begun, piece }) {
  const answer = await post("/v1/chat/completions", { ...body, stream: true }, { headers, signal });
  begun(answer.headers);
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const events = (rest + value).split("\n\n");
    rest = events.pop();
    for (const event of events) {
      const data = event.slice(event.indexOf("data: ") + 6);
      if (data === "[DONE]") continue;
      const read = JSON.parse(data);
      if (read.error) throw new Refused(500, read.error.message);
      if (read.choices[0]) piece(read.choices[0].delta);
    }
  }
}

let asking = null;

/** Ask once, however many requests wait for the key. */
function askForKey(wasWrong) {
  asking ??= new Promise((resolve) => {
    const dialog = $("key-dialog");
    $("key-error").textContent = wasWrong ? "The server did not accept this key." : "";
    $("key").value = "";
    dialog.addEventListener("cancel", (event) => event.preventDefault());
    $("key-form").onsubmit = () => {
      sessionStorage.setItem(KEY, $("key").value.trim());
      asking = null;
      resolve();
    };
    if (!dialog.open) dialog.showModal();
  });
  return asking;
}
