// The newest data, and who wants to know of it.

/** @typedef {import("./types.js").Snapshot} Snapshot */
/** @typedef {import("./types.js").TimelineEvent} TimelineEvent */
/** @typedef {{state: "connecting" | "live" | "lost" | "locked", reason?: string, retryAt?: number}} Connection */

const KEPT_EVENTS = 1000;

const EMPTY = /** @type {Snapshot} */ ({
  at: 0,
  fleet: { accelerators: [], host: { capacity: 0, reserved: 0 }, models: [], engines: [] },
  requests: [],
  rates: [],
});

export const store = {
  /** @type {Snapshot} */
  snapshot: EMPTY,
  /** Whether a snapshot has come at all. */
  loaded: false,
  /** @type {number} This machine's time when the newest snapshot came. */
  received: 0,
  /** @type {TimelineEvent[]} Oldest first. */
  timeline: [],
  /** @type {Connection} */
  connection: { state: "connecting" },
};

const changes = new EventTarget();
/** @type {Set<string>} */
const known = new Set();

/**
 * Calls `listener` after each change of `what`; the result ends that.
 *
 * @param {"data" | "connection" | "states"} what
 * @param {(event: Event) => void} listener
 */
export function subscribe(what, listener) {
  changes.addEventListener(what, listener);
  return () => changes.removeEventListener(what, listener);
}

/** @param {Snapshot} snapshot */
export function setSnapshot(snapshot) {
  const before = new Map(store.snapshot.fleet.models.map((model) => [model.name, model.state]));
  const changed = snapshot.fleet.models.filter(({ name, state }) => before.has(name) && before.get(name) !== state);
  store.snapshot = snapshot;
  store.loaded = true;
  store.received = Date.now();
  changes.dispatchEvent(new Event("data"));
  if (changed.length > 0) changes.dispatchEvent(new CustomEvent("states", { detail: changed }));
}

/**
 * Takes an event, unless it is known: after each connection the gateway repeats the last ones.
 *
 * @param {TimelineEvent} event
 */
export function addTimeline(event) {
  const key = JSON.stringify(event);
  if (known.has(key)) return;
  known.add(key);
  const { timeline } = store;
  const later = timeline.findIndex(({ at }) => at > event.at);
  timeline.splice(later < 0 ? timeline.length : later, 0, event);
  if (timeline.length > KEPT_EVENTS) known.delete(JSON.stringify(timeline.shift()));
  changes.dispatchEvent(new Event("data"));
}

/** @param {Connection} connection */
export function setConnection(connection) {
  store.connection = connection;
  changes.dispatchEvent(new Event("connection"));
}

/** Forgets everything: after a logout, another person may look. */
export function forget() {
  Object.assign(store, { snapshot: EMPTY, loaded: false, received: 0, timeline: [] });
  known.clear();
  changes.dispatchEvent(new Event("data"));
}

/** @param {string} name */
export function modelNamed(name) {
  return store.snapshot.fleet.models.find((model) => model.name === name);
}

/** The engines of a model. @param {string} name */
export function enginesOf(name) {
  return store.snapshot.fleet.engines.filter(({ engine }) => modelOf(engine) === name);
}

/** The model of an engine's name, which is `MODEL#REPLICA`. @param {string} engine */
export function modelOf(engine) {
  const at = engine.lastIndexOf("#");
  return at < 0 ? engine : engine.slice(0, at);
}
