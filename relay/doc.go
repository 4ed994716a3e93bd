// Package relay is the machine that moves events from the outbox table to the streams: it waits for leadership, adopts
// the streams, sweeps the table, hands over to the replication slot and streams, and falls back when the slot cannot be
// used. It depends on the ports of package outbox and on no driver.
//
// # Contract
//
// [New] takes the ports, and [Relay.Run] works until its context ends. Run never gives up: it reports in [Relay.Health]
// what is missing or broken, waits for it, and continues. It returns an error only at the start and only for a problem
// that waiting cannot solve. Any number of instances may run on one table; one of them leads, and in poll mode the
// others also sweep.
//
// Under every failure it guarantees that no committed event is lost, that none is published twice to one stream, and
// that events of one aggregate keep their order. These guarantees rest on four rules:
//
//   - A leader reads nothing from the table or the slot before it has written itself into the table as the owner and
//     has raised every known gate. Raising a gate puts events that earlier owners published and did not settle in
//     doubt, and they are not published again. A follower may sweep a moment earlier; it raises the gate of each stream
//     before it publishes there.
//   - Every way out of a phase in which something was published leads through adopt (machine.go).
//   - The table is the truth. The slot only announces rows quickly; the sweep publishes rows that the slot does not
//     deliver, and the settler detects them (settler.go).
//   - A mark records which rows are settled. It covers a row only after the row's event is confirmed or parked. Settled
//     batches are reported to the gate, and confirmed to the slot, after the mark is written.
//
// # An orderly stop
//
// A stream uses two contexts, a span. The intake ends first, and nothing new is taken; the work under way may last a
// little longer, to publish and settle the events that were taken. The loss of leadership ends both at once.
package relay
