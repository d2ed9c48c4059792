// The first view: memory, models, requests.

import { el, text } from "./dom.js";
import { perSecond } from "./format.js";
import { memorySection } from "./memory.js";
import { modelsSection } from "./models.js";
import { requestsSection } from "./requests.js";
import { store } from "./store.js";

/** @returns {import("./types.js").View} */
export function fleetView() {
  const gateway = el("p", { class: "notes" });
  const totals = totalsList();
  const memory = memorySection();
  const models = modelsSection();
  const requests = requestsSection({ title: "Requests in flight", models: true });
  const title = el("h1", { tabindex: "-1" }, "Fleet");
  const root = el(
    "div",
    { class: "view" },
    el("div", { class: "title" }, title, gateway),
    totals.root,
    memory.root,
    models.root,
    requests.root,
  );
  const update = () => {
    const { snapshot } = store;
    text(gateway, gatewayText(snapshot));
    totals.update();
    memory.update(snapshot.fleet);
    models.update(snapshot);
    requests.update(snapshot.requests, snapshot.requestsTotal);
  };
  return { title: "Fleet", root, update };
}

/** Which gateway shows this, and whose knowledge it is. @param {import("./types.js").Snapshot} snapshot */
function gatewayText({ gateway, leads }) {
  if (!gateway) return "";
  return leads === false ? `${gateway}, which shows what the leading gateway publishes` : gateway;
}

function totalsList() {
  const names = ["Models awake", "Requests in flight", "Requests that wait", "Requests", "Tokens"];
  const values = names.map(() => el("dd"));
  const root = el(
    "dl",
    { class: "totals" },
    ...names.map((name, index) => el("div", {}, el("dt", {}, name), values[index])),
  );
  const update = () => {
    const { fleet, requests, requestsTotal, rates } = store.snapshot;
    const awake = fleet.models.filter(({ state }) => state === "awake").length;
    const sum = (/** @type {number[]} */ numbers) => numbers.reduce((total, number) => total + number, 0);
    const texts = [
      `${awake} of ${fleet.models.length}`,
      requestsTotal ?? requests.length,
      sum(fleet.models.map(({ waiting }) => waiting)),
      perSecond(sum(rates.map(({ requestsPerSecond }) => requestsPerSecond))),
      perSecond(sum(rates.map(({ tokensPerSecond }) => tokensPerSecond))),
    ];
    values.forEach((value, index) => text(value, texts[index]));
  };
  return { root, update };
}
