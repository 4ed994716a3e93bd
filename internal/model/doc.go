// Package model is an exhaustive model of "settle by a mark", by which posthaste decides that an event is settled
// (docs/architecture.md has the reasons). It has tests only. They go through every order in which writers, relays,
// Postgres and Redis can act within a budget of faults. In each state they check whether an event is lost, twice in
// its stream, out of order, published although it was not committed, or parked although it is published. When nothing
// more can happen, they check whether everything is settled and no WAL is held back.
//
// TestRelaysDoWhatTheModelSays checks the steps of real relays against the same machine.
//
// The table outbox is a log: a row is not deleted when it is settled. A row is settled if the mark of its part holds
// it: a snapshot in which its transaction has ended, and a number that is not lower than the row's.
//
// A sweep takes a snapshot and publishes the rows that the snapshot sees and the mark does not; then the snapshot
// becomes the mark. For a hand-over the snapshot is written first, all parts are swept up to it, and it becomes the
// mark of every part. A stream constructs its mark: it takes a snapshot, lists the rows that it sees and the mark
// does not, and omits each transaction that it has not published completely. A row that is still unpublished when the
// stream reaches the end of the WAL as of the snapshot was missed.
//
// An unwritten snapshot is used only in the session that took it. Every write of a mark requires the owner, and the
// server that the owner has adopted. A relay that does not know whether its write succeeded adopts again. After a
// crash of Postgres or a promotion of another server, a relay may continue with new sessions until it knows that its
// lock is lost. The gate in Redis keeps its owner, its lanes, the number of entries it has let through, and the ids
// of batches that no mark holds yet.
//
// Assumptions of the model, to be shown by tests against real servers: a snapshot written by a transaction that is on
// disk has no id that Postgres assigns again; a streamed transaction is on disk; the session that writes the mark of
// a part keeps the part locked while the server executes its statement. The model omits batches of several events,
// several streams, trimming, and rows that a writer deletes before they are published.
//
// When Redis or Postgres has gone back, an adoption compares the stream with the settled events before anything else
// is published. In the model the gate records that a stream is incomplete; posthaste records it in outbox_reconcile, in
// the transaction that raises the epoch.
//
// After a silent gap in the publication, the hidden events are published after events that were streamed in the
// meantime, because the stream cannot know of them. A parked event that is retried is published after later ones. All
// other order is kept.
package model
