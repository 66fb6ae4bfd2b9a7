// A session as a tree of turns: which branch is shown, and what a request that goes on from it says.

export class Session {
  constructor(key, id = null) {
    this.key = key;
    this.id = id; // null until the first answer has begun
    this.turns = new Map();
    this.tip = null; // the last turn of the branch that is shown
    this.cursor = null;
    this.before = null; // where older turns begin
  }

  /** A new session of this page. */
  static fresh() {
    return new Session(`page-${crypto.randomUUID().slice(0, 13)}`);
  }

  /** Whether the page made it. One of another client is that one's to go on with: its tools are there. */
  get own() {
    return this.key.startsWith("page-");
  }

  add(turns) {
    for (const turn of turns) this.turns.set(turn.turn_id, turn);
  }

  /** The turns from the first one that is loaded to the tip. */
  get branch() {
    const path = [];
    for (let turn = this.turns.get(this.tip); turn; turn = this.turns.get(turn.parent_turn_id)) path.unshift(turn);
    return path;
  }

  /** All turns that stand where this one does: answers of the same request, and requests in its place. */
  beside(turn) {
    const same = (other) => other.parent_turn_id === turn.parent_turn_id && other.kind !== "side";
    return [...this.turns.values()].filter(same).sort((a, b) => a.turn_id - b.turn_id);
  }

  /** The newest turn of what follows a turn; itself if nothing does. */
  newestAfter(turn) {
    const children = [...this.turns.values()].filter((other) => other.parent_turn_id === turn.turn_id && other.kind !== "side");
    if (!children.length) return turn.turn_id;
    return this.newestAfter(children.reduce((a, b) => (a.turn_id > b.turn_id ? a : b)));
  }

  /** Show the branch of the newest turn. */
  showNewest() {
    const main = [...this.turns.values()].filter((turn) => turn.kind !== "side");
    this.tip = main.length ? Math.max(...main.map((turn) => turn.turn_id)) : null;
  }

  /** The messages of a request that says something new behind a turn; null: at the beginning. */
  messagesAfter(turn) {
    const messages = [];
    for (let at = turn; at; at = this.turns.get(at.parent_turn_id)) {
      const answer = at.answer ? [{ role: "assistant", content: at.answer }] : [];
      messages.unshift(...said(at), ...answer);
    }
    return messages;
  }
}

/** What was said to the model in a turn's request behind the answer that it continues. */
export function said(turn) {
  if (turn.parent_turn_id === null) return turn.messages;
  const last = turn.messages.findLastIndex((message) => message.role === "assistant");
  return turn.messages.slice(last + 1);
}
