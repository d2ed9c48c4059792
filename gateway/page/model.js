// One model: its state and why, orders, measurements, engines, requests, events, log.

import { attribute, el, show, text } from "./dom.js";
import { setTime, timeSince } from "./clock.js";
import { enginesSection, factsSection } from "./facts.js";
import { logSection } from "./log.js";
import { orderText, stateBadge } from "./models.js";
import { give, newestOrder } from "./operations.js";
import { requestsSection } from "./requests.js";
import { enginesOf, modelNamed, store } from "./store.js";
import { eventList, eventsOf } from "./timeline.js";
import { whySection } from "./why.js";

/** @typedef {import("./types.js").Model} Model */

/** @param {string} name @returns {import("./types.js").View} */
export function modelView(name) {
  const state = stateBadge();
  const pinned = el("span", { class: "badge" }, "pinned");
  const orders = ordersBar(name);
  const why = whySection(name);
  const facts = factsSection();
  const engines = enginesSection();
  const requests = requestsSection({ title: "Its requests", models: false });
  const events = eventList(false);
  const log = logSection(name);
  const missing = el("p", { class: "empty" });
  const body = el(
    "div",
    { class: "view" },
    orders.root,
    el("div", { class: "columns" }, why.root, facts.root),
    engines.root,
    requests.root,
    el(
      "section",
      { "aria-labelledby": "events" },
      el(
        "div",
        { class: "section-head" },
        el("h2", { id: "events" }, "Events"),
        el("a", { href: `#/timeline?model=${encodeURIComponent(name)}` }, "All in the timeline"),
      ),
      events.root,
    ),
    log.root,
  );
  const root = el(
    "div",
    { class: "view" },
    el("div", { class: "title" }, el("h1", { tabindex: "-1" }, name), state.root, pinned),
    missing,
    body,
  );
  let hadEngine = false;

  const update = () => {
    const model = modelNamed(name);
    show(missing, model === undefined);
    show(body, model !== undefined);
    show(state.root, model !== undefined);
    show(pinned, model?.pinned ?? false);
    text(
      missing,
      store.loaded ? "The gateway has no model of this name. Choose one in Fleet." : "Waiting for the gateway…",
    );
    if (model === undefined) return;
    const its = enginesOf(name);
    state.update(model.state);
    orders.update(model);
    why.update(model);
    facts.update(model);
    engines.update(its);
    requests.update(store.snapshot.requests.filter((request) => request.model === name));
    events.update(eventsOf(name, 12), "Nothing has happened to this model since the gateway started.");
    log.update(its.map(({ engine }) => engine));
    // An engine that has just been launched has a log now.
    const hasEngine = its.some(({ state }) => state !== "Cold");
    if (hasEngine !== hadEngine && hasEngine && !log.isReading()) void log.start();
    hadEngine = hasEngine;
  };
  return { title: name, root, update, close: log.close };
}

/** @param {string} name */
function ordersBar(name) {
  const confirm = stopDialog(name);
  const button = (/** @type {string} */ label, /** @type {() => void} */ onclick) =>
    el("button", { type: "button", onclick }, label);
  const wake = button("Wake", () => give(name, "wake"));
  const sleep = button("Sleep", () => give(name, "sleep"));
  const stop = button("Stop", () => confirm.showModal());
  const pin = button("Pin", () => give(name, pin.dataset.order));
  const chat = el("a", { class: "button", href: `#/chat?model=${encodeURIComponent(name)}` }, "Chat");
  const outcome = el("p", { class: "outcome", role: "status" });
  const since = timeSince(0);
  const root = el(
    "div",
    {},
    el("div", { class: "orders", role: "group", "aria-label": "Orders" }, wake, sleep, stop, pin, chat),
    el("div", { class: "outcome-line" }, outcome, since),
    confirm,
  );
  /** @param {Model} model */
  const update = (model) => {
    pin.dataset.order = model.pinned ? "unpin" : "pin";
    attribute(wake, "class", model.state === "awake" ? null : "primary");
    text(pin, model.pinned ? "Unpin" : "Pin");
    attribute(
      pin,
      "title",
      model.pinned
        ? "Let the model sleep again when others need its memory"
        : "Keep the model awake, whatever other models need",
    );
    const given = newestOrder(name);
    text(outcome, given ? `${orderText(given)}.` : "");
    attribute(outcome, "data-state", given?.state);
    show(since, given?.state === "running");
    if (given) setTime(since, given.since);
  };
  return { root, update };
}

/** @param {string} name */
function stopDialog(name) {
  const close = () => dialog.close();
  const dialog = el(
    "dialog",
    { "aria-labelledby": "stop-title" },
    el("h2", { id: "stop-title" }, "Stop ", name, "?"),
    el(
      "p",
      {},
      "Its engines end and give up all their memory. Requests that run now are cut. ",
      "The next request starts the model anew, which takes longer than a wake.",
    ),
    el(
      "div",
      { class: "orders" },
      el("button", { type: "button", class: "danger", onclick: () => (close(), give(name, "stop")) }, "Stop the model"),
      el("button", { type: "button", onclick: close }, "Cancel"),
    ),
  );
  return dialog;
}
