// More models than fit: CLIENTS (30) clients, each asks for one model after the other, so the models must take turns. The
// share of each in the answers and the longest wait are what to look at.
import { sleep } from 'k6';
import { complete, pick, seconds, stream, thresholds } from './common.js';

export const options = {
  scenarios: {
    mixed: {
      executor: 'constant-vus', vus: Number(__ENV.CLIENTS || 30), duration: `${seconds}s`, gracefulStop: '120s',
    },
  },
  thresholds,
  summaryTrendStats: ['min', 'med', 'p(95)', 'max'],
};

export default function () {
  const model = pick(__VU + Math.floor(__ITER / 5));
  if (__ITER % 3 === 0) stream(model, 24);
  else complete(model, 8);
  sleep(0.1);
}
