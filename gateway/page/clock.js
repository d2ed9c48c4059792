// The gateway's clock, and texts that count with it: ages are of the gateway's times, whatever this machine's clock
// says.

import { el, text } from "./dom.js";
import { ago, elapsed, moment } from "./format.js";

let offset = 0;

/** Takes the time of a message that has just come. @param {number} at */
export function gatewayTime(at) {
  offset = at - Date.now();
}

/** The gateway's time, as well as it is known. */
export function now() {
  return Date.now() + offset;
}

/** A moment as "5 s ago", with its date as title. @param {number} at */
export function timeAgo(at) {
  return setTime(el("time", { data: { shows: "ago" } }), at);
}

/** How long something has lasted: "12 s". @param {number} since */
export function timeSince(since) {
  return setTime(el("time", { data: { shows: "elapsed" } }), since);
}

/** Gives one of these elements another moment. @param {HTMLTimeElement} element @param {number} at */
export function setTime(element, at) {
  if (element.dataset.at !== String(at)) {
    element.dataset.at = String(at);
    element.dateTime = new Date(at).toISOString();
    element.title = moment(at);
    tick(element);
  }
  return element;
}

/** @param {HTMLTimeElement} element */
function tick(element) {
  const age = Math.max(0, now() - Number(element.dataset.at));
  text(element, element.dataset.shows === "ago" ? ago(age) : elapsed(age));
}

/** Keeps all such elements of the document up to date. */
export function startClock() {
  setInterval(() => {
    if (!document.hidden)
      for (const element of document.querySelectorAll("time[data-at]")) tick(/** @type {HTMLTimeElement} */ (element));
  }, 1000);
}
