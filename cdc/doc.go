// Package cdc turns committed inserts on the outbox table into outbox.Row values, in commit order, by reading the
// write-ahead log through a logical replication slot; and it keeps that slot and its publication in order.
//
// Two types do the work. Reader implements outbox.Source: it owns the replication connection, decodes pgoutput and
// hands out Chunks. Slots implements outbox.Slots over an ordinary pool: it creates, advances, repairs and drops the
// slot.
//
// # What is confirmed, and when
//
// The reader never confirms by itself what it has handed out. The receiver calls Reader.Settled with the End of a row
// once everything up to it is durable elsewhere; only then does the position go to the server, and only then may the
// server forget the WAL. Nothing is confirmed past a transaction that is still being received or still unsettled; WAL
// without any outbox row in it is confirmed by the reader itself while nothing is in flight, so an idle outbox beside a
// busy database holds back no WAL and needs no heartbeat table.
//
// A confirmed position is not durable at once: a server that crashes may deliver confirmed transactions again. And a
// transaction that was handed out but not confirmed is delivered again by the next Run. The receiver therefore has to
// tell repeated events from new ones; (Row.Commit, place in the transaction) identifies a row, Event.ID the event.
//
// A commit can arrive here before other sessions see its rows (seconds before, with synchronous replication), so "the
// row is not in the table" proves nothing until the transaction Row.XID is visible.
//
// # Using it
//
//	slots, err := cdc.NewSlots(cdc.SlotsOptions{Pool: pool, Slot: "posthaste_default"})
//	…
//	if _, err := slots.Ensure(ctx, nil); err != nil { … } // *outbox.SlotError names what is wrong and how to fix it
//	reader, err := cdc.NewReader(cdc.ReaderOptions{URL: url, Pool: pool, Slot: "posthaste_default"})
//	…
//	out := make(chan outbox.Chunk, 4)
//	go func() { done <- reader.Run(ctx, func(context.Context) error { return nil }, out) }()
//	for chunk := range … {
//		… // publish
//		reader.Settled(chunk.Rows[len(chunk.Rows)-1].End) // if it is not zero
//	}
//
// A server that is asked to stop in order waits until its walsenders have been told that everything is flushed. A
// receiver that cannot settle must therefore end Run when its other connections are ended (57P01), or the server never
// stops.
package cdc
