// The npm client's calls. A line of JSON in: {id, call, url, model, options}; a line out: {id, result} or {id, thrown}.
"use strict";

const readline = require("node:readline");
const OpenAI = require("openai");
const undici = require("undici");
const { zodFunction, zodResponseFormat, zodTextFormat } = require("openai/helpers/zod");
const { z } = require("zod");

const Trip = z.object({ city: z.string(), days: z.number().int(), stops: z.array(z.string()) });
const HELLO = [{ role: "user", content: "Tell me a story." }];
const FILE = Buffer.from(Array.from({ length: 256 * 700 }, (_, i) => i % 256));
const TOOLS = ["book", "cancel"].map((name) => zodFunction({ name, parameters: Trip }));
const FLAT_TOOLS = TOOLS.map((tool) => ({ type: "function", ...tool.function }));

function client(url, { idle, ...options }) {
  if (idle) {
    // Both timeouts of undici are of silence, before and after the head.
    const dispatcher = new undici.Agent({ headersTimeout: idle, bodyTimeout: idle });
    options = { ...options, fetch: undici.fetch, fetchOptions: { dispatcher } };
  }
  return new OpenAI({ baseURL: url + "/v1", apiKey: "any", ...options });
}

async function all(stream) {
  const items = [];
  for await (const item of await stream) items.push(item);
  return items;
}

function check(is, what) {
  if (!is) throw new Error(what);
}

async function leave(stream, after) {
  let seen = 0;
  for await (const _ of await stream) if (++seen === after) break;
  return seen;
}

const calls = {
  chat: (api, model) => api.chat.completions.create({ model, messages: HELLO }),
  chatStream: async (api, model) => {
    const chunks = await all(api.chat.completions.create({ model, messages: HELLO, stream: true }));
    check(chunks.at(-1).choices[0].finish_reason === "stop", "the last chunk is the end");
    return chunks;
  },
  chatStreamWithUsage: (api, model) =>
    all(api.chat.completions.create({ model, messages: HELLO, stream: true, stream_options: { include_usage: true } })),
  completionsStream: (api, model) => all(api.completions.create({ model, prompt: "a", stream: true })),
  tools: (api, model) => api.chat.completions.parse({ model, messages: HELLO, tools: TOOLS }),
  toolsStream: (api, model) => all(api.chat.completions.create({ model, messages: HELLO, tools: TOOLS, stream: true })),
  toolsStreamHelper: async (api, model) => {
    const stream = api.chat.completions.stream({ model, messages: HELLO, tools: TOOLS });
    const final = await stream.finalChatCompletion();
    check(final.choices[0].message.tool_calls.every((call) => call.function.parsed_arguments.city), "arguments parse");
    return final;
  },
  structured: async (api, model) => {
    const format = zodResponseFormat(Trip, "trip");
    const answer = await api.chat.completions.parse({ model, messages: HELLO, response_format: format });
    check(answer.choices[0].message.parsed.city, "the document parses");
    return answer;
  },
  structuredStream: (api, model) =>
    api.chat.completions
      .stream({ model, messages: HELLO, response_format: zodResponseFormat(Trip, "trip") })
      .finalChatCompletion(),
  responses: (api, model) => api.responses.create({ model, input: "hi", previous_response_id: "resp_1" }),
  responsesStream: async (api, model) => {
    const events = await all(api.responses.create({ model, input: "hi", stream: true }));
    check(events.at(-1).type === "response.completed", "the last event is the end");
    return events;
  },
  responsesStructured: async (api, model) => {
    const answer = await api.responses.parse({ model, input: "hi", text: { format: zodTextFormat(Trip, "trip") } });
    check(answer.output_parsed.city, "the document parses");
    return answer;
  },
  responsesToolsStream: (api, model) =>
    api.responses.stream({ model, input: "hi", tools: FLAT_TOOLS }).finalResponse(),
  embeddings: (api, model) => api.embeddings.create({ model, input: ["a", "b"], dimensions: 16 }),
  transcription: async (api, model) => {
    const file = await OpenAI.toFile(FILE, "a.wav");
    const heard = await api.audio.transcriptions.create({ model, file });
    check(heard.text.startsWith(`${FILE.length} bytes`), "the file arrived whole");
    return heard;
  },
  transcriptionStream: async (api, model) => {
    const file = await OpenAI.toFile(FILE, "a.wav");
    return all(api.audio.transcriptions.create({ model, file, stream: true }));
  },
  speech: async (api, model) => {
    const answer = await api.audio.speech.create({ model, input: "hi", voice: "alloy" });
    return Buffer.from(await answer.arrayBuffer()).toString("base64");
  },
  images: (api, model) => api.images.generate({ model, prompt: "a cat" }),
  moderations: (api, model) => api.moderations.create({ model, input: "a" }),
  badRequest: (api, model) => api.chat.completions.create({ model, messages: HELLO, max_tokens: 0 }),
  long: (api, model) => api.chat.completions.create({ model, messages: HELLO, max_tokens: 5000 }),
  leaveChat: (api, model) =>
    leave(api.chat.completions.create({ model, messages: HELLO, max_tokens: 5000, stream: true }), 8),
  leaveResponses: (api, model) =>
    leave(api.responses.create({ model, input: "hi", max_output_tokens: 5000, stream: true }), 8),
  abort: async (api, model) => {
    const controller = new AbortController();
    const ask = { model, messages: HELLO, max_tokens: 5000, stream: true };
    const stream = await api.chat.completions.create(ask, { signal: controller.signal });
    let seen = 0;
    for await (const _ of stream) if (++seen === 8) controller.abort();
    return seen;
  },
};

async function answer({ id, call, url, model, options }) {
  try {
    return { id, result: await calls[call](client(url, options), model) };
  } catch (error) {
    const { status, message } = error;
    // The name of the class is what its users catch.
    return { id, thrown: { name: error.constructor.name, message, status, error: error.error } };
  }
}

const lines = readline.createInterface({ input: process.stdin });
lines.on("line", async (line) => console.log(JSON.stringify(await answer(JSON.parse(line)))));
lines.on("close", () => process.exit(0));
