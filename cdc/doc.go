// Package cdc turns committed inserts on the outbox table into outbox.Row values, in commit order, by reading the
// write-ahead log through a logical replication slot, and maintains that slot and its publication.
//
// Two types do the work. Reader implements outbox.Source: it owns the replication connection, decodes pgoutput and
// delivers Chunks. Slots implements outbox.Slots over an ordinary pool: it creates, advances, repairs and drops the
// slot.
//
// # What is confirmed, and when
//
// The reader does not confirm delivered rows by itself. The receiver calls Reader.Settled with the End of a row once
// everything up to it is durable elsewhere; only then does the reader confirm the position, and only then may the
// server recycle the WAL. Nothing is confirmed past a transaction that is still being received or unsettled. While
// nothing is in flight, the reader itself confirms WAL without outbox rows, so an idle outbox in a busy database holds
// back no WAL and needs no heartbeat table.
//
// A confirmed position is not durable at once: a server that crashes may deliver confirmed transactions again. The next
// Run delivers transactions again that were delivered but not confirmed. The receiver must therefore detect repeated
// events: (Row.Commit, place in the transaction) identifies a row, Event.ID the event.
//
// A commit can arrive here before other sessions see its rows (seconds before, with synchronous replication), so a row
// that is missing in the table proves nothing until the transaction Row.XID is visible.
//
// # Using it
//
//	slots, err := cdc.NewSlots(cdc.Options{Pool: pool, Slot: "posthaste_default"})
//	…
//	if _, err := slots.Ensure(ctx, nil); err != nil { … } // *outbox.SlotError names what is wrong and how to fix it
//	reader, err := cdc.NewReader(cdc.Options{URL: url, Pool: pool, Slot: "posthaste_default"})
//	…
//	out := make(chan outbox.Chunk, 4)
//	go func() { done <- reader.Run(ctx, func(context.Context) error { return nil }, out) }()
//	for chunk := range … {
//		… // publish
//		reader.Settled(chunk.Rows[len(chunk.Rows)-1].End) // if it is not zero
//	}
//
// A server that is shut down in order waits until each walsender's client has confirmed all WAL. A receiver that cannot
// settle must therefore end Run when the server ends its other connections (57P01), or the server never stops.
package cdc
