// What happened: wakes, sleeps, evictions, refusals, and what each cost.

import { attribute, el, keyed, show, text } from "./dom.js";
import { timeAgo } from "./clock.js";
import { bytes, duration, plural } from "./format.js";
import { lanesSection } from "./lanes.js";
import { modelHref } from "./memory.js";
import { modelOf, store } from "./store.js";

/** @typedef {import("./types.js").TimelineEvent} TimelineEvent */
/** @typedef {import("./types.js").What} What */

const PAGE = 100;

/** @type {Record<What, string>} */
const WORDS = {
  launched: "started",
  woke: "woke",
  slept: "fell asleep",
  evicted: "evicted",
  stopped: "stopped",
  failed: "failed",
  refused: "request refused",
  warned: "warning",
};

/** @type {[string, string, What[]][]} */
const FILTERS = [
  ["all", "Everything", /** @type {What[]} */ (Object.keys(WORDS))],
  ["up", "Starts and wakes", ["launched", "woke"]],
  ["down", "Sleeps and stops", ["slept", "stopped"]],
  ["evicted", "Evictions", ["evicted"]],
  ["trouble", "Refusals and failures", ["failed", "refused", "warned"]],
];

/** @param {URLSearchParams} query @returns {import("./types.js").View} */
export function timelineView(query) {
  let filter = "all";
  let shown = PAGE;
  const options = el("datalist", { id: "model-names" });
  const search = el("input", {
    type: "search",
    list: "model-names",
    placeholder: "Filter by model",
    "aria-label": "Filter by model",
    spellcheck: "false",
    oninput: () => ((shown = PAGE), update()),
  });
  search.value = query.get("model") ?? "";
  const chips = FILTERS.map(([id, name]) => {
    const button = el(
      "button",
      { type: "button", class: "chip", onclick: () => ((filter = id), (shown = PAGE), update()) },
      name,
    );
    return { id, button };
  });
  const lanes = lanesSection();
  const list = eventList(true);
  const more = el("button", { type: "button", class: "quiet", onclick: () => ((shown += PAGE), update()) });
  const root = el(
    "div",
    { class: "view" },
    el("div", { class: "title" }, el("h1", { tabindex: "-1" }, "Timeline")),
    el(
      "div",
      { class: "section-head" },
      search,
      options,
      el("div", { class: "chips", role: "group", "aria-label": "Show" }, ...chips.map(({ button }) => button)),
    ),
    lanes.root,
    el("section", { "aria-label": "Events" }, list.root, more),
  );
  const update = () => {
    const wanted = search.value.trim().toLowerCase();
    const kinds = FILTERS.find(([id]) => id === filter)?.[2] ?? [];
    const found = store.timeline
      .filter((event) => kinds.includes(event.what) && nameOf(event).toLowerCase().includes(wanted))
      .reverse();
    for (const { id, button } of chips) attribute(button, "aria-pressed", String(id === filter));
    lanes.update(found);
    list.update(
      found.slice(0, shown),
      store.timeline.length === 0
        ? "Nothing has happened yet. The first request for a model starts it, and this page shows what that costs."
        : "No event matches. Clear the filter, or choose Everything.",
    );
    show(more, found.length > shown);
    text(more, `Show ${Math.min(PAGE, found.length - shown)} more of ${plural(found.length, "event")}`);
    const names = [...new Set(store.timeline.map(nameOf))].filter(Boolean).sort();
    keyed(
      options,
      names,
      (name) => name,
      (name) => ({ root: el("option", { value: name }), update: () => {} }),
    );
  };
  return { title: "Timeline", root, update };
}

/** The events as a list, which `update` fills. @param {boolean} names Whether to name their models. */
export function eventList(names) {
  const list = el("ol", { class: names ? "events" : "events its" });
  const empty = el("p", { class: "empty" });
  const root = el("div", {}, list, empty);
  /** @param {TimelineEvent[]} events Newest first. @param {string} nothing What to say if there are none. */
  const update = (events, nothing) => {
    keyed(
      list,
      events,
      (event) => event,
      (event) => eventLine(event, names),
    );
    show(list, events.length > 0);
    show(empty, events.length === 0);
    text(empty, nothing);
  };
  return { root, update };
}

/** @param {TimelineEvent} event @param {boolean} names */
function eventLine(event, names) {
  const name = nameOf(event);
  const cost = [];
  if (event.took !== null && event.took !== undefined) cost.push(`took ${duration(event.took)}`);
  if (event.freed) cost.push(`freed ${bytes(event.freed)}`);
  const root = el(
    "li",
    { class: "event" },
    timeAgo(event.at),
    el(
      "span",
      { class: "what", data: { what: event.what } },
      el("i", { "aria-hidden": "true" }),
      WORDS[event.what] ?? event.what,
    ),
    names ? el("a", { href: modelHref(name), title: event.engine ?? null }, name) : null,
    el("b", { class: "cost" }, cost.join(" · ")),
    el("span", { class: "cause" }, event.cause ?? ""),
  );
  return { root, update: () => {} };
}

/** The model that an event is about. @param {TimelineEvent} event */
export function nameOf({ model, engine }) {
  return model ?? (engine ? modelOf(engine) : "");
}

/** The last events of one model, newest first. @param {string} model @param {number} most */
export function eventsOf(model, most) {
  return store.timeline
    .filter((event) => nameOf(event) === model)
    .slice(-most)
    .reverse();
}
