// Package outbox has the words and the ports that everything else shares: what an event is on its way from the table to
// a stream, who may publish it, and what the machine in package relay asks of those who do the work. It has no code
// that acts.
//
// # Words
//
// An [Event] is one row of the outbox table; a [Row] is an event as the slot delivers it, with its transaction. A place
// in the write-ahead log is an [LSN]. An [Owner] is a leadership: who may publish. A [Lane] is one numbered sequence of
// batches into one stream; a [Mark] names a place in it, and a [Receipt] tells what became of a batch.
//
// # Ports
//
// [Source] and [Slots] are the replication slot (package cdc), [Sweeper] the polling of the table (package poll),
// [Sink] the streams and their gates (package sink), [Store] and [Locker] what the relay keeps in Postgres (package
// sql). Each says at its methods what it guarantees and who may call it when; the machine relies on these sentences and
// on nothing else:
//
//   - A row is deleted only after its event is in its stream, and the sink has confirmed that with the durability asked
//     for.
//   - A publish can be repeated without effect, by its place in its lane; whoever has been replaced is refused
//     ([FencedError]), and whoever meets a sink that has forgotten something is told ([ErrGap]).
//   - A position is confirmed to the slot only when everything before it is settled.
//   - "Not there" means something only once the transaction in question is visible ([Snapshot.Visible]).
//
// A port's errors are judged by their type: [SlotError], [PoisonError], [FencedError], [ForeignError], [ErrGap] and
// [ErrSuperseded] have a meaning; anything else passes, and is repeated.
package outbox
