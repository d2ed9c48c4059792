// A chat to try a model: its answer as plain text, as it comes, and what it waits for meanwhile.

import { attribute, el, keyed, show, text } from "./dom.js";
import { call, reasonOf } from "./api.js";
import { figures, newAnswer, takeChunk } from "./completion.js";
import { quoteOf } from "./models.js";
import { events } from "./sse.js";
import { modelNamed, store } from "./store.js";

/** @typedef {{role: "system" | "user" | "assistant", content: string}} Message */

/**
 * The conversation stays while the page is open, whatever else is looked at meanwhile.
 * @type {Message[]}
 */
let conversation = [];
let lastModel = "";

/** @param {URLSearchParams} query @returns {import("./types.js").View} */
export function chatView(query) {
  /** @type {AbortController | null} */
  let answering = null;
  let began = 0;
  const model = el("select", { id: "chat-model", onchange: () => ((lastModel = model.value), update()) });
  const system = el("textarea", { id: "chat-system", rows: "2" });
  const messages = el("ol", { class: "messages" });
  const empty = el(
    "p",
    { class: "empty" },
    "Choose a model and say something. The first answer of a model that sleeps takes as long as its wake.",
  );
  const status = el("p", { class: "chat-status", role: "status" });
  const prompt = el("textarea", { id: "chat-prompt", rows: "3", placeholder: "Say something", onkeydown: onKey });
  const send = el("button", { type: "submit", class: "primary" }, "Send");
  const stop = el("button", { type: "button", onclick: () => answering?.abort() }, "Stop");
  const clear = el("button", { type: "button", class: "quiet", onclick: startOver }, "New chat");
  const form = el(
    "form",
    { class: "prompt", onsubmit },
    el("label", { class: "hidden", for: "chat-prompt" }, "Your message"),
    prompt,
    el(
      "div",
      { class: "orders" },
      send,
      stop,
      clear,
      el("span", { class: "notes" }, "Enter sends, Shift+Enter starts a new line"),
    ),
  );
  const root = el(
    "div",
    { class: "view chat" },
    el(
      "div",
      { class: "title" },
      el("h1", { tabindex: "-1" }, "Chat"),
      el("label", { for: "chat-model" }, "with"),
      model,
    ),
    el(
      "details",
      {},
      el("summary", {}, "System prompt"),
      el("label", { class: "hidden", for: "chat-system" }, "System prompt"),
      system,
    ),
    empty,
    messages,
    status,
    form,
  );
  const wish = query.get("model") ?? lastModel;
  for (const { role, content } of conversation) messages.append(bubble(role, model.value, content).root);

  /** @param {KeyboardEvent} event */
  function onKey(event) {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    form.requestSubmit();
  }

  /** @param {SubmitEvent} event */
  function onsubmit(event) {
    event.preventDefault();
    const content = prompt.value.trim();
    if (content === "" || model.value === "" || answering !== null) return;
    prompt.value = "";
    conversation.push({ role: "user", content });
    messages.append(bubble("user", "", content).root);
    void answer(model.value);
  }

  function startOver() {
    answering?.abort();
    conversation = [];
    messages.replaceChildren();
    text(status, "");
    update();
    prompt.focus();
  }

  /** @param {string} name */
  async function answer(name) {
    const asked = conversation;
    const controller = new AbortController();
    answering = controller;
    began = performance.now();
    const message = bubble("assistant", name, "");
    messages.append(message.root);
    const progress = setInterval(() => waitStatus(name), 250);
    const told = newAnswer();
    update();
    try {
      const body = JSON.stringify(requestOf(name));
      const options = {
        method: "POST",
        body,
        headers: { "content-type": "application/json" },
        signal: controller.signal,
      };
      for await (const { data } of events(await call("/admin/v1/chat", options))) {
        if (data === "[DONE]") break;
        takeChunk(told, JSON.parse(data));
        if (told.first > 0) clearInterval(progress);
        message.set(told.content, told.thought);
        text(status, told.first > 0 ? "Answers…" : status.textContent);
        if (told.end !== "") break;
      }
    } catch (error) {
      told.end = controller.signal.aborted ? "Stopped." : `No answer: ${reasonOf(error)}.`;
    }
    clearInterval(progress);
    if (told.content === "" && told.thought === "") message.root.remove();
    // What was not answered is not repeated to the model.
    if (asked === conversation && told.content === "") conversation.pop();
    else if (asked === conversation) conversation.push({ role: "assistant", content: told.content });
    if (answering === controller) answering = null;
    if (asked === conversation) text(status, `${told.end} ${figures(told, began)}`.trim());
    update();
  }

  /** @param {string} name */
  function requestOf(name) {
    const before = system.value.trim();
    const first = before === "" ? [] : [{ role: "system", content: before }];
    return {
      model: name,
      stream: true,
      stream_options: { include_usage: true },
      messages: [...first, ...conversation],
    };
  }

  /** What a request waits for, until its first token. @param {string} name */
  function waitStatus(name) {
    const waited = `${Math.round((performance.now() - began) / 1000)} s`;
    const found = modelNamed(name);
    if (found === undefined || found.state === "awake") return text(status, `Waits for the first token. ${waited}`);
    const { likely, spread } = quoteOf(found);
    const quote = likely === "–" ? "" : ` Expected: ${likely}${spread && ` (${spread})`}.`;
    const word =
      found.state === "launching"
        ? `${name} is being started or woken.`
        : `${name} is ${found.state}: ${found.reason}.`;
    text(status, `${word}${quote} Waited ${waited}.`);
  }

  function update() {
    const names = store.snapshot.fleet.models.map(({ name }) => name);
    const chosen = model.value || wish;
    keyed(model, names, (name) => name, modelOption);
    if (chosen && model.value !== chosen && names.includes(chosen)) model.value = chosen;
    lastModel = model.value;
    show(empty, messages.childElementCount === 0);
    show(stop, answering !== null);
    attribute(send, "aria-disabled", answering !== null || names.length === 0 ? "true" : null);
  }
  return { title: "Chat", root, update, close: () => answering?.abort() };
}

/** @param {string} name */
function modelOption(name) {
  const root = el("option", { value: name });
  const update = () => text(root, `${name} (${modelNamed(name)?.state ?? "unknown"})`);
  return { root, update };
}

/** @param {Message["role"]} role @param {string} model @param {string} content */
function bubble(role, model, content) {
  const said = el("div", { class: "said" }, content);
  const thinking = el("div", { class: "said" });
  const thoughts = el("details", { hidden: true }, el("summary", {}, "Reasoning"), thinking);
  const root = el(
    "li",
    { class: `message ${role}` },
    el("span", { class: "who" }, role === "user" ? "You" : model || "Model"),
    thoughts,
    said,
  );
  /** @param {string} next @param {string} thought */
  const set = (next, thought) => {
    text(said, next);
    text(thinking, thought);
    show(thoughts, thought !== "");
    show(root, next !== "" || thought !== "");
  };
  set(content, "");
  return { root, set };
}
