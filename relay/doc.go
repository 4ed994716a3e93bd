// Package relay is the machine that moves events from the outbox table to the streams: it waits for leadership, adopts
// the streams, sweeps the table, hands over to the replication slot and streams, and falls back when the slot cannot be
// used. It knows the ports of package outbox and no driver.
//
// # Contract
//
// [New] takes the ports, and [Relay.Run] works until its context ends. Run never gives up: whatever is missing or
// breaks is named in [Relay.Health], waited for, and gone on from. It returns an error only at the start and only for
// what waiting cannot repair. Any number of instances may run on one table; one of them leads, and in poll mode the
// others sweep along.
//
// What it promises, whatever breaks: no committed event is lost, none is published twice to one stream, and events of
// one aggregate keep their order. What that rests on:
//
//   - A leader reads nothing from the table or the slot before it has written itself into the table as the owner and
//     has raised every known gate: what earlier owners published and did not settle is in doubt then, and is not
//     published again. A follower may sweep a moment earlier; it raises the gate of each stream before it publishes
//     there.
//   - Every way out of a phase in which something was published leads through adopt (machine.go).
//   - The table is the truth. The slot is a way to hear of rows quickly; what it does not deliver is swept, and the
//     settler notices that it did not (settler.go).
//   - A mark says what is settled, and comes to hold a row after its event is confirmed or parked. What was settled is
//     told to the gate, and confirmed to the slot, after the mark is written.
//
// # An orderly stop
//
// Two contexts go through the stream, a span: the intake ends first, and nothing new is taken; the work under way may
// last a little longer, to publish and settle what was taken. Leadership that is lost ends both at once.
package relay
