// Answers that are read while they come: text, and server-sent events. `EventSource` can send no token.

/**
 * The text of a response, as it comes.
 *
 * @param {Response} response
 * @returns {AsyncGenerator<string>}
 */
export async function* texts(response) {
  if (!response.body) return;
  const reader = /** @type {ReadableStream<any>} */ (response.body).pipeThrough(new TextDecoderStream()).getReader();
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      yield value;
    }
  } finally {
    // Whoever reads this has gone: so does the request.
    reader.cancel().catch(() => {});
  }
}

/**
 * The events of a response, as they come.
 *
 * @param {Response} response
 * @param {() => void} [onText] Called whenever anything arrives, comments included.
 * @returns {AsyncGenerator<{event: string, data: string}>}
 */
export async function* events(response, onText = () => {}) {
  let pending = "";
  let event = "message";
  /** @type {string[]} */
  let data = [];
  for await (const text of texts(response)) {
    onText();
    const lines = (pending + text).split("\n");
    pending = lines.pop() ?? "";
    for (const raw of lines) {
      const line = raw.endsWith("\r") ? raw.slice(0, -1) : raw;
      if (line === "") {
        if (data.length > 0) yield { event, data: data.join("\n") };
        event = "message";
        data = [];
      }
      const [, field, content] = /^(event|data): ?(.*)$/s.exec(line) ?? [];
      if (field === "event") event = content;
      if (field === "data") data.push(content);
    }
  }
}
