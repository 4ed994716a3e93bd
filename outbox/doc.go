// Package outbox is what a service imports to publish events: [Insert] and [InsertSQL] write an [Event] in the
// service's own transaction. It depends only on pgx and uuid.
//
// Everything else here is for posthaste itself: the types and the ports that its packages share, which are an event
// between the table and a stream, the right to publish, and what the machine in package relay requires of the packages
// that do the work. They perform no I/O.
//
// # Words
//
// A [Record] is one row of the outbox table; a [Row] is a record as the slot delivers it, with its transaction. A place
// in the write-ahead log is an [LSN]. An [Owner] is a leadership, which may publish. A [Lane] is one numbered sequence
// of batches into one stream; a [Mark] names a place in it, and a [Receipt] is the result of publishing a batch.
//
// # Ports
//
// [Source] and [Slots] are the replication slot (package cdc), and [Locker] the locks of an instance (package sql). The
// other ports are where they are used: those of the streams and their gates in package relay/stream, those of the
// relay's state in Postgres in package relay, and those of the sweep in package relay/sweep. The methods document their
// guarantees and when they may be called; the machine relies on nothing else:
//
//   - A row is settled only after its event is in its stream and the sink has confirmed the configured durability.
//   - A publish can be repeated without effect, because of its place in its lane. A superseded caller is refused
//     ([FencedError]), and a sink that has lost state answers [ErrGap].
//   - A position is confirmed to the slot only when everything before it is settled.
//   - A missing row is only conclusive once its transaction is visible ([Snapshot.Visible]).
//
// The type of a port's error decides: [SlotError], [PoisonError], [FencedError], [ForeignError], [ErrGap] and
// [ErrSuperseded] have a meaning; after any other error the call is repeated.
package outbox
