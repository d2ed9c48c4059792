// An engine's output, followed as it grows.

import { attribute, el, keyed, text } from "./dom.js";
import { call, modelPath, reasonOf } from "./api.js";
import { texts } from "./sse.js";

// Older lines leave the page: an engine may write for weeks.
const KEPT_CHARACTERS = 200_000;

/** The section of a model's log. @param {string} model */
export function logSection(model) {
  /** @type {AbortController | null} */
  let reading = null;
  const output = el("pre", { class: "log", tabindex: "0", role: "region", "aria-label": "Output of the engine" });
  const status = el("span", { class: "notes", role: "status" });
  const follow = el("input", {
    type: "checkbox",
    onchange: () => (follow.checked ? (toEnd(), start()) : stop("Paused.")),
  });
  follow.checked = true;
  const replica = el("select", { "aria-label": "Engine", onchange: () => start() });
  const root = el(
    "section",
    { "aria-labelledby": "log" },
    el(
      "div",
      { class: "section-head" },
      el("h2", { id: "log" }, "Log"),
      replica,
      el("label", { class: "check" }, follow, " Follow"),
      status,
    ),
    output,
  );

  /** Reads the output anew from its oldest byte: the gateway has no other place to begin. */
  async function start() {
    stop("");
    const controller = new AbortController();
    reading = controller;
    text(status, "Reading…");
    try {
      const path = `${modelPath(model, "logs")}?replica=${replica.value || 0}&follow=${follow.checked}`;
      const response = await call(path, { signal: controller.signal });
      output.replaceChildren();
      text(status, follow.checked ? "Following." : "");
      for await (const piece of texts(response)) append(piece);
      text(status, "The log has ended.");
    } catch (error) {
      if (controller.signal.aborted) return;
      output.replaceChildren();
      text(status, `No log: ${reasonOf(error)}.`);
    }
    if (reading === controller) reading = null;
  }

  /** @param {string} said */
  function stop(said) {
    reading?.abort();
    reading = null;
    text(status, said);
  }

  /** @param {string} piece */
  function append(piece) {
    const atEnd = output.scrollHeight - output.scrollTop - output.clientHeight < 40;
    output.append(piece);
    let length = output.textContent.length;
    while (length > KEPT_CHARACTERS && output.childNodes.length > 1) {
      length -= output.firstChild?.textContent?.length ?? 0;
      output.firstChild?.remove();
    }
    if (atEnd) toEnd();
  }

  function toEnd() {
    output.scrollTop = output.scrollHeight;
  }

  /** Offers one entry per engine; reads again if there was no log before. @param {string[]} engines */
  const update = (engines) => {
    const replicas = engines.length > 0 ? engines.map((engine) => engine.slice(engine.lastIndexOf("#") + 1)) : ["0"];
    const numbers = replicas.filter((number) => /^\d+$/.test(number));
    keyed(
      replica,
      numbers.length > 0 ? numbers : ["0"],
      (number) => number,
      (number) => ({ root: el("option", { value: number }, `engine ${number}`), update: () => {} }),
    );
    attribute(replica, "hidden", replica.options.length < 2);
  };
  update([]);
  return { root, update, start, close: () => stop(""), isReading: () => reading !== null };
}
