// Makes a moving picture of what programs wrote to terminals: an SVG without scripts, in which CSS shows and hides
// lines. A line that stays in its place is in the file once, however often it is shown.

import { Terminal } from "./terminal.js";

/** @typedef {import("./terminal.js").Run} Run */
/** @typedef {{ begin: number, end: number }} Span In milliseconds of the run. */
/** @typedef {{ title: string, columns: number, rows: number, chunks: import("./pty.js").Chunk[] }} Pane */

/** Time between two pictures in milliseconds. */
const STEP = 100;
/** In pixels. */
const FONT = 13;
const CELL = FONT * 0.6;
const LINE = 18;
const PADDING = 16;
const TITLE = 26;
const SMALL = 12;

const STYLE = `
svg{--page:#fff;--bar:#eef1f4;--edge:#d0d7de;--text:#1f2328;--dim:#59636e;
--green:#116329;--yellow:#7d4e00;--red:#a40e26}
@media(prefers-color-scheme:dark){
svg{--page:#0d1117;--bar:#161b22;--edge:#30363d;--text:#e6edf3;--dim:#9198a1;
--green:#56d364;--yellow:#e3b341;--red:#ff7b72}}
text{font:${FONT}px ui-monospace,SFMono-Regular,Menlo,Consolas,"Liberation Mono",monospace;fill:var(--text)}
.page{fill:var(--page)}.edge{fill:none;stroke:var(--edge)}.bar{fill:var(--bar)}.cursor{fill:var(--dim)}
.small{fill:var(--dim);font-size:${SMALL}px}
.green{fill:var(--green)}.yellow{fill:var(--yellow)}.red{fill:var(--red)}
.f{opacity:0}.f.still{opacity:1}`;

/**
 * Maps times of the run to times of the recording, in which no wait is longer than `limit`.
 *
 * @param {Span[]} waits In order; none overlaps another.
 * @param {number} limit
 */
export function shorten(waits, limit) {
  return (/** @type {number} */ at) => {
    let cut = 0;
    for (const { begin, end } of waits) {
      const surplus = Math.max(0, end - begin - limit);
      const passed = Math.min(1, Math.max(0, (at - begin) / (end - begin)));
      cut += surplus * passed;
    }
    return at - cut;
  };
}

/**
 * @param {object} recording
 * @param {Pane[]} recording.panes One below the other, with `at` from 0 to `length`; earlier chunks are there at once.
 * @param {number} recording.length In milliseconds; then it begins again.
 * @param {number} recording.still What is shown to those who want no motion.
 * @param {string} recording.label
 * @param {string[]} recording.caption
 */
export function toSvg({ panes, length, still, label, caption }) {
  const drawing = new Drawing(length, still);
  const width = Math.max(...panes.map(({ columns }) => columns)) * CELL + 2 * PADDING;
  let top = 0;
  for (const pane of panes) {
    drawing.fixed.push(
      `<rect class="bar" y="${top}" width="100%" height="${TITLE}"/>`,
      smallText(top + TITLE - 9, pane.title),
    );
    top += TITLE + PADDING / 2;
    drawing.play(pane, top + FONT);
    top += pane.rows * LINE + PADDING / 2;
  }
  drawing.fixed.push(`<rect class="bar" y="${top}" width="100%" height="1"/>`);
  for (const line of caption) {
    drawing.fixed.push(smallText(top + LINE, line));
    top += LINE;
  }
  return drawing.finish(width, top + PADDING / 2, label);
}

class Drawing {
  /** @param {number} length @param {number} still */
  constructor(length, still) {
    this.length = length;
    this.still = still;
    /** @type {string[]} What is there all the time. */
    this.fixed = [];
    /** @type {Map<string, number[]>} Each piece, and when it appears, disappears, appears again. */
    this.pieces = new Map();
  }

  /** @param {Pane} pane @param {number} top Where the first line stands. */
  play({ columns, rows, chunks }, top) {
    const terminal = new Terminal(columns, rows);
    let next = 0;
    /** @type {Set<string>} */
    let shown = new Set();
    for (let at = 0; at < this.length; at += STEP) {
      while (next < chunks.length && chunks[next].at <= at) terminal.write(chunks[next++].text);
      const now = new Set(piecesOf(terminal, top));
      for (const piece of now) if (!shown.has(piece)) this.#toggle(piece, at);
      for (const piece of shown) if (!now.has(piece)) this.#toggle(piece, at);
      shown = now;
    }
    for (const piece of shown) this.#toggle(piece, this.length);
  }

  /** @param {string} piece @param {number} at */
  #toggle(piece, at) {
    this.pieces.set(piece, [...(this.pieces.get(piece) ?? []), at]);
  }

  /** @param {number} width @param {number} height @param {string} label */
  finish(width, height, label) {
    /** @type {Map<string, string[]>} What appears and disappears together is one group. */
    const groups = new Map();
    for (const [piece, times] of this.pieces) {
      const key = times.join(" ");
      groups.set(key, [...(groups.get(key) ?? []), piece]);
    }
    const rules = [];
    const body = [];
    for (const [key, pieces] of groups) {
      const times = key.split(" ").map(Number);
      if (times[0] === 0 && times[1] === this.length) {
        body.push(...pieces);
        continue;
      }
      /** @type {string} */
      const name = `k${rules.length.toString(36)}`;
      const isStill = times.filter((time) => time <= this.still).length % 2 === 1;
      rules.push(`@keyframes ${name}{${this.#keyframes(times)}}.${name}{animation-name:${name}}`);
      body.push(`<g class="f ${name}${isStill ? " still" : ""}">`, ...pieces, "</g>");
    }
    const size = `width="${number(width)}" height="${number(height)}"`;
    const described = `role="img" aria-label="${escaped(label).replaceAll('"', "&quot;")}"`;
    const box = `viewBox="0 0 ${number(width)} ${number(height)}"`;
    return `<svg xmlns="http://www.w3.org/2000/svg" ${box} ${size} ${described}>
<style>${STYLE}
@media(prefers-reduced-motion:no-preference){.f{animation:${number(this.length / 1000)}s step-end infinite}
${rules.join("\n")}}
</style>
<clipPath id="round"><rect ${size} rx="6"/></clipPath>
<g clip-path="url(#round)">
<rect class="page" ${size}/>
${[...this.fixed, ...body].join("\n")}
</g>
<rect class="edge" x=".5" y=".5" width="${number(width - 1)}" height="${number(height - 1)}" rx="6"/>
</svg>
`;
  }

  /** @param {number[]} times */
  #keyframes(times) {
    const begins = times[0] === 0 ? [] : [`0%{opacity:0}`];
    const changes = times.map((time, index) => `${percent(time / this.length)}{opacity:${(index + 1) % 2}}`);
    return [...begins, ...changes].join("");
  }
}

/** @param {Terminal} terminal @param {number} top */
function piecesOf(terminal, top) {
  const pieces = terminal.lines().flatMap((runs, row) => {
    const text = runs.map((run) => run.text).join("");
    const indent = text.length - text.trimStart().length;
    if (text.length === indent) return [];
    const spans = runs.map((run, index) => {
      const inner = escaped(index === 0 ? run.text.slice(indent) : run.text);
      return run.color ? `<tspan class="${run.color}">${inner}</tspan>` : inner;
    });
    return [textOf(PADDING + indent * CELL, top + row * LINE, spans.join(""), (text.length - indent) * CELL)];
  });
  const cursor = terminal.cursor();
  if (cursor) {
    const [x, y] = [PADDING + cursor.column * CELL, top + cursor.row * LINE - FONT + 1];
    pieces.push(
      `<rect class="cursor" x="${number(x)}" y="${number(y)}" width="${number(CELL)}" height="${LINE - 2}"/>`,
    );
  }
  return pieces;
}

/** A title, or a line of the caption. @param {number} y @param {string} text */
function smallText(y, text) {
  return textOf(PADDING, y, escaped(text), text.length * CELL * (SMALL / FONT), ' class="small"');
}

/**
 * Its length is fixed, so that columns stay below each other in any font.
 *
 * @param {number} x
 * @param {number} y
 * @param {string} inner
 * @param {number} length
 * @param {string} [attributes]
 */
function textOf(x, y, inner, length, attributes = "") {
  return `<text${attributes} x="${number(x)}" y="${number(y)}" textLength="${number(length)}">${inner}</text>`;
}

const percent = (/** @type {number} */ part) => `${Number((part * 100).toFixed(2))}%`;
const number = (/** @type {number} */ value) => String(Number(value.toFixed(1)));
// Blanks in a row are one blank in an SVG, unless they do not break.
const escaped = (/** @type {string} */ text) =>
  text
    .replaceAll("&", "&amp;")
    .replaceAll("<", "&lt;")
    .replace(/ {2,}/g, (blanks) => "\u00a0".repeat(blanks.length));
