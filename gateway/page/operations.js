// Orders to models, and what became of them. They outlive the view that gave them.

import { ApiError, json, modelPath, reasonOf } from "./api.js";
import { now } from "./clock.js";

/** @typedef {"wake" | "sleep" | "stop" | "pin" | "unpin"} Order */
/** @typedef {{order: Order, since: number, state: "running" | "done" | "failed", reason: string | null}} Outcome */

const FIRST_LOOK = 150;
const LONGEST_LOOK = 2000;

/** @type {Map<string, Outcome>} By model, the newest order. */
const newest = new Map();
const changes = new EventTarget();

/** @param {() => void} listener */
export function onOperation(listener) {
  changes.addEventListener("change", listener);
  return () => changes.removeEventListener("change", listener);
}

/** @param {string} model */
export function newestOrder(model) {
  return newest.get(model);
}

/**
 * Gives an order, and follows it until it is done.
 *
 * @param {string} model
 * @param {Order} order
 * @param {string} [query]
 */
export async function give(model, order, query = "") {
  const outcome = /** @type {Outcome} */ ({ order, since: now(), state: "running", reason: null });
  const set = (/** @type {Partial<Outcome>} */ change) => {
    Object.assign(outcome, change);
    changes.dispatchEvent(new Event("change"));
  };
  newest.set(model, outcome);
  set({});
  try {
    const { operation } = await json(modelPath(model, order) + query, { method: "POST" });
    for (let pause = FIRST_LOOK; newest.get(model) === outcome; pause = Math.min(pause * 1.5, LONGEST_LOOK)) {
      await new Promise((resolve) => setTimeout(resolve, pause));
      const { state, reason } = await look(operation);
      if (state !== "running") return set({ state, reason });
    }
  } catch (error) {
    set({ state: "failed", reason: reasonOf(error) });
  }
}

/** An order goes on while the gateway cannot be reached. @param {number} operation */
async function look(operation) {
  try {
    return await json(`/admin/v1/operations/${operation}`);
  } catch (error) {
    if (error instanceof ApiError) throw error;
    return { state: "running", reason: null };
  }
}
