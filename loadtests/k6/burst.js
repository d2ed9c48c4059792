// A crowd that comes at once to a model that is cold: CLIENTS (200) requests within a second. All wait for the same start,
// and all are answered.
import { complete, models, stream, thresholds } from './common.js';

const clients = Number(__ENV.CLIENTS || 200);

export const options = {
  scenarios: {
    burst: { executor: 'per-vu-iterations', vus: clients, iterations: 1, maxDuration: '180s' },
  },
  thresholds,
  summaryTrendStats: ['min', 'med', 'p(95)', 'max'],
};

export default function () {
  if (__VU % 2) stream(models[0], 16, '180s');
  else complete(models[0], 16, '180s');
}
