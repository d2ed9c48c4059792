// What the recordings rest on: that a terminal shows what xterm would, and that a recording shows each line when it was
// there.

import assert from "node:assert/strict";
import { test } from "node:test";

import { shorten, toSvg } from "./recording.js";
import { Terminal } from "./terminal.js";

const shown = (/** @type {Terminal} */ terminal) =>
  terminal.lines().map((runs) => runs.map(({ text, color }) => (color ? `<${color}>${text}` : text)).join(""));

test("a terminal wraps, scrolls, and overwrites what is cut at its edge where wrapping is off", () => {
  const terminal = new Terminal(5, 3);
  terminal.write("abcde");
  assert.deepEqual(shown(terminal), ["abcde", "", ""]);
  terminal.write("fg\r\nx\tyz\r\nend");
  // A tab stops at the last column.
  assert.deepEqual(shown(terminal), ["x   y", "z", "end"]);
  const cut = new Terminal(5, 2);
  cut.write("\x1b[?7labcdefgh\r\n2");
  assert.deepEqual(shown(cut), ["abcdh", "2"]);
});

test("a terminal repaints in place, keeps colours, and brings back what the other screen hid", () => {
  const terminal = new Terminal(20, 3);
  terminal.write("$ \x1b[?1049h\x1b[?25l\x1b[Ha \x1b[32mawake\x1b[0m  0\x1b[K\r\nsecond\x1b[K\r\n");
  assert.deepEqual(shown(terminal), ["a <green>awake  0", "second", ""]);
  assert.equal(terminal.cursor(), null);
  terminal.write("\x1b[Hb\x1b[K\r\n\x1b[J");
  assert.deepEqual(shown(terminal), ["b", "", ""]);
  terminal.write("\x1b[?25h\x1b[?1049l");
  assert.deepEqual(shown(terminal), ["$", "", ""]);
  assert.deepEqual(terminal.cursor(), { row: 0, column: 2 });
});

test("a sequence may come in pieces, and one that is unknown is refused", () => {
  const terminal = new Terminal(20, 1);
  for (const piece of ["a\x1b", "[3", "1mb"]) terminal.write(piece);
  assert.deepEqual(shown(terminal), ["a<red>b"]);
  assert.throws(() => terminal.write("\x1b[4;2r"), /does not know/);
});

test("a long wait is shortened evenly, and what comes after it moves with it", () => {
  const short = shorten(
    [
      { begin: 1000, end: 5000 },
      { begin: 6000, end: 7000 },
    ],
    2000,
  );
  assert.deepEqual([0, 1000, 3000, 5000, 6500, 8000].map(short), [0, 1000, 2000, 3000, 4500, 6000]);
});

test("a recording shows each line from when it was written to when it was cleared, and a still picture instead", () => {
  const chunks = [
    { at: -10, text: "always\r\n" },
    { at: 250, text: "a <b> & c" },
    { at: 750, text: "\r\x1b[K" },
  ];
  const svg = toSvg({
    panes: [{ title: "one", columns: 20, rows: 2, chunks: [{ at: -20, text: "\x1b[?25l" }, ...chunks] }],
    length: 1000,
    still: 500,
    label: "One",
    caption: ["how"],
  });
  assert.match(svg, /@keyframes k0\{0%\{opacity:0\}30%\{opacity:1\}80%\{opacity:0\}\}/);
  assert.match(svg, /<g class="f k0 still">\n<text [^>]*>a &lt;b> &amp; c<\/text>\n<\/g>/);
  assert.equal(svg.match(/>always</g)?.length, 1);
  assert.ok(svg.indexOf(">always<") > svg.indexOf('<rect class="page"'));
});
