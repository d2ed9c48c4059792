// Headless Chromium, whose pages are watched for what must never happen.

import assert from "node:assert/strict";
import { existsSync, readFileSync } from "node:fs";
import { createRequire } from "node:module";
import { chromium } from "playwright-core";

const PROGRAMS = [process.env.CHROMIUM, "/usr/bin/chromium", "/usr/bin/chromium-browser", "/usr/bin/google-chrome"];
const AXE = readFileSync(createRequire(import.meta.url).resolve("axe-core/axe.min.js"), "utf8");

export const PHONE = { width: 360, height: 740 };
export const DESK = { width: 1280, height: 900 };

export async function launch() {
  const executablePath = PROGRAMS.find((path) => path && existsSync(path));
  if (!executablePath) throw new Error("Chromium is missing: apt-get install chromium, or name it in CHROMIUM");
  // As root, which tests in containers often are, its sandbox does not start. It loads pages of this machine only.
  return chromium.launch({ executablePath, args: process.getuid?.() === 0 ? ["--no-sandbox"] : [] });
}

/**
 * A page of its own storage. `problems` collects scripts that throw, violations of the page's policy, and requests to
 * anywhere but the gateway.
 *
 * @param {import("playwright-core").Browser} browser
 * @param {string} url
 * @param {import("playwright-core").BrowserContextOptions} [options]
 */
export async function openPage(browser, url, options = {}) {
  const context = await browser.newContext({ viewport: DESK, reducedMotion: "reduce", ...options });
  const page = await context.newPage();
  page.setDefaultTimeout(15_000);
  /** @type {string[]} */
  const problems = [];
  /** @type {string[]} */
  const urls = [];
  page.on("pageerror", (error) => problems.push(String(error)));
  page.on("dialog", (dialog) => problems.push(`a dialog: ${dialog.message()}`));
  page.on("console", (message) => {
    if (/content security policy/i.test(message.text())) problems.push(message.text());
  });
  page.on("request", (request) => {
    urls.push(request.url());
    const { origin, protocol } = new URL(request.url());
    if (protocol !== "data:" && origin !== new URL(url).origin) problems.push(`a request to ${request.url()}`);
  });
  await page.goto(url);
  return { page, problems, urls, context };
}

/**
 * Fails if axe finds anything that is serious or critical.
 *
 * @param {import("playwright-core").Page} page
 * @param {string} where
 */
export async function assertAccessible(page, where) {
  await page.evaluate(AXE);
  const { violations } = await page.evaluate(() => /** @type {any} */ (globalThis).axe.run());
  const bad = violations.filter((/** @type {any} */ { impact }) => impact === "serious" || impact === "critical");
  const said = bad.map(
    (/** @type {any} */ { id, help, nodes }) =>
      `${id}: ${help}: ${nodes.map((/** @type {any} */ node) => node.html).join(" ")}`,
  );
  assert.deepEqual(said, [], where);
}
