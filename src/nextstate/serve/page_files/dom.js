// Building the page. Text is only ever set as text: nothing here, or anywhere on the page, reads a string as markup.

const SVG = "http://www.w3.org/2000/svg";

/** An element. Properties are set as they are (`className`, `onclick`); names with a dash, `role` and `for` as attributes. */
export function el(name, properties = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(properties)) {
    if (value === undefined || value === null) continue;
    if (key.includes("-") || key === "role" || key === "for") made.setAttribute(key, value);
    else made[key] = value;
  }
  made.append(...children.filter((child) => child !== null && child !== undefined && child !== ""));
  return made;
}

/** An SVG tree from {name, attributes, text, children}, as /api/learning gives it. */
export function svg({ name, attributes, text, children = [] }) {
  const made = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  if (text) made.append(text);
  made.append(...children.map(svg));
  return made;
}

const PATHS = {
  menu: "M4 7h16M4 12h16M4 17h16",
  send: "M12 19V5M6 11l6-6 6 6",
  stop: "M7 7h10v10H7z",
  good: "M7 11v9H4v-9zM7 11l4-8c1.7 0 2.7 1.2 2.4 2.8L13 9h5.5a2 2 0 0 1 2 2.4l-1.3 7a2 2 0 0 1-2 1.6H7",
  bad: "M7 13V4H4v9zM7 13l4 8c1.7 0 2.7-1.2 2.4-2.8L13 15h5.5a2 2 0 0 0 2-2.4l-1.3-7a2 2 0 0 0-2-1.6H7",
  again: "M20 12a8 8 0 1 1-2.5-5.8M20 3v5h-5",
  edit: "M4 20h4L19 9l-4-4L4 16zM13 7l4 4",
  copy: "M9 9h11v11H9zM5 15H4V4h11v1",
  tokens: "M4 6h5v5H4zM11 6h9v5h-9zM4 13h9v5H4zM15 13h5v5h-5z",
  back: "M14 6l-6 6 6 6",
  forth: "M10 6l6 6-6 6",
};

export function icon(name) {
  const path = { name: "path", attributes: { d: PATHS[name] } };
  return svg({ name: "svg", attributes: { viewBox: "0 0 24 24", class: "icon", "aria-hidden": "true" }, children: [path] });
}

/** A button that shows an icon and says its name to those who do not see it, and to a pointer that rests on it. */
export function iconButton(name, label, onclick, properties = {}) {
  return el("button", { type: "button", className: "icon-button", title: label, "aria-label": label, onclick, ...properties }, icon(name));
}

const byId = (id) => document.getElementById(id);
export { byId as $ };

/** Say something to those who listen to the page. */
export function announce(text) {
  byId("announce").textContent = text;
}

export function when(seconds) {
  const date = new Date(seconds * 1000);
  const today = new Date().toDateString() === date.toDateString();
  return date.toLocaleString([], today ? { timeStyle: "short" } : { dateStyle: "medium", timeStyle: "short" });
}

export function plural(count, noun) {
  return `${count} ${noun}${count === 1 ? "" : "s"}`;
}
