// One model, requests at a fixed rate: what an application with steady traffic sees. RATE (50) requests a second, of which
// every fourth is a stream. The first ones wait for the start; the percentiles are of those that came after it.
import { complete, models, seconds, stream, thresholds as all } from './common.js';

const rate = Number(__ENV.RATE || 50);

export const options = {
  scenarios: {
    start: { executor: 'per-vu-iterations', vus: 1, iterations: 1, maxDuration: '120s', exec: 'start' },
    steady: {
      executor: 'constant-arrival-rate', rate, timeUnit: '1s', duration: `${seconds}s`, startTime: '10s',
      preAllocatedVUs: 100, maxVUs: 400,
    },
  },
  thresholds: Object.assign({ dropped_iterations: ['count==0'] }, all),
  summaryTrendStats: ['med', 'p(95)', 'p(99)', 'max'],
};

export function start() {
  complete(models[0], 1);
}

export default function () {
  if (__ITER % 4 === 3) stream(models[0], 32);
  else complete(models[0], 8);
}
