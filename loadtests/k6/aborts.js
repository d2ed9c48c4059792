// Long streams, half of whose clients leave in the middle. What stays must arrive whole, and afterwards nothing may be held
// for those that left: at the end the gateway's own metrics must show no request in flight (ADMIN).
import http from 'k6/http';
import { check, sleep } from 'k6';
import { admin, leave, models, seconds, stream, thresholds } from './common.js';

export const options = {
  scenarios: {
    readers: { executor: 'constant-vus', vus: 20, duration: `${seconds}s`, gracefulStop: '60s', exec: 'readers' },
    leavers: { executor: 'constant-vus', vus: 20, duration: `${seconds}s`, gracefulStop: '60s', exec: 'leavers' },
  },
  thresholds,
  throw: true,
  summaryTrendStats: ['med', 'p(95)', 'max'],
};

export function setup() {
  stream(models[0], 1);
}

export function readers() {
  stream(models[0], 200);
}

export function leavers() {
  leave(models[0], 100000, 100 + Math.floor(Math.random() * 900));
}

export function teardown() {
  for (let left = 50; left > 0; left -= 1) {
    const held = http.get(`${admin}/metrics`).body.split('\n').filter((l) => /^rouse_in_flight\{.* [1-9]/.test(l));
    if (held.length === 0) return;
    sleep(0.1);
  }
  check(null, { 'nothing is held for clients that left': () => false });
}
