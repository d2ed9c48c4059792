// The last minutes as one lane per model: how long each wake, sleep or start took, and when.

import { attribute, el, keyed, show, text } from "./dom.js";
import { now } from "./clock.js";
import { duration } from "./format.js";
import { modelOf } from "./store.js";

/** @typedef {import("./types.js").TimelineEvent} TimelineEvent */

const SPANS = /** @type {[string, number][]} */ ([
  ["1 min", 60_000],
  ["10 min", 600_000],
  ["1 h", 3_600_000],
  ["6 h", 21_600_000],
]);
const MOST_LANES = 12;

/** The section, which `update` fills. */
export function lanesSection() {
  let span = SPANS[1][1];
  /** @type {TimelineEvent[]} */
  let events = [];
  const chips = SPANS.map(([name, length]) => ({
    length,
    button: el("button", { type: "button", class: "chip", onclick: () => ((span = length), render()) }, name),
  }));
  const lanes = el("div", { class: "lanes" });
  const from = el("span");
  const note = el("span");
  // The list below says the same in words.
  const picture = el(
    "div",
    { "aria-hidden": "true" },
    lanes,
    el("p", { class: "axis" }, from, note, el("span", {}, "now")),
  );
  const root = el(
    "section",
    { "aria-label": "Lanes" },
    el(
      "div",
      { class: "section-head" },
      el("h2", {}, "Lanes"),
      el(
        "div",
        { class: "chips", role: "group", "aria-label": "Length of the lanes" },
        ...chips.map(({ button }) => button),
      ),
    ),
    picture,
  );

  function render() {
    const end = now();
    const start = end - span;
    for (const { length, button } of chips) attribute(button, "aria-pressed", String(length === span));
    text(from, `${duration(span)} ago`);
    /** @type {Map<string, TimelineEvent[]>} */
    const byModel = new Map();
    for (const event of events) {
      if (event.at < start) break;
      const name = event.model ?? (event.engine ? modelOf(event.engine) : "");
      if (name) byModel.set(name, [...(byModel.get(name) ?? []), event]);
    }
    const names = [...byModel.keys()];
    text(
      note,
      names.length > MOST_LANES
        ? `${names.length - MOST_LANES} more models below`
        : names.length === 0
          ? "nothing happened"
          : "",
    );
    const shown = names.slice(0, MOST_LANES).sort();
    const rows = shown.map((name) => ({
      name,
      marks: (byModel.get(name) ?? []).map((event) => ({ event, start, span })),
    }));
    keyed(lanes, rows, ({ name }) => name, lane);
    show(lanes, rows.length > 0);
  }

  /** @param {TimelineEvent[]} next Newest first. */
  const update = (next) => {
    events = next;
    render();
  };
  return { root, update };
}

/** @param {{name: string}} first */
function lane({ name }) {
  const track = el("div", { class: "track" });
  const root = el("div", { class: "lane" }, el("span", { class: "lane-name", title: name }, name), track);
  /** @param {{marks: {event: TimelineEvent, start: number, span: number}[]}} row */
  const update = ({ marks }) => keyed(track, marks, ({ event }) => event, mark);
  return { root, update };
}

/** @param {{event: TimelineEvent}} first */
function mark({ event }) {
  const took = event.took ?? 0;
  const root = el("i", {
    class: "mark",
    data: { what: event.what },
    title: `${event.what}${took > 0 ? `, took ${duration(took)}` : ""}`,
  });
  /** @param {{start: number, span: number}} place */
  const update = ({ start, span }) => {
    const left = Math.max(0, (event.at - took - start) / span);
    const right = Math.min(1, (event.at - start) / span);
    root.style.setProperty("--left", left.toFixed(4));
    root.style.setProperty("--length", Math.max(0, right - left).toFixed(4));
  };
  return { root, update };
}
