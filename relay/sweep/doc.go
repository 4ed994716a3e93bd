// Package sweep settles the unsettled rows of the outbox table without the stream. A worker sweeps one page of one of
// the table's parts in a transaction that holds the lock of the part (FOR UPDATE SKIP LOCKED); other workers take other
// parts. A pass has a snapshot; its pages are the rows that are visible in it and not covered by the part's mark. After
// each page the worker writes a mark, and after the last page the snapshot becomes the mark. A worker that claims the
// part later resumes an interrupted pass with the same snapshot. No snapshot is held while Redis is called, and settled
// rows are not read, so old transactions do not slow it down.
//
// Publishing is safe to repeat even if the mark is not written afterwards: the gate keeps the events that a claim has
// published and no mark covers yet, and suppresses them when a later claim of the same part publishes them again. So
// after any unclear outcome (a lost reply, a lost session) a worker simply claims the part again.
package sweep
