// The real gateway as a process, with simulated engines.

import { execFile, spawn } from "node:child_process";
import { once } from "node:events";
import { mkdtempSync, readFileSync, rmSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { setTimeout as pause } from "node:timers/promises";
import { promisify } from "node:util";

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

/**
 * A model of a configuration file, with a simulated engine.
 *
 * @param {string} name
 * @param {{awake: string, asleep: string, host: string}} memory
 * @param {string[]} [flags] Of the engine. The last of each counts.
 */
function simulated(name, memory, flags = []) {
  return {
    name,
    engine: {
      kind: "vllm",
      command: [
        ...[program(), "demo-engine", "--host", "${HOST}", "--port", "${PORT}", "--model", name, "--enable-sleep-mode"],
        ...["--gpu-memory-utilization", "${MEMORY_FRACTION}", "--start-time", "400ms", "--wake-time", "300ms"],
        ...["--sleep-time", "100ms", "--ttft", "50ms", "--itl", "20ms", "--tokens", "24", ...flags],
      ],
      env: { VLLM_SERVER_DEV_MODE: "1" },
    },
    memory,
  };
}

/** Two models on one accelerator that has room for one of them. @param {object} [more] Further keys of the file. */
export function twoModels(more = {}) {
  const model = (/** @type {string} */ name) => simulated(name, { awake: "20Gi", asleep: "1Gi", host: "4Gi" });
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

const GIB = 2 ** 30;

/**
 * Models on one accelerator that has a meter and room for all of them: `server` takes 4 GiB, `sleeper` keeps 1 GiB and
 * 3 GiB of RAM, and `starter`, with 2 GiB, takes longer to start than any test.
 */
class MeteredAccelerator {
  /** @param {string} folder For its file. */
  constructor(folder) {
    this.file = join(folder, "accelerators.json");
    writeFileSync(this.file, JSON.stringify({ accelerators: { "gpu-0": { capacity: 24 * GIB, used: {} } } }));
  }

  /** The configuration of a gateway with these models. */
  configuration() {
    const model = (/** @type {string} */ name, /** @type {number} */ gib, /** @type {string[]} */ ...flags) => {
      const [memory, half] = [`${gib}Gi`, `${gib / 2}Gi`];
      const exact = ["--memory-awake", memory, "--memory-weights", half, "--kv-cache-memory-bytes", half];
      const slept = ["--memory-asleep", "1Gi", "--memory-host", "3Gi", "--accelerator-file", this.file];
      return simulated(name, { awake: memory, asleep: "1Gi", host: "3Gi" }, [...exact, ...slept, ...flags]);
    };
    const starter = model("starter", 2, "--start-time", "10m", "--memory-weights", "0");
    return {
      headroom: 0,
      host: { sleepMemory: "64Gi" },
      accelerators: [{ id: "gpu-0", memory: "24Gi", meter: this.file, visible: { CUDA_VISIBLE_DEVICES: "gpu-0" } }],
      models: [model("server", 4), model("sleeper", 4), starter],
    };
  }

  /** Starts a program that holds 6 GiB and is no engine of the gateway, and waits until it holds them. */
  async occupy() {
    const size = ["--memory-awake", "6Gi", "--memory-weights", "6Gi", "--start-time", "10m"];
    const place = ["--accelerator-file", this.file, "--accelerators", "gpu-0", "--port", "0"];
    this.program = spawn(program(), ["demo-engine", ...place, ...size], { stdio: "ignore" });
    this.ended = once(this.program, "exit");
    const held = () => JSON.parse(readFileSync(this.file, "utf8")).accelerators["gpu-0"].used[this.program?.pid ?? ""];
    for (const end = Date.now() + READY_WITHIN; held()?.bytes !== 6 * GIB; await pause(20)) {
      if (this.program.exitCode !== null || Date.now() > end) throw new Error("the other program holds no memory");
    }
  }

  async close() {
    if (this.program?.exitCode === null) this.program.kill("SIGKILL");
    await this.ended;
  }
}

/**
 * A gateway whose accelerator has all that a bar can show: an engine that is awake, one that sleeps, one that starts,
 * and another program.
 */
export async function everyPart() {
  const gateway = new Gateway(null);
  const accelerator = new MeteredAccelerator(gateway.folder);
  const close = async () => {
    await accelerator.close();
    await gateway.close();
  };
  try {
    gateway.config = accelerator.configuration();
    await accelerator.occupy();
    await gateway.start();
    await gateway.order("wake", "sleeper");
    await gateway.order("sleep", "sleeper", "--level", "1");
    await gateway.order("wake", "server");
    await gateway.order("wake", "starter", "--no-wait");
    await gateway.until(async () => (await gateway.state("starter")) === "launching", "it starts");
  } catch (error) {
    await close();
    throw error;
  }
  return { gateway, close };
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

  /** A model, as the API says. @param {string} name */
  async model(name) {
    const fleet = await (await fetch(`${this.admin}/admin/v1/fleet`)).json();
    return fleet.models.find((/** @type {any} */ model) => model.name === name);
  }

  /** Its state. @param {string} name */
  async state(name) {
    return (await this.model(name))?.state;
  }

  /** Gives an order on the command line, and waits until it is done. @param {string[]} words */
  async order(...words) {
    await promisify(execFile)(program(), [...words, "--admin", this.admin]);
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
