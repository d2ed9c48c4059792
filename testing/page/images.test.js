// The pictures of docs/page.md, made of the demonstration while its models take turns.

import assert from "node:assert/strict";
import { mkdirSync, statSync } from "node:fs";
import { join } from "node:path";
import { test } from "node:test";

import { DESK, PHONE, launch, openPage } from "./browser.js";
import { Gateway } from "./gateway.js";

const FOLDER = process.env.ROUSE_PAGE_IMAGES ?? "";

/** @type {[string, import("playwright-core").BrowserContextOptions][]} */
const IMAGES = [
  ["page-light.png", { colorScheme: "light", viewport: DESK }],
  ["page-dark.png", { colorScheme: "dark", viewport: DESK }],
  ["page-phone.png", { colorScheme: "light", viewport: PHONE, deviceScaleFactor: 2 }],
];

test("the fleet is pictured light, dark and on a phone", async () => {
  mkdirSync(FOLDER, { recursive: true });
  const browser = await launch();
  const gateway = await new Gateway(null).start();
  try {
    for (const model of ["tiny-llama", "tiny-mistral", "tiny-qwen", "tiny-llama"]) await gateway.chat(model);
    // Long answers of one model, and a request that waits for another.
    const left = new AbortController();
    const ask = (/** @type {string} */ model) => {
      const body = JSON.stringify({
        model,
        stream: true,
        max_tokens: 4000,
        messages: [{ role: "user", content: "Hello" }],
      });
      const headers = { "content-type": "application/json" };
      fetch(`${gateway.api}/v1/chat/completions`, { method: "POST", body, headers, signal: left.signal })
        .then((response) => response.text())
        .catch(() => {}); // It is left below.
    };
    ["tiny-llama", "tiny-llama", "tiny-qwen"].forEach(ask);
    await gateway.until(async () => (await gateway.state("tiny-qwen")) === "awake", "both answer");
    ask("tiny-mistral");
    for (const [name, options] of IMAGES) {
      const { page, problems, context } = await openPage(browser, gateway.page(), options);
      await page.getByText("waits for its model").first().waitFor();
      const path = join(FOLDER, name);
      await page.screenshot({ path, animations: "disabled" });
      assert.ok(statSync(path).size > 10_000);
      assert.deepEqual(problems, []);
      await context.close();
    }
    left.abort();
  } finally {
    await browser.close();
    await gateway.close();
  }
});
