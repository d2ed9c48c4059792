// A model's numbers and its engines.

import { el, keyed, show, text } from "./dom.js";
import { setTime, timeSince } from "./clock.js";
import { bytes, duration, perSecond } from "./format.js";
import { firstToken, quoteOf } from "./models.js";
import { store } from "./store.js";

/** @typedef {import("./types.js").Engine} Engine */
/** @typedef {import("./types.js").Model} Model */

/** The numbers, which `update` fills. */
export function factsSection() {
  const list = el("dl", { class: "facts" });
  const root = el("section", { "aria-labelledby": "facts" }, el("h2", { id: "facts" }, "Numbers"), list);
  /** @param {Model} model */
  const update = (model) => {
    const { declared, learned } = model;
    const quote = quoteOf(model);
    const rate = store.snapshot.rates.find((entry) => entry.model === model.name);
    /** @type {[string, string][]} */
    const facts = [
      ["Answers in", `${quote.likely}${quote.spread && ` (${quote.spread})`}`],
      ["Waiting, in use", `${model.waiting}, ${model.leases}`],
      ["Declared memory", bytes(declared)],
      ["Most memory used", bytes(learned.peak)],
      ["Memory asleep", bytes(learned.residue)],
      ["Start takes", duration(learned.start)],
      ["Wake takes", duration(learned.wake)],
      ["Sleep takes", duration(learned.sleep)],
      [
        "Requests, tokens",
        rate ? `${perSecond(rate.requestsPerSecond)}, ${perSecond(rate.tokensPerSecond)}` : "none in the last minute",
      ],
      ["First token", rate?.firstToken ? firstToken(rate.firstToken).replace("first token ", "") : "–"],
    ];
    keyed(list, facts, ([name]) => name, factLine);
  };
  return { root, update };
}

/** @param {[string, string]} first */
function factLine([name]) {
  const value = el("dd");
  return {
    root: el("div", {}, el("dt", {}, name), value),
    update: (/** @type {[string, string]} */ [, next]) => text(value, next),
  };
}

/** The engines, which `update` fills. */
export function enginesSection() {
  const body = el("tbody", { role: "rowgroup" });
  const names = ["Engine", "State", "For", "In use", "Accelerators", "Reserved", "Host RAM", "Generation"];
  const head = el(
    "tr",
    { role: "row" },
    ...names.map((name) => el("th", { scope: "col", role: "columnheader" }, name)),
  );
  const table = el(
    "table",
    { class: "cards", role: "table", "aria-labelledby": "engines" },
    el("thead", { role: "rowgroup" }, head),
    body,
  );
  const empty = el("p", { class: "empty" }, "No engine. Wake the model, or send it a request.");
  const root = el(
    "section",
    { "aria-labelledby": "engines" },
    el("h2", { id: "engines" }, "Engines"),
    el("div", { class: "scroll" }, table),
    empty,
  );
  /** @param {Engine[]} engines */
  const update = (engines) => {
    keyed(body, engines, ({ engine }) => engine, engineRow);
    show(table, engines.length > 0);
    show(empty, engines.length === 0);
  };
  return { root, update };
}

/** @param {Engine} first */
function engineRow({ engine, since }) {
  const names = ["State", "For", "In use", "Accelerators", "Reserved", "Host RAM", "Generation"];
  const cells = names.map((label) => el("td", { role: "cell", data: { label } }));
  const [state, age, leases, accelerators, reserved, host, generation] = cells;
  const time = timeSince(since);
  age.append(time);
  const root = el("tr", { role: "row" }, el("th", { scope: "row", role: "rowheader" }, engine), ...cells);
  /** @param {Engine} next */
  const update = (next) => {
    text(state, next.saturation ? `${next.state}, saturated` : next.state);
    setTime(time, next.since);
    text(leases, next.leases);
    text(accelerators, next.accelerators.join(", ") || "–");
    text(reserved, next.accelerators.length > 1 ? `${bytes(next.reserved)} each` : bytes(next.reserved));
    text(host, bytes(next.host));
    text(generation, next.generation);
  };
  return { root, update };
}
