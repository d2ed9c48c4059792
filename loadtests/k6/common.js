// What all scenarios share: where the gateway is, what is asked, and what an answer must look like.
//
//   GATEWAY  http://127.0.0.1:8080   KEY  none   MODELS  tiny-llama,tiny-qwen,tiny-mistral   ADMIN  http://127.0.0.1:8180   LASTS  30
//
// Only this machine is a target: a scenario that floods somebody else's server is no test of this one.
import http from 'k6/http';
import { check, fail } from 'k6';

export const models = (__ENV.MODELS || 'tiny-llama,tiny-qwen,tiny-mistral').split(',');
export const seconds = Number(__ENV.LASTS || 30);

function here(name, written) {
  const address = written.replace(/\/+$/, '');
  if (!/^https?:\/\/(localhost|127(\.\d+){3}|\[::1\])(:\d+)?$/.test(address)) {
    fail(`${name} is ${written}: these scenarios load this machine only (http://127.0.0.1:8080, say)`);
  }
  return address;
}

export const gateway = here('GATEWAY', __ENV.GATEWAY || 'http://127.0.0.1:8080');
export const admin = here('ADMIN', __ENV.ADMIN || 'http://127.0.0.1:8180');

const headers = { 'Content-Type': 'application/json' };
if (__ENV.KEY) headers.Authorization = `Bearer ${__ENV.KEY}`;

function ask(model, tokens, stream, timeout, tags) {
  const body = {
    model,
    stream,
    max_tokens: tokens,
    messages: [{ role: 'user', content: `a prompt of ${tokens} tokens for ${model}` }],
  };
  return http.post(`${gateway}/v1/chat/completions`, JSON.stringify(body), {
    headers,
    timeout,
    tags: Object.assign({ model }, tags),
  });
}

// An answer in one piece.
export function complete(model, tokens, timeout = '120s') {
  const answer = ask(model, tokens, false, timeout, { kind: 'answer' });
  return check(answer, {
    'answered 200': (r) => r.status === 200,
    'the model that was asked for': (r) => r.status === 200 && r.json('model') === model,
    'as many tokens as asked for': (r) => r.status === 200 && r.json('usage.completion_tokens') === tokens,
  });
}

// A stream read to its end.
export function stream(model, tokens, timeout = '120s') {
  const answer = ask(model, tokens, true, timeout, { kind: 'stream' });
  const events = answer.status === 200 ? answer.body.split('\n').filter((e) => e.startsWith('data: ')) : [];
  return check(answer, {
    'streamed 200': (r) => r.status === 200,
    'no error event': () => !events.some((e) => e.startsWith('data: {"error"')),
    'an event for each token': () => events.length > tokens,
    'ended by [DONE]': () => events.length > 0 && events[events.length - 1] === 'data: [DONE]',
  });
}

// A stream whose client leaves after some milliseconds. k6 counts it as failed, so it has a tag of its own; and would warn of it, were it
// not for the option `throw`, which such a scenario sets.
export function leave(model, tokens, afterMs) {
  let ended = 'answered';
  try {
    ask(model, tokens, true, `${afterMs}ms`, { kind: 'left' });
  } catch (error) {
    ended = String(error);
  }
  return check(ended, { 'was cut by its client': (how) => how.includes('timeout') });
}

export function pick(n) {
  return models[n % models.length];
}

// Nothing may fail: not while models are cold, not while they take turns.
export const thresholds = {
  'http_req_failed{kind:answer}': ['rate==0'],
  'http_req_failed{kind:stream}': ['rate==0'],
  checks: ['rate==1'],
};
