package relay

import (
	"context"
	"time"

	"github.com/google/uuid"

	"posthaste/outbox"
)

// Store is the relay's side of Postgres, as the ports that its parts use; posthaste/sql implements it. All methods are
// safe for concurrent use. Every call has a timeout of its own, and a failed call changes nothing, unless its answer
// was lost: then it may have been executed, and it can be repeated. A write under an owner or an epoch is one
// transaction with the check that the owner is still that of relay_state; an adoption waits for it.
type Store interface {
	States
	Adoptions
	KnownStreams
	Layouts
	Restores
	Horizons
	Barriers
	Marks
	DeadEvents
	Audits
	Upkeep
}

// States reads and writes the relay's row, by which an owner is known to all instances.
type States interface {
	// Register makes sure this relay's row exists. Errors: *SecondNameError, *TakenNameError, and the schema errors of
	// the store.
	Register(ctx context.Context) error
	// State reads the row.
	State(ctx context.Context) (outbox.State, error)
	// SetActive records what the epoch's owner does now; false if the epoch has changed.
	SetActive(ctx context.Context, epoch int64, active outbox.Mode, handover outbox.LSN, degraded string) (bool, error)
}

// Adoptions makes this instance the owner of the streams. The writes are conditional on the epoch.
type Adoptions interface {
	// Adopt writes a new owner and its sink if the epoch is still a.From; otherwise, or if Register must look at the
	// table again, it returns false. In the same transaction it notes the streams to repair. The active mode is standby
	// until SetActive.
	Adopt(ctx context.Context, a outbox.Adoption) (bool, error)
	// Newest returns, by stream, the last entry in a mark or repair since the stream was last found incomplete. It
	// reads only the newest marks.
	Newest(ctx context.Context) (map[string]string, error)
	// Delivered reports whether any event was ever settled.
	Delivered(ctx context.Context) (bool, error)
	// Ungated lists the streams without a record that their gates were raised.
	Ungated(ctx context.Context) ([]string, error)
	// AwaitLayout waits until a synchronous standby, if there is one, has the last change of the layout, which may have
	// been committed without it. An adoption calls it before the first publish. If a failover took the layout back,
	// events published under it would be published again, to other streams.
	AwaitLayout(ctx context.Context) error
}

// KnownStreams lists the streams that were published to.
type KnownStreams interface {
	// Streams lists every stream ever published to.
	Streams(ctx context.Context) ([]outbox.Stream, error)
	// NoteStream durably records that stream, one of the streams of type base, is about to be published to under epoch,
	// and returns whether its gate was raised before. ErrSuperseded: the epoch has changed; an adoption waits for a
	// running NoteStream. *TakenError: it is a stream of another type.
	NoteStream(ctx context.Context, stream, base string, epoch int64) (gated bool, err error)
	// Gated records that the gates of streams were raised: a gate that is missing later was lost.
	Gated(ctx context.Context, streams []string) error
}

// Layouts changes how streams are named.
type Layouts interface {
	// CheckLayout returns an error that wraps ErrLayout if a type cannot have so many streams: the server's parts of
	// aggregates differ from PartOf, or two types would have a stream of the same name.
	CheckLayout(ctx context.Context, shards int) error
	// ChangeLayout changes the names of streams for o, which has just made one mark that of every part (SettleAll) and
	// has published nothing since. Events that this mark settles were published under the previous layout; the next
	// owner publishes all others under the new one. It fails and changes nothing if another mark exists. ErrLayout as
	// from CheckLayout, for a type that was published for the first time in between. ErrSuperseded: o is no longer the
	// owner.
	ChangeLayout(ctx context.Context, o outbox.Owner, to outbox.Layout) error
	// FirstLayout changes the prefix of streams' names for o, if nothing was ever published, and reports whether it
	// did. ErrSuperseded: o is no longer the owner.
	FirstLayout(ctx context.Context, o outbox.Owner, prefix string) (bool, error)
}

// Restores is what the comparison of a stream with the table needs.
type Restores interface {
	// Repairs lists the repairs to do, one for each stream. Events settled more than within before the adoption are not
	// restored.
	Repairs(ctx context.Context, within time.Duration) ([]outbox.Repair, error)
	// Log passes the events of r's stream that the marks after r.From up to r.To have settled to visit, page by page,
	// in the order of marks, parts and numbers, until visit fails. No transaction is open while visit runs.
	Log(ctx context.Context, r outbox.Repair, visit func(page []outbox.Logged) error) error
	// Events reads the first few of the listed events, without deleted ones, and returns how many list entries they
	// cover.
	Events(ctx context.Context, list []outbox.Logged) (events []*outbox.Record, used int, err error)
	// Owed lists the unsettled events of a stream.
	Owed(ctx context.Context, stream string, visit func(id uuid.UUID)) error
	// Restoring records how many events were republished, before the first one and then repeatedly. If these are lost
	// as well, the next repair looks for them, even if this one did not end.
	Restoring(ctx context.Context, r outbox.Repair, restored int64) error
	// Repaired records that r is done. ErrSuperseded: o is no longer the owner.
	Repaired(ctx context.Context, o outbox.Owner, r outbox.Repair, done outbox.Repaired) error
	// CountMissing counts the settled events that streams lack after their repair, and returns what it finds, once. It
	// skips streams that must still be repaired. tail is the method of stream.Restorer.
	CountMissing(ctx context.Context, tail func(ctx context.Context, stream, after string) ([]outbox.Entry, error)) (
		[]outbox.Report, error)
}

// Horizons relates positions in the WAL to what is visible.
type Horizons interface {
	// InsertLSN returns the end of the WAL written so far.
	InsertLSN(ctx context.Context) (outbox.LSN, error)
	// Horizon returns an LSN and a transaction id such that everything that could have committed at or before the LSN
	// is visible once VisibleBelow(xid) is true. The LSN is 0 if the server refuses to return it.
	Horizon(ctx context.Context) (outbox.LSN, uint64, error)
	// VisibleBelow reports whether every transaction older than xid has ended.
	VisibleBelow(ctx context.Context, xid uint64) (bool, error)
}

// Barriers keeps, across leaders, the transaction that must end before anything is streamed.
type Barriers interface {
	// RaiseBarrier records, before the slot is moved or created without a wait for visibility, the transaction that
	// must end before it is streamed. The next leader reads it. known: xid is later than the transactions of an unknown
	// barrier, and replaces it. ErrSuperseded: the epoch has changed, and the slot must not be moved.
	RaiseBarrier(ctx context.Context, epoch int64, xid uint64, known bool) error
	// LowerBarrier clears the barrier if it is not younger than xid.
	LowerBarrier(ctx context.Context, epoch int64, xid uint64) error
}

// Marks settles rows.
type Marks interface {
	// BeginPass writes a snapshot for o. ErrSuperseded: o is no longer the owner.
	BeginPass(ctx context.Context, o outbox.Owner) (outbox.Pass, error)
	// SettleAll makes pass, as it was written, the mark of every part. All parts have reached it, and no process sweeps
	// or streams. ErrSuperseded: o is no longer the owner.
	SettleAll(ctx context.Context, o outbox.Owner, pass outbox.Pass) error
	// Marker opens the session that moves the mark after a stream. It fails on a server with another history than that
	// of the adoption: after a failover, the server may assign ids and numbers again that the stream has seen.
	Marker(ctx context.Context) (outbox.Marker, error)
}

// DeadEvents keeps the events that were given up.
type DeadEvents interface {
	// Park records a row in outbox_dead, which settles it. It returns true if the row is parked or deleted, false if it
	// is not visible yet. ErrSuperseded: o is no longer the owner, even if the call arrives late: a later owner may
	// have published the row. An adoption waits for a running Park.
	Park(ctx context.Context, o outbox.Owner, row *outbox.Row, class, reason string, attempts int) (bool, error)
	// Parked lists the dead events of aggregates, for block-key.
	Parked(ctx context.Context) ([]outbox.Dead, error)
}

// Audits shows whether rows move, and which session leads.
type Audits interface {
	// Audit returns one of the oldest unsettled rows of each part.
	Audit(ctx context.Context) (outbox.AuditMark, error)
	// LeaderSession returns the session that holds the leader's lock, the zero value if no session does.
	LeaderSession(ctx context.Context) (outbox.LeaderSession, error)
	// EndSession ends the session with a pid, if it holds the leader's lock.
	EndSession(ctx context.Context, pid int) error
}

// Upkeep is what a leader does at intervals.
type Upkeep interface {
	// Sound returns an error that names a change of the table which breaks a guarantee.
	Sound(ctx context.Context) error
	// KeepHistory deletes rows that were settled longer ago than the retention, by the database's clock, and their
	// marks.
	KeepHistory(ctx context.Context) error
	// Housekeep deletes dead events whose retry was published, and returns how many events are parked.
	Housekeep(ctx context.Context) (dead int64, err error)
	// Backlog returns the number of unsettled rows and the age of the oldest. It includes rows that were published
	// after the mark.
	Backlog(ctx context.Context) (rows int64, oldest time.Duration, err error)
	// Missing counts the settled events that streams are known to lack, and the phantoms that no operator has
	// acknowledged.
	Missing(ctx context.Context) (missing, phantoms int64, err error)
	// NoteGroups records the consumer groups of each stream. It records nothing if the epoch has changed.
	NoteGroups(ctx context.Context, epoch int64, groups map[string][]string) error
}
