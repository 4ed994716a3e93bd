// Package prove runs a campaign of faults against the whole product, on servers of its own, and holds what comes out
// against what it knows to have been committed.
//
// The parts, each in a file of its name:
//
//   - stage: Postgres, two Redis servers, the database, and a link in front of whatever a process talks to;
//   - process: relays, APIs and consumers, children of this very binary, so that SIGKILL and SIGSTOP are real;
//   - truth: what the writers committed, rolled back, or do not know. It is kept outside the system under test, a byte
//     for each event;
//   - writers, shop, effects: who commits events, places orders and spends credits, and has effects in consumers;
//   - fault, faults_*: what is done to them, alone and in pairs, chosen by plan from a seed;
//   - reading, orders, verify: the oracle, which reads the streams all the time and everything once more at the end;
//   - honesty: whether readiness says what is true, and for how long it does not;
//   - report, page, chart: what is told of it.
//
// A broken promise ends the campaign: the event's story is told, with the seed and the command that repeats the plan.
// (The plan is repeated exactly, what happens at the same time is not.) Everything that was started is stopped and
// removed, also after an interruption, which ends a campaign in order and still reports.
//
// cmd/posthaste calls Run, once per process.
package prove
