// The shapes of what the admin API sends, for readers and for editors. docs/admin-api.md has their meaning.

/**
 * All sizes are bytes, all times milliseconds since the Unix epoch, and all durations milliseconds, except those of
 * `Rate`, which are in seconds.
 *
 * @typedef {"awake" | "asleep" | "launching" | "cold" | "failed" | "unplaceable"} ModelState
 * @typedef {"parked" | "connecting" | "waiting" | "streaming"} Phase
 * @typedef {"launched" | "woke" | "slept" | "evicted" | "stopped" | "failed" | "refused" | "warned"} What
 *
 * @typedef {object} Accelerator
 * @property {string} id
 * @property {number} capacity
 * @property {number} reserved
 * @property {number | null} observed The meter's last reading.
 * @property {boolean} healthy
 * @property {number} [units] Of a pool: its accelerators. Of an accelerator with slots: its slots.
 * @property {number} [unitsTaken]
 * @property {string} [pool]
 * @property {string} [node]
 *
 * @typedef {{low: number, likely: number, high: number}} Wait Until an answer begins. Four of five are in the range.
 *
 * @typedef {object} Model
 * @property {string} name
 * @property {ModelState} state
 * @property {number} waiting
 * @property {number} leases
 * @property {boolean} pinned
 * @property {string} reason
 * @property {Outcome} [lastOutcome]
 * @property {number} declared
 * @property {Record<"peak" | "residue" | "start" | "wake" | "sleep" | "observed", number | null>} learned
 * @property {Wait | null} [expectedWait]
 *
 * @typedef {object} Outcome
 * @property {number} at
 * @property {number} generation
 * @property {{stage: string, cause: unknown, count: number, diagnostics?: Record<string, string>}} [failed]
 * @property {{reason: string | null, successor: string | null}} [deactivated]
 *
 * @typedef {object} Engine
 * @property {string} engine `MODEL#REPLICA`
 * @property {number} generation
 * @property {string} state
 * @property {number} since
 * @property {number} leases
 * @property {{kvPercent?: number, waiting?: number}} [saturation]
 * @property {string[]} accelerators
 * @property {number} reserved On each of its accelerators; of a pool, on all of them together.
 * @property {number} host
 *
 * @typedef {object} Fleet
 * @property {Accelerator[]} accelerators
 * @property {{capacity: number, reserved: number}} host
 * @property {Model[]} models
 * @property {Engine[]} engines
 *
 * @typedef {object} InFlight
 * @property {string | number} id
 * @property {string} model
 * @property {Phase} phase
 * @property {number} since
 * @property {number} started
 * @property {string | null} [key]
 * @property {string} route
 * @property {number | null} [tokens]
 *
 * @typedef {object} Rate Over the last minute.
 * @property {string} model
 * @property {number} requestsPerSecond
 * @property {{p50: number | null, p95: number | null} | null} firstToken
 * @property {number} tokensPerSecond
 *
 * @typedef {object} Snapshot
 * @property {number} at
 * @property {string} [gateway] The name of the gateway that serves the page.
 * @property {boolean} [leads] Whether it decides; in a cluster, one gateway does.
 * @property {Fleet} fleet
 * @property {InFlight[]} requests
 * @property {number} [requestsTotal]
 * @property {Rate[]} rates
 *
 * @typedef {object} TimelineEvent
 * @property {number} at
 * @property {string | null} [model]
 * @property {string | null} [engine]
 * @property {What} what
 * @property {string | null} [cause]
 * @property {number | null} [took]
 * @property {number | null} [freed]
 *
 * @typedef {object} Operation
 * @property {number} operation
 * @property {string} model
 * @property {unknown} order
 * @property {number} given
 * @property {"running" | "done" | "failed"} state
 * @property {string | null} reason
 *
 * @typedef {object} Explanation
 * @property {string} model
 * @property {ModelState} state
 * @property {number} waiting
 * @property {number} leases
 * @property {string} reason
 * @property {Outcome | null} [lastOutcome]
 * @property {Record<string, Variant>} [variants]
 * @property {{waited_for: string, position: number, holders: Holder[], retry_after: number | null}} wait
 * @property {number} at
 *
 * @typedef {{current: number, asleep: number, target?: number, targetReason?: string, wait?: {reason: string}}} Variant
 * @typedef {{model: string, memory: number, idle_for: number, leases: number, pinned: boolean}} Holder
 *
 * @typedef {object} View What a route shows.
 * @property {string} title
 * @property {HTMLElement} root
 * @property {() => void} update Shows the store's newest data.
 * @property {() => void} [close] Ends what the view has started.
 */

export {};
