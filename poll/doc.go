// Package poll settles the unsettled rows of the outbox table without the stream. A worker claims one of the table's
// parts; other workers claim other parts. It takes a snapshot and reads, page by page, the rows that are visible in it
// and not covered by the part's mark, and publishes them. After each page it writes a mark. After the last page the
// snapshot becomes the mark. The next worker to claim the part resumes an interrupted pass with the same snapshot. Only
// the part is locked, no transaction is open while Redis is called, and settled rows are not read, so old transactions
// do not slow it down.
//
// Publishing is safe to repeat even if the mark is not written afterwards: the gate keeps the events that a claim has
// published and no mark covers yet, and suppresses them when a later claim of the same part publishes them again. So
// after any unclear outcome (a lost reply, a lost session) a worker simply claims the part again.
package poll
