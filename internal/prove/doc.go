// Package prove runs a campaign of faults against the whole product, on servers of its own, and compares the results
// with its own record of the committed events.
//
// The parts, each in a file of its name:
//
//   - stage: Postgres, two Redis servers, NATS with --sink=nats, the database, and a link in front of each server for
//     each process;
//   - process: relays, APIs and consumers, which are child processes of the same binary, so that SIGKILL and SIGSTOP
//     are real;
//   - internal/lab/oracle: the events that the writers committed or rolled back, and those whose outcome is unknown. It
//     is kept outside the system under test, one byte for each event;
//   - writers, shop, effects: the load. Writers commit events, clients place orders and spend credits, and consumers
//     store effects;
//   - fault, faults, faults_*: the table of faults, alone and in pairs. The plan chooses them from a seed;
//   - reading, orders, verify: the oracle of a campaign, which reads the streams continuously and at the end;
//   - honesty: whether the relays report their state correctly, and for how long they do not;
//   - report, chart: the results for users.
//
// A broken promise ends the campaign. The report then has the event's story, the seed, and the command that repeats the
// plan. The plan is repeated exactly; the timing is not. Everything that was started is stopped and removed, even after
// an interruption, which ends the campaign in order and still prints a report.
//
// cmd/posthaste calls Run, once per process.
package prove
