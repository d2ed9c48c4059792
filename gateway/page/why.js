// Why a model is in its state, and what it waits for: what `explain` answers.

import { el, keyed, text } from "./dom.js";
import { json, modelPath } from "./api.js";
import { bytes, duration, plural } from "./format.js";
import { modelHref } from "./memory.js";

/** @typedef {import("./types.js").Explanation} Explanation */
/** @typedef {import("./types.js").Model} Model */

// `explain` is asked for when something has changed, and not more often than this.
const EXPLAIN_PAUSE = 500;

/** The section, which `update` fills. @param {string} name */
export function whySection(name) {
  const reason = el("p", { class: "reason" });
  const waits = el("p", { class: "notes" });
  const holders = el("ul", { class: "plain" });
  const variants = el("ul", { class: "plain" });
  const last = el("p", { class: "notes" });
  const root = el(
    "section",
    { "aria-labelledby": "why" },
    el("h2", { id: "why" }, "Why"),
    reason,
    waits,
    holders,
    variants,
    last,
  );
  // What the explanation was asked for, and what it should be of.
  let key = "";
  let wanted = "";
  let busy = false;

  async function ask() {
    busy = true;
    try {
      const explanation = /** @type {Explanation} */ (await json(modelPath(name, "explain")));
      const { wait } = explanation;
      text(reason, explanation.reason);
      const retry =
        wait.retry_after === null ? "" : ` The earliest possible change is in ${duration(wait.retry_after)}.`;
      text(
        waits,
        explanation.waiting > 0
          ? `${plural(explanation.waiting, "request waits", "requests wait")}.${retry}`
          : "No request waits for it.",
      );
      keyed(holders, wait.holders, ({ model }) => model, holderLine);
      keyed(variants, Object.entries(explanation.variants ?? {}), ([variant]) => variant, variantLine);
      text(last, lastOutcome(explanation.lastOutcome ?? null));
    } catch {
      // The fleet's own reason stays.
    }
    setTimeout(() => {
      busy = false;
      if (wanted !== key) look();
    }, EXPLAIN_PAUSE);
  }

  function look() {
    key = wanted;
    void ask();
  }

  /** @param {Model} model */
  const update = (model) => {
    if (reason.textContent === "") text(reason, model.reason);
    wanted = JSON.stringify([model.state, model.waiting, model.leases, model.reason, model.pinned]);
    if (wanted !== key && !busy) look();
  };
  return { root, update };
}

/** @param {import("./types.js").Holder} first */
function holderLine({ model }) {
  const what = el("span");
  const root = el("li", {}, el("a", { href: modelHref(model) }, model), " ", what);
  /** @param {import("./types.js").Holder} holder */
  const update = ({ memory, idle_for: idle, leases, pinned }) => {
    const use = leases > 0 ? `in use by ${plural(leases, "request")}` : `idle for ${duration(idle)}`;
    text(what, `holds ${bytes(memory)}, ${use}${pinned ? ", pinned" : ""}`);
  };
  return { root, update };
}

/** @param {[string, import("./types.js").Variant]} first */
function variantLine([name]) {
  const what = el("span");
  const root = el("li", {}, el("b", {}, name), " ", what);
  /** @param {[string, import("./types.js").Variant]} entry */
  const update = ([, { current, asleep, target, targetReason, wait }]) => {
    const wanted = target === undefined ? "" : `, ${target} desired${targetReason ? ` (${targetReason})` : ""}`;
    text(
      what,
      `${current} running or starting${wanted}, ${asleep} asleep${wait ? `; next engine: ${wait.reason}` : ""}`,
    );
  };
  return { root, update };
}

/** @param {import("./types.js").Outcome | null} outcome */
function lastOutcome(outcome) {
  if (outcome?.failed) {
    const { stage, cause, count, diagnostics } = outcome.failed;
    const why = typeof cause === "string" ? cause.replaceAll("_", " ") : JSON.stringify(cause);
    const said = Object.values(diagnostics ?? {}).map((line) => ` “${line}”`);
    return `Last failure: ${why} while ${stage}, ${plural(count, "time")} in a row.${said.join("")}`;
  }
  if (!outcome?.deactivated) return "";
  const { reason, successor } = outcome.deactivated;
  return `Last put to sleep or stopped${reason ? `: ${reason}` : ""}${successor ? `, for ${successor}` : ""}.`;
}
