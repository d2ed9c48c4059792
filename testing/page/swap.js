// The recordings of README.md and docs/page.md: two models take turns, in a terminal and on the page at the same time.
// Both are of one run of the demonstration, as it happened. `testing/page/record` runs this.

import assert from "node:assert/strict";
import { execFile } from "node:child_process";
import { mkdirSync, readFileSync, statSync, writeFileSync } from "node:fs";
import { join } from "node:path";
import { test } from "node:test";
import { setTimeout as pause } from "node:timers/promises";
import { promisify } from "node:util";

import { launch, openPage } from "./browser.js";
import { Gateway, program } from "./gateway.js";
import { Pty } from "./pty.js";
import { shorten, toSvg } from "./recording.js";

/** @typedef {import("./recording.js").Span} Span */

const FOLDER = process.env.ROUSE_PAGE_IMAGES ?? "";
/** Where the commands are read, so that the recording shows what a reader types. */
const README = process.env.ROUSE_README ?? "";
/** The addresses in those commands. */
const API = "http://127.0.0.1:8080";
const ADMIN = "http://127.0.0.1:8180";

const [FIRST, SECOND] = ["tiny-llama", "tiny-mistral"];
const COLUMNS = 118;
const PROMPT = "$ ";
const CLEAR = "\f";
/** In milliseconds. */
const LONGEST_WAIT = 2000;
const READING = 1300;
const AT_THE_END = 1000;
const BEFORE_REQUEST = 500;

const SCREEN = { width: 960, height: 880 };
const BETWEEN_SHOTS = 160;

const MOST_BYTES = { svg: 60_000, webp: 600_000 };

test("two models take turns, recorded in a terminal and on the page", async () => {
  mkdirSync(FOLDER, { recursive: true });
  const browser = await launch();
  const gateway = new Gateway(null);
  [gateway.api, gateway.admin] = [API, ADMIN];
  /** @type {Pty[]} */
  const terminals = [];
  try {
    await gateway.start();
    // The recording begins where one model is awake and the other has never run.
    await gateway.chat(FIRST);
    const options = { viewport: SCREEN, colorScheme: /** @type {const} */ ("light") };
    const { page, problems } = await openPage(browser, gateway.page(), options);
    const open = (/** @type {string} */ command, /** @type {number} */ rows, env = {}) => {
      const terminal = new Pty(command, { columns: COLUMNS, rows, env });
      terminals.push(terminal);
      return terminal;
    };
    // A line that is too long is cut, as by `tput rmam`.
    const watch = open(`sh -c 'printf "\\033[?7l"; exec "$ROUSE_GATEWAY" ps --watch'`, 15, {
      ROUSE_GATEWAY: program(),
    });
    const shell = open("bash --norc --noprofile -i", 12, { PS1: PROMPT, PS2: "> ", HISTFILE: "" });
    await watch.until(new RegExp(`${FIRST}.*awake`));
    await shell.until(/\$ $/);

    const shots = new Screenshots(page);
    const begin = performance.now();
    await pause(READING);
    const waits = [];
    for (const model of [SECOND, FIRST]) {
      waits.push(await request(shell, model));
      assert.equal(await gateway.state(model), "awake");
      await pause(READING);
    }
    await pause(AT_THE_END);
    const end = performance.now();
    await shots.stop();
    assert.deepEqual(problems, []);

    writeTerminals(watch, shell, waits, { begin, end });
    await writePage(shots, { begin: waits[0].begin - BEFORE_REQUEST, end }, gateway.folder);
  } finally {
    for (const terminal of terminals) await terminal.close();
    await browser.close();
    await gateway.close();
  }
});

/** The request that README.md begins with, for this model. @param {string} model */
function commandFor(model) {
  const command = /^curl -N .*\\\n.*'$/m.exec(readFileSync(README, "utf8"))?.[0] ?? "";
  assert.ok(
    command.includes(`${API}/v1/`) && command.includes(`"${FIRST}"`),
    `${README} shows another request: ${command}`,
  );
  return command.replace(`"${FIRST}"`, `"${model}"`);
}

/** Types a request into the empty screen, and says when it was sent and when its answer began. */
async function request(/** @type {Pty} */ shell, /** @type {string} */ model) {
  const cleared = shell.press(CLEAR);
  await shell.until(/\$ $/, cleared);
  await shell.type(commandFor(model));
  const begin = shell.press("\n");
  const end = await shell.until(/^data: \{/m, begin);
  await shell.until(/^data: \[DONE\]\s[^]*\$ $/m, begin);
  return { begin, end };
}

/**
 * @param {Pty} watch
 * @param {Pty} shell
 * @param {Span[]} waits
 * @param {Span} span
 */
function writeTerminals(watch, shell, waits, { begin, end }) {
  const short = shorten(waits, LONGEST_WAIT);
  const played = (/** @type {Pty} */ { columns, rows, chunks }) => ({
    columns,
    rows,
    chunks: chunks.map(({ at, text }) => ({ at: short(at) - begin, text })),
  });
  const seconds = (/** @type {number} */ milliseconds) => `${Number((milliseconds / 1000).toFixed(1))} s`;
  const [limit, start, wake] = [LONGEST_WAIT, ...waits.map((wait) => wait.end - wait.begin)].map(seconds);
  const svg = toSvg({
    panes: [
      { title: "rouse-gateway ps --watch", ...played(watch) },
      { title: "another terminal", ...played(shell) },
    ],
    length: short(end) - begin,
    // Where one model sleeps and the other one starts.
    still: short((waits[0].begin + waits[0].end) / 2) - begin,
    label: `A recording of two terminals: ${FIRST} falls asleep and ${SECOND} starts for a request, and back`,
    caption: [
      `Recorded from rouse-gateway demo, whose engines are simulated. ${SECOND} answered after ${start}, since it had`,
      `to start; ${FIRST} after ${wake}, since it only had to wake. Longer waits than ${limit} are shown in ${limit}.`,
    ],
  });
  save("swap-terminal.svg", svg, MOST_BYTES.svg);
}

class Screenshots {
  /** @param {import("playwright-core").Page} page */
  constructor(page) {
    /** @type {{ at: number, png: Buffer }[]} */
    this.taken = [];
    this.stopped = false;
    this.done = this.#take(page);
    // `stop` reports it. Before that, something else has failed already.
    this.done.catch(() => {});
  }

  /** @param {import("playwright-core").Page} page */
  async #take(page) {
    while (!this.stopped) {
      const at = performance.now();
      const png = await page.screenshot();
      // What has not changed is shown for longer.
      if (!this.taken.at(-1)?.png.equals(png)) this.taken.push({ at, png });
      await pause(Math.max(0, at + BETWEEN_SHOTS - performance.now()));
    }
  }

  async stop() {
    this.stopped = true;
    await this.done;
  }
}

/**
 * @param {Screenshots} shots
 * @param {Span} span
 * @param {string} folder For the single pictures.
 */
async function writePage({ taken }, { begin, end }, folder) {
  const first = taken.findLastIndex(({ at }) => at <= begin);
  const shown = taken.slice(Math.max(0, first)).filter(({ at }) => at < end);
  const pictures = shown.flatMap(({ at, png }, index) => {
    const file = join(folder, `shot-${index}.png`);
    writeFileSync(file, png);
    const until = shown[index + 1]?.at ?? end;
    return ["-d", String(Math.round(until - Math.max(at, begin))), file];
  });
  const output = join(folder, "swap-page.webp");
  await promisify(execFile)("img2webp", ["-loop", "0", "-min_size", ...pictures, "-o", output]);
  save("swap-page.webp", readFileSync(output), MOST_BYTES.webp);
}

/** @param {string} name @param {string | Buffer} content @param {number} most In bytes. */
function save(name, content, most) {
  const path = join(FOLDER, name);
  writeFileSync(path, content);
  const { size } = statSync(path);
  console.log(`${path}: ${size} bytes`);
  assert.ok(size <= most, `${path} has ${size} bytes, more than ${most}`);
}
