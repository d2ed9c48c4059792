// The models as a table that can be searched: cards on a phone.

import { attribute, el, keyed, show, text } from "./dom.js";
import { timeSince, setTime } from "./clock.js";
import { bytes, duration, perSecond, plural, wait } from "./format.js";
import { modelHref } from "./memory.js";
import { give, newestOrder } from "./operations.js";
import { modelOf } from "./store.js";

/** @typedef {import("./types.js").Model} Model */
/** @typedef {import("./types.js").Rate} Rate */
/** @typedef {import("./types.js").Snapshot} Snapshot */
/** @typedef {{model: Model, rate: Rate | undefined, since: number | undefined}} Row */

const PAGE = 50;

/** @type {[string, string, (model: Model) => boolean][]} */
const FILTERS = [
  ["all", "All", () => true],
  ["waiting", "Waited for", ({ waiting }) => waiting > 0],
  ["awake", "Awake", ({ state }) => state === "awake"],
  ["launching", "Starting", ({ state }) => state === "launching"],
  ["asleep", "Asleep", ({ state }) => state === "asleep"],
  ["cold", "Cold", ({ state }) => state === "cold"],
  ["failed", "Failed", ({ state }) => state === "failed" || state === "unplaceable"],
];

/** The section, which `update` fills. */
export function modelsSection() {
  let shown = PAGE;
  let filter = "all";
  /** @type {Snapshot | null} */
  let snapshot = null;
  const search = el("input", {
    type: "search",
    placeholder: "Search",
    "aria-label": "Search models",
    spellcheck: "false",
    oninput: () => ((shown = PAGE), render()),
  });
  const chips = FILTERS.map(([id, name]) => {
    const count = el("span", { class: "count" });
    const button = el(
      "button",
      { type: "button", class: "chip", onclick: () => ((filter = id), (shown = PAGE), render()) },
      name,
      " ",
      count,
    );
    return { id, button, count };
  });
  const body = el("tbody", { role: "rowgroup" });
  const more = el("button", { type: "button", class: "quiet", onclick: () => ((shown += PAGE), render()) });
  const empty = el("p", { class: "empty" });
  const table = el("table", { class: "models cards", role: "table", "aria-labelledby": "models" }, head(), body);
  const root = el(
    "section",
    { "aria-labelledby": "models" },
    el(
      "div",
      { class: "section-head" },
      el("h2", { id: "models" }, "Models"),
      search,
      el(
        "div",
        { class: "chips", role: "group", "aria-label": "Show models that are" },
        ...chips.map(({ button }) => button),
      ),
    ),
    el("div", { class: "scroll" }, table),
    empty,
    more,
  );

  function render() {
    if (snapshot === null) return;
    const { models, engines } = snapshot.fleet;
    const wanted = search.value.trim().toLowerCase();
    const accepts = FILTERS.find(([id]) => id === filter)?.[2] ?? (() => true);
    const found = models.filter((model) => accepts(model) && model.name.toLowerCase().includes(wanted));
    for (const { id, button, count } of chips) {
      const counted = models.filter(/** @type {any} */ (FILTERS.find(([other]) => other === id))[2]).length;
      text(count, counted.toLocaleString("en"));
      attribute(button, "aria-pressed", String(id === filter));
      show(button, counted > 0 || id === "all" || id === filter);
    }
    const rates = new Map(snapshot.rates.map((rate) => [rate.model, rate]));
    const since = new Map();
    for (const engine of engines) {
      const name = modelOf(engine.engine);
      since.set(name, Math.max(engine.since, since.get(name) ?? 0));
    }
    const rows = found
      .slice(0, shown)
      .map((model) => ({ model, rate: rates.get(model.name), since: since.get(model.name) }));
    keyed(body, rows, ({ model }) => model.name, modelRow);
    show(table, rows.length > 0);
    show(empty, rows.length === 0);
    text(
      empty,
      models.length === 0
        ? "No models yet. List models in the configuration file, or create an InferenceModel; they appear here at once."
        : "No model matches. Clear the search, or choose All.",
    );
    show(more, found.length > shown);
    text(more, `Show ${Math.min(PAGE, found.length - shown)} more of ${plural(found.length, "model")}`);
  }

  /** @param {Snapshot} next */
  const update = (next) => {
    snapshot = next;
    render();
  };
  return { root, update };
}

function head() {
  const names = ["Model", "State", "Answers in", "Waiting", "In use", "Rates", "Why", "Order"];
  const cells = names.map((name) =>
    el("th", { scope: "col", role: "columnheader" }, name === "Order" ? el("span", { class: "hidden" }, name) : name),
  );
  return el("thead", { role: "rowgroup" }, el("tr", { role: "row" }, ...cells));
}

/** @param {Row} first */
function modelRow({ model: { name } }) {
  const cell = (/** @type {string} */ label, /** @type {Node[]} */ ...children) =>
    el("td", { role: "cell", data: { label } }, ...children);
  const pinned = el("span", { class: "badge" }, "pinned");
  const memory = el("small");
  const state = stateBadge();
  const since = timeSince(0);
  const likely = el("b");
  const spread = el("small");
  const waiting = el("b");
  const leases = el("b");
  const rates = el("span");
  const token = el("small");
  const why = el("span", { class: "why" });
  const order = el("small", { class: "order" });
  const button = el("button", { type: "button", onclick: () => give(name, button.dataset.order) });
  const root = el(
    "tr",
    { role: "row" },
    el("th", { scope: "row", role: "rowheader" }, el("a", { href: modelHref(name) }, name), pinned, memory),
    cell("State", state.root, since),
    cell("Answers in", likely, spread),
    cell("Waiting", waiting),
    cell("In use", leases),
    cell("Rates", rates, token),
    cell("Why", why, order),
    cell("", button),
  );
  /** @param {Row} row */
  const update = ({ model, rate, since: at }) => {
    show(pinned, model.pinned);
    text(memory, bytes(model.declared));
    state.update(model.state);
    show(since, at !== undefined);
    if (at !== undefined) setTime(since, at);
    const quote = quoteOf(model);
    text(likely, quote.likely);
    text(spread, quote.spread);
    count(waiting, model.waiting);
    count(leases, model.leases);
    text(rates, rate ? `${perSecond(rate.requestsPerSecond, "req")} · ${perSecond(rate.tokensPerSecond, "tok")}` : "–");
    text(token, rate?.firstToken ? firstToken(rate.firstToken) : "");
    attribute(rates.parentElement, "class", rate ? null : "nothing");
    text(why, model.reason);
    attribute(why, "title", model.reason);
    const given = newestOrder(name);
    text(order, given ? orderText(given) : "");
    attribute(order, "data-state", given?.state);
    const next = model.state === "awake" ? "sleep" : "wake";
    show(button, model.state !== "launching");
    button.dataset.order = next;
    text(button, next === "sleep" ? "Sleep" : "Wake");
    attribute(button, "aria-label", `${next === "sleep" ? "Sleep" : "Wake"} ${name}`);
    attribute(button, "aria-disabled", given?.state === "running" ? "true" : null);
  };
  return { root, update };
}

/** @param {HTMLElement} element @param {number} value */
function count(element, value) {
  text(element, value);
  attribute(element, "class", value === 0 ? "zero" : null);
}

/** @param {{p50: number | null, p95: number | null}} quantiles Seconds. */
export function firstToken({ p50, p95 }) {
  if (p50 === null) return "";
  return `first token ${duration(p50 * 1000)}, p95 ${p95 === null ? "–" : duration(p95 * 1000)}`;
}

/** A model's state as a shape and a word. */
export function stateBadge() {
  const word = el("span");
  const root = el("span", { class: "state" }, el("i", { "aria-hidden": "true" }), word);
  /** @param {string} state */
  const update = (state) => {
    attribute(root, "data-state", state);
    text(word, state === "launching" ? "starting" : state);
  };
  return { root, update };
}

/** How long until the model answers: quoted, or else what was learned of its starts. @param {Model} model */
export function quoteOf({ expectedWait, state, learned }) {
  if (expectedWait) return wait(expectedWait);
  if (state === "awake") return { likely: "at once", spread: "" };
  const about = state === "asleep" ? learned.wake : state === "cold" ? learned.start : null;
  return about === null ? { likely: "–", spread: "" } : { likely: `about ${duration(about)}`, spread: "" };
}

const ORDERS = { wake: "wake", sleep: "sleep", stop: "stop", pin: "pin", unpin: "unpin" };

/** What became of an order, in words. @param {import("./operations.js").Outcome} given */
export function orderText({ order, state, reason }) {
  const name = ORDERS[order];
  if (state === "running") return `Order to ${name} is under way`;
  return state === "done" ? `Order to ${name} is done` : `Order to ${name} failed: ${reason ?? "no reason given"}`;
}
