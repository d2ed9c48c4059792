// Numbers and times as people read them: with units, and no more digits than matter.

const SIZES = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];

/** @param {number | null | undefined} count Bytes. */
export function bytes(count) {
  if (count === null || count === undefined) return "–";
  let value = count;
  let unit = 0;
  while (value >= 1024 && unit < SIZES.length - 1) {
    value /= 1024;
    unit += 1;
  }
  return `${digits(value)} ${SIZES[unit]}`;
}

/** Up to three digits: 20, 1.5, 0.25. @param {number} value */
export function digits(value) {
  if (value >= 100 || Number.isInteger(value)) return String(Math.round(value));
  return String(Number(value.toFixed(value >= 9.95 ? 0 : value >= 0.995 ? 1 : 2)));
}

/** @param {number | null | undefined} milliseconds */
export function duration(milliseconds) {
  if (milliseconds === null || milliseconds === undefined) return "–";
  if (milliseconds < 1) return "0 ms";
  if (milliseconds < 995) return `${Math.round(milliseconds)} ms`;
  const seconds = milliseconds / 1000;
  if (seconds < 59.5) return `${digits(seconds)} s`;
  return long(Math.round(seconds));
}

/** Whole seconds, for durations that count up while they are looked at. @param {number} milliseconds */
export function elapsed(milliseconds) {
  const seconds = Math.max(0, Math.floor(milliseconds / 1000));
  return seconds < 60 ? `${seconds} s` : long(seconds);
}

/** @param {number} seconds */
function long(seconds) {
  const parts = /** @type {[number, string][]} */ ([
    [Math.floor(seconds / 86400), "d"],
    [Math.floor(seconds / 3600) % 24, "h"],
    [Math.floor(seconds / 60) % 60, "min"],
    [seconds % 60, "s"],
  ]);
  const first = parts.findIndex(([count]) => count > 0);
  const shown = parts.slice(first, first + 2).filter(([count]) => count > 0);
  return shown.map(([count, unit]) => `${count} ${unit}`).join(" ");
}

/** How long ago, from milliseconds. @param {number} milliseconds */
export function ago(milliseconds) {
  if (milliseconds < 1000) return "now";
  const seconds = Math.floor(milliseconds / 1000);
  if (seconds < 60) return `${seconds} s ago`;
  if (seconds < 3600) return `${Math.floor(seconds / 60)} min ago`;
  return seconds < 86400 ? `${Math.floor(seconds / 3600)} h ago` : `${Math.floor(seconds / 86400)} d ago`;
}

/** The time of day, with its date and zone for a title. @param {number} at */
export function moment(at) {
  return new Date(at).toLocaleString(undefined, { dateStyle: "medium", timeStyle: "long" });
}

/** A quoted wait and its spread. @param {import("./types.js").Wait} wait */
export function wait({ low, likely, high }) {
  const atOnce = (/** @type {number} */ milliseconds) => milliseconds < 50;
  if (atOnce(high)) return { likely: "at once", spread: "" };
  const [from, to] = [duration(low), duration(high)];
  // "1.2 to 6.5 s" names a common unit once.
  const [, number, unit] = /^(\S+) (\S+)$/.exec(from) ?? [];
  const isCommon = to.split(" ").length === 2 && to.endsWith(` ${unit}`);
  return {
    likely: atOnce(likely) ? "at once" : duration(likely),
    spread: from === to ? "" : `${isCommon ? number : from} to ${to}`,
  };
}

/** @param {number} count @param {string} unit @param {string} [units] */
export function plural(count, unit, units = `${unit}s`) {
  return `${count.toLocaleString("en")} ${count === 1 ? unit : units}`;
}

/** A number per second. @param {number} value */
export function perSecond(value, unit = "") {
  return `${value < 0.005 ? "0" : digits(value)}${unit && ` ${unit}`}/s`;
}
