// The page as a person uses it: a real gateway, two simulated models that take turns, headless Chromium.

import assert from "node:assert/strict";
import { after, before, test } from "node:test";
import { isDeepStrictEqual } from "node:util";

import { PHONE, assertAccessible, launch, openPage } from "./browser.js";
import { Gateway, MARKUP, PLAIN, everyPart, twoModels } from "./gateway.js";

const TOKEN = "a-token-of-this-test";

/** @type {import("playwright-core").Browser} */
let browser;
/** @type {Gateway} */
let gateway;

before(async () => {
  browser = await launch();
  gateway = await new Gateway(twoModels()).start();
});
after(async () => {
  await browser?.close();
  await gateway?.close();
});

/** A page of the gateway; it fails the test if the page had problems. */
async function visit(route, look, options) {
  const opened = await openPage(browser, gateway.page(route), options);
  try {
    await look(opened.page, opened);
    assert.deepEqual(opened.problems, []);
  } finally {
    await opened.context.close();
  }
}

const modelRoute = (name) => `#/models/${encodeURIComponent(name)}`;
const row = (page, name) => page.getByRole("row").filter({ has: page.getByRole("link", { name, exact: true }) });
const shows = (page, name, state) => row(page, name).locator(`[data-state="${state}"]`);
const button = (page, name) => page.getByRole("main").getByRole("button", { name, exact: true });

test("a swap is seen within a second, without a reload", async () => {
  await gateway.chat(PLAIN);
  await visit("#/", async (page) => {
    await shows(page, PLAIN, "awake").waitFor();
    await page.evaluate(() => (window.loadedOnce = true));
    // Both ways: the first one starts the other model, the second one wakes this one.
    for (const [next, previous] of [
      [MARKUP, PLAIN],
      [PLAIN, MARKUP],
    ]) {
      const seen = shows(page, next, "awake")
        .waitFor()
        .then(() => Date.now());
      const answered = gateway.chat(next);
      await gateway.until(async () => (await gateway.state(next)) === "awake", `${next} is awake`);
      const happened = Date.now();
      assert.ok((await seen) - happened < 1000, `seen after ${(await seen) - happened} ms`);
      await answered;
      await shows(page, previous, "asleep").waitFor({ timeout: 1000 });
    }
    assert.equal(await page.evaluate(() => window.loadedOnce), true);
    assert.match(await page.locator(".memory").first().innerText(), /awake\s+20 GiB\s+tiny-llama[\s\S]*asleep\s+1 GiB/);
  });
});

/** What one bar shows: the lines of its parts, and its pieces with their widths in pixels. */
async function barOf(page, title) {
  const bar = page.locator(".memory").filter({ has: page.getByRole("heading", { name: title, exact: true }) });
  return bar.evaluate((root) => ({
    lines: [...root.querySelectorAll(".parts li")].map((line) => [
      line.querySelector("span").textContent,
      line.querySelector("b").textContent,
      line.querySelector(".names").textContent,
    ]),
    pieces: [...root.querySelectorAll(".piece")].map((piece) => ({
      title: piece.title,
      share: Number(piece.style.getPropertyValue("--share")),
      width: piece.getBoundingClientRect().width,
    })),
    width: root.querySelector(".bar").getBoundingClientRect().width,
  }));
}

/** The number of a size such as `4 GiB`. */
const gib = (text) => Number(/^([0-9.]+) GiB$/.exec(text)?.[1] ?? assert.fail(`${text} is no GiB`));

test("the bars of an accelerator and of host RAM show who holds what, and add up to the whole", async () => {
  const { gateway: full, close } = await everyPart();
  const { page, problems, context } = await openPage(browser, full.page());
  try {
    const bars = [
      {
        title: "gpu-0 · 24 GiB",
        lines: [
          ["awake", "4 GiB", "server"],
          ["reserved", "2 GiB", "starter"],
          ["asleep", "1 GiB", "sleeper"],
          ["other programs", "4 GiB", ""],
          ["free", "13 GiB", ""],
        ],
      },
      {
        title: "Host RAM · 64 GiB",
        lines: [
          ["asleep", "3 GiB", "sleeper"],
          ["free", "61 GiB", ""],
        ],
      },
    ];
    for (const { title, lines } of bars) {
      await page.getByRole("heading", { name: title, exact: true }).waitFor();
      let shown = await barOf(page, title);
      const isShown = async () => isDeepStrictEqual((shown = await barOf(page, title)).lines, lines);
      await full.until(isShown, title).catch(() => assert.deepEqual(shown.lines, lines));
      const whole = gib(title.split(" · ")[1]);
      assert.equal(
        lines.reduce((sum, [, size]) => sum + gib(size), 0),
        whole,
      );
      assert.deepEqual(
        shown.pieces.map((piece) => piece.title),
        lines.map(([kind, size, model]) => [model, kind, size].filter(Boolean).join(" · ")),
      );
      // Each piece is as wide as its part of the whole, less the gap beside it.
      for (const [index, piece] of shown.pieces.entries()) {
        const share = gib(lines[index][1]) / whole;
        assert.ok(Math.abs(piece.share - share) < 0.0001, `${piece.title}: ${piece.share}`);
        assert.ok(Math.abs(piece.width + 2 - share * shown.width) < 1, `${piece.title}: ${piece.width} px`);
      }
      const widths = shown.pieces.reduce((sum, piece) => sum + piece.width + 2, 0);
      assert.ok(Math.abs(widths - shown.width) < 2, `${widths} of ${shown.width} px`);
    }
    await assertAccessible(page, "every part of a bar");
    assert.deepEqual(problems, []);
  } finally {
    await context.close();
    await close();
  }
});

/** The milliseconds of a shown duration, such as `950 ms` or `1.2 s`. */
function milliseconds(text) {
  const [, number, unit] = /^([0-9.]+) (ms|s)$/.exec(text) ?? assert.fail(`${text} is no duration`);
  return Number(number) * (unit === "s" ? 1000 : 1);
}

/** The range and the middle of a quoted wait, in milliseconds: `1.2 to 6.5 s` has its unit once. */
function quoted(likely, spread) {
  if (spread === "") return [likely, likely, likely].map(milliseconds);
  const [, low, unit, high, common] = /^([0-9.]+)( ms| s)? to ([0-9.]+)( ms| s)$/.exec(spread) ?? assert.fail(spread);
  return [`${low}${unit ?? common}`, likely, `${high}${common}`].map(milliseconds);
}

test("a model that sleeps and one that is cold quote how long until they answer, as the API does", async () => {
  // Both ways twice, so that starts, sleeps and wakes of both models are measured.
  for (const model of [PLAIN, MARKUP, PLAIN, MARKUP]) await gateway.chat(model);
  await visit("#/", async (page) => {
    for (const [state, least] of [
      ["asleep", 300],
      ["cold", 400],
    ]) {
      if (state === "cold") await gateway.order("stop", PLAIN);
      await shows(page, PLAIN, state).waitFor();
      const cell = row(page, PLAIN).locator('td[data-label="Answers in"]');
      let told = "";
      const agrees = async () => {
        const [likely, spread] = [await cell.locator("b").innerText(), await cell.locator("small").innerText()];
        const { expectedWait } = await gateway.model(PLAIN);
        told = `${likely} (${spread}) for ${JSON.stringify(expectedWait)}`;
        // Right after the change of the state there may be no quote, or another one.
        if (!expectedWait || !/^[0-9.]+ m?s$/.test(likely)) return false;
        const quote = quoted(likely, spread);
        assert.ok(quote[0] <= quote[1] && quote[1] <= quote[2], told);
        const { low: from, likely: about, high: to } = expectedWait;
        // Three digits at most are shown, and the API was asked a moment later.
        return [from, about, to].every((span, index) => Math.abs(span - quote[index]) <= 20 + span / 10);
      };
      await gateway.until(agrees, "they agree").catch((error) => assert.fail(`${state}: ${told}: ${error.message}`));
      assert.ok(milliseconds(await cell.locator("b").innerText()) >= least, `${state}: ${told}`);
    }
    // The page of the model has the same quote, in one line.
    const [likely] = await row(page, PLAIN).locator('td[data-label="Answers in"] > *').allInnerTexts();
    await page.evaluate((next) => (location.hash = next), modelRoute(PLAIN));
    const fact = await page.locator(".facts div").filter({ hasText: "Answers in" }).locator("dd").innerText();
    const [, same] = /^(.+ m?s) \(.+\)$/.exec(fact) ?? assert.fail(fact);
    assert.ok(Math.abs(milliseconds(same) - milliseconds(likely)) <= 100, `${fact}, not ${likely}`);
  });
});

test("a model's name with markup is shown as text", async () => {
  await visit("#/", async (page) => {
    await page.getByRole("link", { name: MARKUP, exact: true }).first().waitFor();
    for (const route of ["#/", "#/timeline", "#/chat", modelRoute(MARKUP)]) {
      await page.evaluate((next) => (location.hash = next), route);
      await page.getByText(MARKUP).first().waitFor({ state: "attached" });
      assert.equal(await page.locator("main b:text-is('bold'), main img").count(), 0, route);
    }
    assert.equal(await page.getByRole("heading", { level: 1 }).innerText(), MARKUP);
    assert.equal(await page.evaluate(() => window.harmed), undefined);
  });
});

test("the buttons of a model do what they say, and say what became of it", async () => {
  await visit(modelRoute(PLAIN), async (page) => {
    const outcome = page.locator(".outcome");
    const order = async (name, state) => {
      await button(page, name).click();
      await page.locator(`.outcome[data-state="${state}"]`).filter({ hasText: name.toLowerCase() }).waitFor();
    };
    await order("Wake", "done");
    await gateway.until(async () => (await gateway.state(PLAIN)) === "awake", "awake");
    await order("Pin", "done");
    await page.locator(".badge", { hasText: "pinned" }).waitFor();
    await order("Sleep", "failed");
    assert.match(await outcome.innerText(), /pin/);
    await order("Unpin", "done");
    await order("Sleep", "done");
    await gateway.until(async () => (await gateway.state(PLAIN)) === "asleep", "asleep");
    await button(page, "Stop").click();
    await page.getByRole("dialog").getByRole("button", { name: "Stop the model" }).click();
    await page.locator('.title [data-state="cold"]').waitFor();
    assert.equal(await gateway.state(PLAIN), "cold");
    // What the engine wrote, and what happened to it.
    await page.locator(".event", { hasText: "stopped" }).first().waitFor();
    await page.waitForFunction(() => document.querySelector(".log").textContent.length > 0);
  });
});

test("the timeline shows what each wake and sleep cost, for one model if asked", async () => {
  await gateway.chat(PLAIN);
  await gateway.chat(MARKUP);
  await visit("#/timeline", async (page) => {
    const event = (text) => page.locator(".event").filter({ hasText: text });
    assert.match(await event("started").filter({ hasText: PLAIN }).first().innerText(), /took [0-9.]+ (ms|s)/);
    assert.match(
      await event(/evicted|fell asleep/)
        .first()
        .innerText(),
      /freed 1[0-9] GiB/,
    );
    await page.getByLabel("Filter by model").fill(PLAIN);
    // A cause may still name another model.
    const names = () => page.locator(".event > a").allInnerTexts();
    await page.waitForFunction(
      (name) => ![...document.querySelectorAll(".event > a")].some((link) => link.textContent === name),
      MARKUP,
    );
    assert.deepEqual([...new Set(await names())], [PLAIN]);
  });
});

test("a chat shows that its model is woken, streams plain text, and can be stopped", async () => {
  await gateway.chat(MARKUP);
  await visit(`#/chat?model=${PLAIN}`, async (page) => {
    const status = page.locator(".chat-status");
    await page.waitForFunction((name) => document.querySelector("#chat-model")?.value === name, PLAIN);
    await page.getByLabel("Your message").fill("Hello <i>you</i>");
    await page.keyboard.press("Enter");
    await status.filter({ hasText: /Waited/ }).waitFor();
    await status.filter({ hasText: /First token after .*tokens/ }).waitFor();
    assert.equal(await page.locator(".message.user > .said").innerText(), "Hello <i>you</i>");
    assert.ok((await page.locator(".message.assistant > .said").innerText()).length > 10);
    await page.getByLabel("Your message").fill("Again");
    await button(page, "Send").click();
    await page.locator(".message.assistant > .said").nth(1).waitFor();
    await button(page, "Stop").click();
    await status.filter({ hasText: "Stopped." }).waitFor();
  });
});

test("everything can be reached and used by keyboard alone, with a visible focus", async () => {
  await visit("#/", async (page) => {
    await row(page, PLAIN).waitFor();
    const focused = () =>
      page.evaluate(
        () => `${document.activeElement?.tagName} ${document.activeElement?.textContent?.trim().slice(0, 60)}`,
      );
    const tabTo = async (wanted) => {
      for (let step = 0; step < 80; step += 1) {
        await page.keyboard.press("Tab");
        if ((await focused()).includes(wanted)) return;
      }
      assert.fail(`${wanted} is not reached`);
    };
    await page.keyboard.press("Tab");
    assert.match(await focused(), /Skip to the content/);
    await page.keyboard.press("Enter");
    assert.match(await focused(), /^MAIN/);
    await tabTo(PLAIN);
    const outline = await page.evaluate(() => getComputedStyle(document.activeElement).outlineStyle);
    assert.equal(outline, "solid");
    await page.keyboard.press("Enter");
    await page.getByRole("heading", { level: 1, name: PLAIN }).waitFor();
    assert.match(await focused(), new RegExp(`^H1 ${PLAIN}`));
    await tabTo("Wake");
    await page.keyboard.press("Space");
    await page.locator('.outcome[data-state="done"]').waitFor();
    await tabTo("Stop");
    await page.keyboard.press("Enter");
    await page.getByRole("dialog").waitFor();
    await page.keyboard.press("Escape");
    await page.getByRole("dialog").waitFor({ state: "hidden" });
    assert.match(await focused(), /^BUTTON Stop/);
    // Nothing traps the focus: it goes on to the end of the page, and then begins anew.
    const met = new Set();
    for (let step = 0; step < 80 && !(await focused()).includes("Skip"); step += 1) {
      await page.keyboard.press("Tab");
      met.add(await focused());
    }
    assert.ok(
      [...met].some((name) => name.includes("Skip to the content")),
      [...met].join("\n"),
    );
  });
});

test("axe finds no serious fault in any view, light, dark or on a phone", async () => {
  const looks = [{ colorScheme: "light" }, { colorScheme: "dark" }, { colorScheme: "light", viewport: PHONE }];
  for (const look of looks) {
    await visit(
      "#/",
      async (page) => {
        await row(page, PLAIN).waitFor();
        for (const route of ["#/", "#/timeline", modelRoute(MARKUP), "#/chat"]) {
          await page.evaluate((next) => (location.hash = next), route);
          await page.getByRole("heading", { level: 1 }).waitFor();
          await assertAccessible(page, `${route} ${JSON.stringify(look)}`);
        }
      },
      look,
    );
  }
});

test("on a phone nothing is wider than the screen", async () => {
  await visit(
    "#/",
    async (page) => {
      await row(page, PLAIN).waitFor();
      for (const route of ["#/", "#/timeline", modelRoute(MARKUP), "#/chat"]) {
        await page.evaluate((next) => (location.hash = next), route);
        await page.getByRole("heading", { level: 1 }).waitFor();
        assert.equal(await page.evaluate(() => document.documentElement.scrollWidth), PHONE.width, route);
      }
    },
    { viewport: PHONE },
  );
});

test("the chosen theme stays after a reload", async () => {
  await visit(
    "#/",
    async (page) => {
      const ground = () => page.evaluate(() => getComputedStyle(document.body).backgroundColor);
      const light = await ground();
      const theme = page.getByRole("button", { name: /^Theme/ });
      for (const name of ["Theme: light", "Theme: dark"]) {
        await theme.click();
        assert.equal(await theme.innerText(), name);
      }
      assert.notEqual(await ground(), light);
      await page.reload();
      assert.equal(await theme.innerText(), "Theme: dark");
      assert.notEqual(await ground(), light);
    },
    { colorScheme: "light" },
  );
});

test("a page that loses its gateway says so and how old its data is, and comes back by itself", async () => {
  await visit("#/", async (page) => {
    await row(page, PLAIN).waitFor();
    await gateway.stop();
    await page.getByRole("alert").filter({ hasText: "Not connected" }).waitFor();
    await page
      .locator("#connection")
      .filter({ hasText: /data of [0-9]+ s ago/ })
      .waitFor();
    assert.ok(await row(page, PLAIN).isVisible(), "the old data stays");
    await gateway.start();
    await page.locator('#connection[data-state="live"]').waitFor();
    assert.ok(await page.getByRole("alert").isHidden());
  });
});

test("with a token the page asks for it, keeps it out of URLs, and forgets it at logout", async () => {
  const guarded = await new Gateway(twoModels({ admin: { token: TOKEN } })).start();
  const { page, problems, urls, context } = await openPage(browser, guarded.page());
  try {
    const field = page.getByLabel("Admin token");
    await field.fill("wrong");
    await page.keyboard.press("Enter");
    await page.getByText("does not accept this token").waitFor();
    await assertAccessible(page, "the login");
    await field.fill(TOKEN);
    await page.keyboard.press("Enter");
    await row(page, PLAIN).waitFor();
    await page.reload();
    await row(page, PLAIN).waitFor();
    assert.ok(urls.every((url) => !url.includes(TOKEN)));
    assert.deepEqual(await context.cookies(), []);
    await page.getByRole("button", { name: "Log out" }).click();
    await field.waitFor();
    assert.equal(await page.getByText(PLAIN).count(), 0, "what was shown is gone");
    assert.equal(await page.evaluate(() => sessionStorage.length), 0);
    assert.deepEqual(problems, []);
  } finally {
    await context.close();
    await guarded.close();
  }
});
