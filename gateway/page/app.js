// The frame around the views: routes, login, the connection's state, announcements.

import { el, oncePerFrame, show, text } from "./dom.js";
import { hasToken, setToken } from "./api.js";
import { chatView } from "./chat.js";
import { startClock } from "./clock.js";
import { elapsed } from "./format.js";
import { fleetView } from "./fleet.js";
import { connect, disconnect } from "./live.js";
import { loginView } from "./login.js";
import { modelView } from "./model.js";
import { onOperation } from "./operations.js";
import { forget, setConnection, store, subscribe } from "./store.js";
import { timelineView } from "./timeline.js";

const main = byId("main");
const banner = byId("banner");
const connection = byId("connection");
const announcements = byId("announcements");
const logout = byId("logout");

/** @type {import("./types.js").View | null} */
let view = null;
let locked = false;

/** @param {string} id @returns {any} */
function byId(id) {
  return document.getElementById(id);
}

/** The view of a fragment: `#/models/NAME`, `#/timeline?model=NAME`. @param {string} hash */
function viewOf(hash) {
  const [path, query = ""] = hash.replace(/^#\/?/, "").split("?");
  const parameters = new URLSearchParams(query);
  const [first, second] = path.split("/");
  if (first === "models" && second) return modelView(decoded(second));
  if (first === "timeline") return timelineView(parameters);
  if (first === "chat") return chatView(parameters);
  return fleetView();
}

/** @param {string} part */
function decoded(part) {
  try {
    return decodeURIComponent(part);
  } catch {
    return part;
  }
}

/** @param {import("./types.js").View} next @param {boolean} moveFocus */
function open(next, moveFocus) {
  view?.close?.();
  view = next;
  main.replaceChildren(next.root);
  document.title = `${next.title} · Rouse`;
  const here = location.hash.split(/[?]/)[0] || "#/";
  for (const link of byId("views").children) {
    if (link.getAttribute("href") === here) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  next.update();
  if (moveFocus) {
    window.scrollTo(0, 0);
    next.root.querySelector("h1")?.focus({ preventScroll: true });
  }
}

function openLogin() {
  if (locked) return;
  locked = true;
  disconnect();
  setConnection({ state: "locked" });
  forget();
  open(loginView(afterLogin), false);
  show(logout, false);
  byId("token").focus();
}

function afterLogin() {
  locked = false;
  setConnection({ state: "connecting" });
  open(viewOf(location.hash), true);
  connect();
}

const update = oncePerFrame(() => {
  if (!locked) view?.update();
});

function showConnection() {
  const { state, reason, retryAt = 0 } = store.connection;
  const age = store.loaded ? elapsed(Date.now() - store.received) : "";
  connection.dataset.state = state;
  const words = {
    connecting: "Connecting…",
    live: "Live",
    locked: "Not logged in",
    lost: age ? `Not connected: data of ${age} ago` : "Not connected",
  };
  text(connection, words[state]);
  show(logout, hasToken() && !locked);
  document.documentElement.toggleAttribute("data-stale", state === "lost" && store.loaded);
  if (state === "lost") {
    if (banner.childElementCount === 0)
      banner.append(el("span"), el("button", { type: "button", onclick: connect }, "Try now"));
    const next = Math.max(0, Math.ceil((retryAt - Date.now()) / 1000));
    text(bannerText(), `Not connected: ${reason}.${age ? " What you see is old." : ""}`);
    banner.lastElementChild.title = next > 0 ? `The next try is in ${next} s` : "";
  }
  show(banner, state === "lost");
  if (state === "locked") openLogin();
}

function bannerText() {
  return banner.firstElementChild;
}

/** Says which models have changed, for those who do not see it. @param {Event} event */
function announce(event) {
  const models = /** @type {CustomEvent<import("./types.js").Model[]>} */ (event).detail;
  const said =
    models.length > 3
      ? `${models.length} models changed their state`
      : models.map(({ name, state }) => `${name} is ${state}`).join(", ");
  text(announcements, said);
}

subscribe("data", update);
subscribe("connection", showConnection);
subscribe("states", announce);
onOperation(update);
setInterval(showConnection, 1000);
startClock();

document.addEventListener("unauthorized", openLogin);
window.addEventListener("online", connect);
// A browser has few connections for one origin, and tabs in the background need none.
document.addEventListener("visibilitychange", () => {
  if (locked) return;
  if (document.hidden) disconnect();
  else connect();
});
window.addEventListener("hashchange", () => {
  if (!locked) open(viewOf(location.hash), true);
});
byId("skip").addEventListener("click", (/** @type {Event} */ event) => {
  event.preventDefault(); // The fragment is the route.
  main.focus();
});
logout.addEventListener("click", () => {
  setToken(null);
  openLogin();
});

open(viewOf(location.hash), false);
connect();
