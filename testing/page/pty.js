// A program in a terminal of its own, whose output is kept with its times.

import { spawn } from "node:child_process";
import { once } from "node:events";
import { setTimeout as pause } from "node:timers/promises";

const ANSWERS_WITHIN = 30_000;
const ENDS_WITHIN = 5_000;
/** As fast as someone who types very well. */
const KEYS_AT_ONCE = 3;
const BETWEEN_KEYS = 30;

/** @typedef {{ at: number, text: string }} Chunk What was written, and when in milliseconds. */

export class Pty {
  /**
   * @param {string} command For sh.
   * @param {{ columns: number, rows: number, env?: Record<string, string> }} options
   */
  constructor(command, { columns, rows, env = {} }) {
    this.columns = columns;
    this.rows = rows;
    /** @type {Chunk[]} */
    this.chunks = [];
    // Node has no terminals; `script` of util-linux makes one, whose size is that of its own terminal, if it has one.
    const sized = `stty cols ${columns} rows ${rows}; exec ${command}`;
    this.process = spawn("script", ["--quiet", "--flush", "--return", "--command", sized, "/dev/null"], {
      env: { ...process.env, SHELL: "/bin/sh", TERM: "xterm-256color", LANG: "C.UTF-8", NO_COLOR: "", ...env },
      stdio: ["pipe", "pipe", "inherit"],
    });
    this.ended = once(this.process, "exit");
    this.process.stdout.setEncoding("utf8");
    this.process.stdout.on("data", (text) => this.chunks.push({ at: performance.now(), text }));
  }

  /** Types a text, and goes on when it has been typed. @param {string} text */
  async type(text) {
    for (let at = 0; at < text.length; at += KEYS_AT_ONCE) {
      this.process.stdin.write(text.slice(at, at + KEYS_AT_ONCE));
      await pause(BETWEEN_KEYS);
    }
  }

  /** Presses a key, and says when. @param {string} key */
  press(key) {
    this.process.stdin.write(key);
    return performance.now();
  }

  /** Waits for output since then, and says when it came. @param {RegExp} pattern @param {number} [since] */
  async until(pattern, since = 0) {
    const signal = AbortSignal.timeout(ANSWERS_WITHIN);
    for (;;) {
      const output = this.chunks.filter(({ at }) => at >= since).map(({ text }) => text);
      if (pattern.test(output.join(""))) return this.chunks[this.chunks.length - 1].at;
      await once(this.process.stdout, "data", { signal }).catch(() => {
        throw new Error(`not within ${ANSWERS_WITHIN} ms: ${pattern}, but\n${output.join("").slice(-2000)}`);
      });
    }
  }

  /** Ends the program as a person would: what runs is interrupted, and a shell has nothing more to read. */
  async close() {
    this.process.stdin.end("\x03\x04");
    const timer = setTimeout(() => this.process.kill("SIGTERM"), ENDS_WITHIN);
    await this.ended;
    clearTimeout(timer);
  }
}
