// A streamed chat completion, put together from its chunks.

import { duration, perSecond } from "./format.js";

/**
 * @typedef {object} Answer
 * @property {number} first When the first token came, by this page's clock; 0 before.
 * @property {string} content
 * @property {string} thought What a reasoning model says before its answer.
 * @property {number} tokens As the engine counts them, or else one for each chunk.
 * @property {string} end Why there will be no more; empty if nothing is wrong.
 */

/** @returns {Answer} */
export function newAnswer() {
  return { first: 0, content: "", thought: "", tokens: 0, end: "" };
}

/** @param {Answer} answer @param {any} chunk */
export function takeChunk(answer, chunk) {
  if (chunk.error) answer.end = `No answer: ${chunk.error.message}`;
  const delta = chunk.choices?.[0]?.delta ?? {};
  const thought = delta.reasoning_content ?? delta.reasoning ?? "";
  if (delta.content || thought) {
    answer.tokens += 1;
    if (answer.first === 0) answer.first = performance.now();
  }
  answer.content += delta.content ?? "";
  answer.thought += thought;
  answer.tokens = chunk.usage?.completion_tokens ?? answer.tokens;
}

/** How fast an answer was. @param {Answer} answer @param {number} began When the request was sent. */
export function figures({ first, tokens }, began) {
  if (first === 0) return "";
  const streamed = (performance.now() - first) / 1000;
  const rate = tokens > 1 && streamed > 0 ? `, ${perSecond(tokens / streamed)}` : "";
  return `First token after ${duration(first - began)}; ${tokens} tokens${rate}.`;
}
