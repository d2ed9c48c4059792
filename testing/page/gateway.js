// The real gateway as a process, with simulated engines.

import { spawn } from "node:child_process";
import { once } from "node:events";
import { mkdtempSync, rmSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { setTimeout as pause } from "node:timers/promises";

const READY_WITHIN = 30_000;
const STOPPED_WITHIN = 45_000;

/** A name that would do harm where it is taken for markup. */
export const MARKUP = "<b>bold</b><img/src=x/onerror=window.harmed=1>";
export const PLAIN = "tiny-llama";

/** The program under test. */
export function program() {
  const path = process.env.ROUSE_GATEWAY;
  if (!path) throw new Error("ROUSE_GATEWAY must name the built program; `make test-page` sets it");
  return path;
}

/** Two models on one accelerator that has room for one of them. @param {object} [more] Further keys of the file. */
export function twoModels(more = {}) {
  const model = (/** @type {string} */ name) => ({
    name,
    engine: {
      kind: "vllm",
      command: [
        ...[program(), "demo-engine", "--host", "${HOST}", "--port", "${PORT}", "--model", name, "--enable-sleep-mode"],
        ...["--gpu-memory-utilization", "${MEMORY_FRACTION}", "--start-time", "400ms", "--wake-time", "300ms"],
        ...["--sleep-time", "100ms", "--ttft", "50ms", "--itl", "20ms", "--tokens", "24"],
      ],
      env: { VLLM_SERVER_DEV_MODE: "1" },
    },
    memory: { awake: "20Gi", asleep: "1Gi", host: "4Gi" },
  });
  return {
    headroom: "1Gi",
    host: { sleepMemory: "64Gi" },
    // A model makes room as soon as another is asked for.
    turns: { residency: "100ms", maxTurn: "1s" },
    accelerators: [{ id: "gpu-0", memory: "24Gi" }],
    models: [model(PLAIN), model(MARKUP)],
    ...more,
  };
}

export class Gateway {
  /** @param {object | null} config None: the embedded demonstration. */
  constructor(config) {
    this.config = config;
    this.folder = mkdtempSync(join(tmpdir(), "rouse-page-"));
    this.api = "http://127.0.0.1:0";
    this.admin = "http://127.0.0.1:0";
    this.output = "";
  }

  /** Starts the process: at free ports the first time, and then at the same ones. */
  async start() {
    const file = join(this.folder, "rouse.yaml");
    // JSON is YAML.
    if (this.config) writeFileSync(file, JSON.stringify({ state: join(this.folder, "state"), ...this.config }));
    const addresses = ["--api", new URL(this.api).host, "--admin", new URL(this.admin).host];
    this.process = spawn(program(), [...(this.config ? ["--config", file] : ["demo"]), ...addresses], {
      cwd: this.folder,
      // The demonstration keeps its state in the test's folder, too.
      env: { ...process.env, XDG_STATE_HOME: this.folder, STATE_DIRECTORY: undefined },
      stdio: ["ignore", "pipe", "pipe"],
    });
    this.ended = once(this.process, "exit");
    let printed = "";
    this.process.stdout.on("data", (data) => ((printed += data), (this.output += data)));
    this.process.stderr.on("data", (data) => (this.output += data));
    await this.until(
      () => (printed.match(/http:\/\/[0-9.]+:[1-9][0-9]*/g) ?? []).length >= 2,
      "it prints its addresses",
    );
    [this.api, this.admin] = /** @type {string[]} */ (printed.match(/http:\/\/[0-9.]+:[1-9][0-9]*/g));
    await this.until(async () => (await fetch(`${this.api}/readyz`).catch(() => null))?.ok, "/readyz");
    return this;
  }

  /** Ends the process as an operator would. */
  async stop() {
    if (this.process?.exitCode === null) this.process.kill("SIGTERM");
    const timer = setTimeout(() => this.process?.kill("SIGKILL"), STOPPED_WITHIN);
    await this.ended;
    clearTimeout(timer);
  }

  /** Ends the process, and forgets its files. */
  async close() {
    await this.stop();
    rmSync(this.folder, { recursive: true, force: true });
  }

  /** Polls from outside, where no event can be had. @param {() => any} condition @param {string} what */
  async until(condition, what, within = READY_WITHIN) {
    for (const end = Date.now() + within; ; await pause(20)) {
      const result = await condition();
      if (result) return result;
      if (this.process?.exitCode !== null) throw new Error(`the gateway has exited\n${this.output.slice(-4000)}`);
      if (Date.now() > end) throw new Error(`not within ${within} ms: ${what}\n${this.output.slice(-4000)}`);
    }
  }

  /** The page's address. @param {string} [route] */
  page(route = "#/") {
    return `${this.admin}/ui/${route}`;
  }

  /** The state of a model, as the API says. @param {string} name */
  async state(name) {
    const fleet = await (await fetch(`${this.admin}/admin/v1/fleet`)).json();
    return fleet.models.find((/** @type {any} */ model) => model.name === name)?.state;
  }

  /** A chat completion by an ordinary client. @param {string} model @param {object} [more] */
  async chat(model, more = {}) {
    const body = JSON.stringify({ model, messages: [{ role: "user", content: "Hello" }], ...more });
    const response = await fetch(`${this.api}/v1/chat/completions`, {
      method: "POST",
      body,
      headers: { "content-type": "application/json" },
    });
    if (!response.ok) throw new Error(`${response.status}: ${await response.text()}`);
    return response.text();
  }
}
