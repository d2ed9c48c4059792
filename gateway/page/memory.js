// One bar per accelerator and one for host RAM: who holds what, in colours, patterns and words.

import { attribute, el, keyed, show, text } from "./dom.js";
import { bytes, plural } from "./format.js";
import { modelOf } from "./store.js";

/** @typedef {import("./types.js").Accelerator} Accelerator */
/** @typedef {import("./types.js").Engine} Engine */
/** @typedef {import("./types.js").Fleet} Fleet */
/** @typedef {"awake" | "reserved" | "residue" | "foreign" | "free"} Kind */
/** @typedef {{kind: Kind, model: string, bytes: number}} Part */
/**
 * @typedef {{id: string, title: string, capacity: number, parts: Part[], notes: string[], alarm: string}} Memory
 */

/** @type {Record<Kind, string>} */
const KINDS = {
  awake: "awake",
  reserved: "reserved",
  residue: "asleep",
  foreign: "other programs",
  free: "free",
};

// More sleepers than this on one bar are one piece of it, and more names than this are not listed.
const MOST_PIECES = 8;
const MOST_NAMES = 4;
const MOST_BARS = 24;

/** The section, which `update` fills. */
export function memorySection() {
  const bars = el("div", { class: "bars" });
  const more = el("button", { type: "button", class: "quiet", onclick: () => ((all = true), render()) });
  const root = el(
    "section",
    { "aria-labelledby": "memory" },
    el("div", { class: "section-head" }, el("h2", { id: "memory" }, "Memory"), legend()),
    bars,
    more,
  );
  let all = false;
  /** @type {Memory[]} */
  let memories = [];
  const render = () => {
    keyed(bars, all ? memories : memories.slice(0, MOST_BARS), ({ id }) => id, memoryBar);
    show(more, !all && memories.length > MOST_BARS);
    text(more, `Show all ${memories.length} bars`);
  };
  /** @param {Fleet} fleet */
  const update = (fleet) => {
    memories = memoriesOf(fleet);
    render();
  };
  return { root, update };
}

/** What is where. @param {Fleet} fleet @returns {Memory[]} */
function memoriesOf({ accelerators, host, engines }) {
  /** @type {Map<string, Engine[]>} */
  const on = new Map(accelerators.map(({ id }) => [id, []]));
  for (const engine of engines) for (const id of new Set(engine.accelerators)) on.get(id)?.push(engine);
  const memories = accelerators.map((accelerator) => acceleratorMemory(accelerator, on.get(accelerator.id) ?? []));
  if (host.capacity > 0 || host.reserved > 0) memories.push(hostMemory(host, engines));
  return memories;
}

/** @param {Accelerator} accelerator @param {Engine[]} engines @returns {Memory} */
function acceleratorMemory({ id, capacity, reserved, observed, healthy, units, unitsTaken, pool, node }, engines) {
  const parts = partsOf(engines, ({ reserved }) => reserved, reserved);
  // What the meter shows beyond all that engines may use is of programs that Rouse does not know.
  const foreign = observed === null ? 0 : Math.max(0, Math.min(observed, capacity) - reserved);
  if (foreign > 0) parts.push({ kind: "foreign", model: "", bytes: foreign });
  const notes = [];
  if (node !== undefined) notes.push(node);
  if (units !== undefined)
    notes.push(`${unitsTaken ?? 0} of ${plural(units, pool === undefined ? "accelerator" : "slot")} taken`);
  notes.push(observed === null ? "no meter" : `meter ${bytes(observed)}`);
  return {
    id: `accelerator ${id}`,
    title: id,
    capacity,
    parts: withFree(parts, capacity),
    notes,
    alarm: healthy ? "" : "unhealthy",
  };
}

/** @param {Fleet["host"]} host @param {Engine[]} engines @returns {Memory} */
function hostMemory({ capacity, reserved }, engines) {
  const parts = partsOf(engines, ({ host }) => host, reserved).map((part) =>
    part.kind === "awake" ? { ...part, kind: /** @type {Kind} */ ("reserved") } : part,
  );
  return {
    id: "host",
    title: "Host RAM",
    capacity,
    parts: withFree(parts, capacity),
    notes: ["for sleeping models"],
    alarm: "",
  };
}

/** @param {Engine[]} engines @param {(engine: Engine) => number} sizeOf @param {number} reserved @returns {Part[]} */
function partsOf(engines, sizeOf, reserved) {
  const parts = engines.map((engine) => ({
    kind: kindOf(engine.state),
    model: modelOf(engine.engine),
    bytes: sizeOf(engine),
  }));
  const rest = reserved - parts.reduce((sum, part) => sum + part.bytes, 0);
  if (rest > 0) parts.push({ kind: "reserved", model: "", bytes: rest });
  const order = Object.keys(KINDS);
  return parts.filter((part) => part.bytes > 0).sort((a, b) => order.indexOf(a.kind) - order.indexOf(b.kind));
}

/** @param {Part[]} parts @param {number} capacity */
function withFree(parts, capacity) {
  const free = capacity - parts.reduce((sum, part) => sum + part.bytes, 0);
  return free > 0 ? [...parts, { kind: /** @type {Kind} */ ("free"), model: "", bytes: free }] : parts;
}

/**
 * What an engine in this state has of its reservation: reserved is what it is about to fill or to leave.
 *
 * @param {string} state
 * @returns {Kind}
 */
export function kindOf(state) {
  if (/^(Awake|Draining)/.test(state)) return "awake";
  return state.startsWith("Asleep") ? "residue" : "reserved";
}

function memoryBar() {
  const title = el("h3");
  const alarm = el("strong", { class: "badge alarm" });
  const notes = el("span", { class: "notes" });
  const bar = el("div", { class: "bar", "aria-hidden": "true" });
  const list = el("ul", { class: "parts" });
  const root = el("article", { class: "memory" }, el("div", { class: "memory-head" }, title, alarm, notes), bar, list);
  /** @param {Memory} memory */
  const update = (memory) => {
    text(title, `${memory.title} · ${bytes(memory.capacity)}`);
    text(alarm, memory.alarm);
    show(alarm, memory.alarm !== "");
    text(notes, memory.notes.join(" · "));
    const total = Math.max(memory.capacity, sum(memory.parts));
    const pieces = piecesOf(memory.parts).map((part) => ({ ...part, share: part.bytes / total }));
    keyed(bar, pieces, ({ kind, model }) => `${kind} ${model}`, piece);
    keyed(list, [...grouped(memory.parts)], ([kind]) => kind, kindLine);
  };
  return { root, update };
}

/** The pieces of a bar: one per model and kind. @param {Part[]} parts @returns {Part[]} */
function piecesOf(parts) {
  const many = parts.filter(({ kind }) => kind === "residue").length > MOST_PIECES;
  /** @type {Map<string, Part>} */
  const pieces = new Map();
  for (const part of parts) {
    const model = many && part.kind === "residue" ? "" : part.model;
    const key = `${part.kind} ${model}`;
    pieces.set(key, { ...part, model, bytes: part.bytes + (pieces.get(key)?.bytes ?? 0) });
  }
  return [...pieces.values()];
}

/** @param {Part[]} parts @returns {Map<Kind, Part[]>} */
function grouped(parts) {
  const groups = new Map();
  for (const part of parts) groups.set(part.kind, [...(groups.get(part.kind) ?? []), part]);
  return groups;
}

/** @param {Part[]} parts */
function sum(parts) {
  return parts.reduce((total, part) => total + part.bytes, 0);
}

function piece() {
  const label = el("span");
  const root = el("div", {}, label);
  /** @param {Part & {share: number}} part */
  const update = (part) => {
    attribute(root, "class", `piece ${part.kind}`);
    attribute(root, "title", [part.model, KINDS[part.kind], bytes(part.bytes)].filter(Boolean).join(" · "));
    root.style.setProperty("--share", part.share.toFixed(4));
    text(label, part.model);
  };
  return { root, update };
}

/** The line of one kind: its size, and of which models. */
function kindLine() {
  const size = el("b");
  const name = el("span");
  const models = el("span", { class: "names" });
  const swatch = el("i");
  const root = el("li", {}, swatch, name, size, models);
  /** @param {[Kind, Part[]]} entry */
  const update = ([kind, parts]) => {
    attribute(swatch, "class", `swatch ${kind}`);
    text(name, KINDS[kind]);
    text(size, bytes(sum(parts)));
    const names = [...new Set(parts.map(({ model }) => model))].filter(Boolean);
    const shown = names.slice(0, MOST_NAMES).map((model) => ({ model }));
    if (names.length > MOST_NAMES) shown.push({ model: `and ${names.length - MOST_NAMES} more` });
    keyed(
      models,
      shown,
      ({ model }) => model,
      () => nameLink(names),
    );
    show(models, names.length > 0);
  };
  return { root, update };
}

/** @param {string[]} names */
function nameLink(names) {
  const root = el("span");
  /** @param {{model: string}} entry */
  const update = ({ model }) => {
    if (root.childNodes.length > 0) return;
    root.append(names.includes(model) ? el("a", { href: modelHref(model) }, model) : model);
  };
  return { root, update };
}

/** @param {string} model */
export function modelHref(model) {
  return `#/models/${encodeURIComponent(model)}`;
}

function legend() {
  const entries = Object.entries(KINDS).map(([kind, name]) => el("li", {}, el("i", { class: `swatch ${kind}` }), name));
  return el("ul", { class: "legend", "aria-label": "What the bars show" }, ...entries);
}
