// Requests that are in flight, with the phase that each is in.

import { attribute, el, keyed, show, text } from "./dom.js";
import { setTime, timeSince } from "./clock.js";
import { modelHref } from "./memory.js";

/** @typedef {import("./types.js").InFlight} InFlight */

/** @type {Record<import("./types.js").Phase, string>} */
const PHASES = {
  parked: "waits for its model",
  connecting: "connects to the engine",
  waiting: "waits for the first token",
  streaming: "streams",
};

/** The section, which `update` fills. @param {{title: string, models: boolean}} shows */
export function requestsSection({ title, models }) {
  const body = el("tbody", { role: "rowgroup" });
  const empty = el("p", { class: "empty" });
  const more = el("p", { class: "notes" });
  const names = [...(models ? ["Model"] : []), "Phase", "In it for", "Age", "Tokens", "Route", "Key"];
  const head = el(
    "tr",
    { role: "row" },
    ...names.map((name) => el("th", { scope: "col", role: "columnheader" }, name)),
  );
  const table = el(
    "table",
    { class: "cards requests", role: "table", "aria-labelledby": "requests" },
    el("thead", { role: "rowgroup" }, head),
    body,
  );
  const root = el(
    "section",
    { "aria-labelledby": "requests" },
    el("div", { class: "section-head" }, el("h2", { id: "requests" }, title)),
    el("div", { class: "scroll" }, table),
    empty,
    more,
  );
  /** @param {InFlight[]} requests @param {number} [total] */
  const update = (requests, total = requests.length) => {
    keyed(
      body,
      requests,
      // A client may give several requests one id.
      ({ id, model, started }) => `${id} ${started} ${model}`,
      (request) => requestRow(request, models),
    );
    show(table, requests.length > 0);
    show(empty, requests.length === 0);
    text(empty, "No request is in flight. Send one from any OpenAI client, or from Chat above.");
    show(more, total > requests.length);
    text(more, `The ${requests.length} oldest of ${total.toLocaleString("en")} requests.`);
  };
  return { root, update };
}

/** @param {InFlight} request @param {boolean} models */
function requestRow({ id, model, started, route, key }, models) {
  const cell = (/** @type {string} */ label, /** @type {Node | string} */ child) =>
    el("td", { role: "cell", data: { label } }, child);
  const phase = el("span");
  const steps = el("span", { class: "steps", "aria-hidden": "true" }, ...Object.keys(PHASES).map(() => el("i")));
  const since = timeSince(started);
  const tokens = el("span");
  const cells = [
    el("td", { role: "cell", data: { label: "Phase" } }, steps, phase),
    cell("In it for", since),
    cell("Age", timeSince(started)),
    cell("Tokens", tokens),
    cell("Route", route),
    cell("Key", key ?? "–"),
  ];
  if (models) cells.unshift(cell("Model", el("a", { href: modelHref(model) }, model)));
  const root = el("tr", { role: "row", title: `Request ${id}` }, ...cells);
  /** @param {InFlight} request */
  const update = (request) => {
    text(phase, PHASES[request.phase] ?? request.phase);
    attribute(steps, "data-phase", request.phase);
    setTime(since, request.since);
    text(tokens, request.tokens ?? "–");
  };
  return { root, update };
}
