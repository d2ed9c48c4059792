// The one stream that feeds the page, which is opened again whenever it ends.

import { ApiError, call, reasonOf } from "./api.js";
import { gatewayTime } from "./clock.js";
import { events } from "./sse.js";
import { addTimeline, setConnection, setSnapshot } from "./store.js";

// The gateway sends a comment at least every 15 s.
const SILENCE = 40_000;
const FIRST_PAUSE = 500;
const LONGEST_PAUSE = 15_000;

let pause = FIRST_PAUSE;
let generation = 0;
/** @type {AbortController | null} */
let running = null;
/** @type {ReturnType<typeof setTimeout> | undefined} */
let timer;

/** Connects now, instead of whatever is under way. */
export function connect() {
  disconnect();
  void run(++generation);
}

/** Ends the stream, and tries no more. */
export function disconnect() {
  generation += 1;
  clearTimeout(timer);
  running?.abort();
  running = null;
}

/** @param {number} mine */
async function run(mine) {
  const controller = new AbortController();
  running = controller;
  let silence = setTimeout(() => controller.abort(), SILENCE);
  const heard = () => {
    clearTimeout(silence);
    silence = setTimeout(() => controller.abort(), SILENCE);
  };
  let reason = "the gateway ended the connection";
  try {
    const response = await call("/admin/v1/live", { signal: controller.signal });
    for await (const { event, data } of events(response, heard)) {
      if (mine !== generation) return;
      take(event, data);
    }
  } catch (error) {
    if (mine !== generation) return;
    // The login takes over, which connects again.
    if (error instanceof ApiError && error.status === 401) return setConnection({ state: "locked" });
    reason = controller.signal.aborted ? "the gateway is silent" : reasonOf(error);
  } finally {
    clearTimeout(silence);
  }
  if (mine !== generation) return;
  // Many pages that lose one gateway must not all come back at the same moment.
  const delay = pause * (0.75 + Math.random() / 2);
  pause = Math.min(pause * 2, LONGEST_PAUSE);
  setConnection({ state: "lost", reason, retryAt: Date.now() + delay });
  timer = setTimeout(connect, delay);
}

/** @param {string} event @param {string} data */
function take(event, data) {
  if (event === "snapshot") {
    const snapshot = JSON.parse(data);
    gatewayTime(snapshot.at);
    pause = FIRST_PAUSE;
    setConnection({ state: "live" });
    setSnapshot(snapshot);
  } else if (event === "timeline") {
    addTimeline(JSON.parse(data));
  }
  // `missed` needs nothing: each snapshot is complete.
}
