package outbox

import (
	"context"
	"errors"
	"fmt"
	"math"
	"time"

	"github.com/google/uuid"
)

// Mode says how events travel.
type Mode string

// The desired modes are ModeAuto, ModeCDC and ModePoll; the active ones ModeCDC, ModePoll and ModeStandby.
const (
	ModeAuto    Mode = "auto"
	ModeCDC     Mode = "cdc"
	ModePoll    Mode = "poll"
	ModeStandby Mode = "standby"
)

// ParseMode reads a desired mode.
func ParseMode(s string) (Mode, error) {
	switch m := Mode(s); m {
	case ModeAuto, ModeCDC, ModePoll:
		return m, nil
	}
	return "", fmt.Errorf("mode %q: want auto, cdc or poll", s)
}

// State is the row of relay_state.
type State struct {
	Name     string
	Desired  Mode
	Active   Mode
	Owner    Owner
	Handover LSN
	// Holder names the process that leads or led last, for people.
	Holder string
	// Degraded says why events are swept although the stream is wanted; "" otherwise.
	Degraded string
	// System and Timeline identify the Postgres cluster at the last adoption; zero before the first.
	System   int64
	Timeline int32
	Changed  time.Time
	// Server is the process of Postgres that has answered: by when it was started. A copy of its files has another.
	Server string
	// Layout is how streams are named: the newest mark has it, whatever is configured. Only the owner changes it.
	Layout
	// Sink names the server that the owner publishes to, "" if that is not known. See Sink.Bind.
	Sink string
	// Barrier is a transaction id: what was committed before the slot's position may be invisible until everything
	// older has ended. 0: everything is visible. See Store.RaiseBarrier.
	Barrier uint64
}

// BarrierUnknown stands for a transaction id that could not be taken: any later one will do.
const BarrierUnknown = math.MaxInt64

// Dead is a parked event.
type Dead struct {
	ID            uuid.UUID
	Seq           int64
	AggregateType string
	AggregateID   string
	Type          string
	Error         string
	Class         string
	Attempts      int
	CreatedAt     time.Time
	DeadAt        time.Time
	Retrying      bool
	// RetrySeq is the number of the row a retry has put back into the outbox, 0 for none. Only Store.Parked fills it.
	RetrySeq int64
}

// LeaderSession is the session that holds the leader's lock.
type LeaderSession struct {
	PID int
	// Application, Role and Address are "" where they are not visible.
	Application, Role, Address string
	// Relay is false only for a session that is known not to be a relay's.
	Relay bool
}

// String names the session.
func (s LeaderSession) String() string {
	return fmt.Sprintf("the session with pid %d (application %q, role %q, address %q)", s.PID, s.Application, s.Role,
		s.Address)
}

// AuditMark is what the audit compares from one time to the next.
type AuditMark struct {
	// LSN is at or behind the commit of every row in First.
	LSN LSN
	// Flushed is how far the WAL is on disk, and may be streamed.
	Flushed LSN
	// First has, for each part with rows that are owed, the number of one that has waited longest.
	First map[int16]int64
}

// Pass is a snapshot that was written down before it is used, and what it is used for: everything it sees is to be
// settled. A server that crashes may give out the ids of transactions again that nobody has written of; it does not
// give out those that a written snapshot knows.
type Pass struct {
	Settled
	// End is the end of the WAL, read after the snapshot was taken: the commits of all that it sees are below.
	End LSN
}

// Owed are the rows of one transaction that a look saw, and the mark that it began at does not hold. Parked rows are
// among them.
type Owed struct {
	XID  uint64
	Seqs []int64
}

// Look is what a Marker sees.
type Look struct {
	Pass
	// Owed is in the order of transaction ids.
	Owed []Owed
}

// Marker moves the mark of every part behind a stream. It is one session of the server: what one has looked at, another
// must not use, because the server may have crashed in between. So a failed call ends it: close it and take another.
// It belongs to one goroutine.
type Marker interface {
	// Look takes a snapshot and lists what it sees and since does not hold, of the transactions below the id given;
	// math.MaxInt64 is above all.
	Look(ctx context.Context, since Settled, below uint64) (Look, error)
	// Move makes to the mark of every part. to sees nothing that the last Look did not see, and everything that since
	// does. It fails, and moves nothing, if the newest mark sees something that to does not: a call of a Marker that
	// was given up may arrive behind its successor's. ErrSuperseded: o is not the state's owner any more, and nothing
	// was moved.
	Move(ctx context.Context, o Owner, to Settled, entries Entries) error
	Close()
}

// Adoption is what Store.Adopt writes.
type Adoption struct {
	// From is the epoch that the state is to have still.
	From   int64
	To     Owner
	Holder string
	// Sink is where the new owner publishes; "" if that is not known.
	Sink string
	// Suspects are the streams that may lack events that were settled, or whose gate does not know what is in them.
	Suspects []StreamState
	// Delivered tells whether anything was ever settled: without that nothing is lost.
	Delivered bool
	// WentBack: the gates know of later owners than the table, so that the table is that of an earlier time.
	WentBack bool
}

// Repair is what an adoption has to put right in a stream, because the sink or Postgres has forgotten what the other
// one still knows. Until that is done nothing newer is published.
type Repair struct {
	// IDs are those of the adoptions' notes that it stands for.
	IDs    []int64
	Stream string
	// After is an entry of the stream before which there is nothing to compare, "" for none.
	After string
	// From and To bound the marks whose events are compared with the stream, From exclusively; To is 0 if there are
	// none. Those that Missing and later marks have settled are published again if they are not in the stream.
	From, To, Missing int64
	// Recall asks for what is in the stream and not settled: the gate does not know it.
	Recall bool
	// Back is set if Postgres has gone back in time: what is in the stream and not in the table was published, and is
	// not committed.
	Back bool
	// Groups are the consumer groups that the stream is known to have had, if it has lost something.
	Groups []string
	// Expected is about how many events are compared.
	Expected int64
}

// Logged is an event that is settled.
type Logged struct {
	ID uuid.UUID
	// Mark is what has settled it, Part and Seq are its place in the log.
	Mark int64
	Part int16
	Seq  int64
}

// Repaired says what was put right.
type Repaired struct {
	// Restored events were published again; Recalled ones were found in the stream, and are not published again.
	Restored, Recalled int64
	// Whole says that everything that was missing is in the stream again, but for Refused events, which it does not
	// take any more.
	Whole   bool
	Refused int64
	// Phantoms are events in the stream whose commit Postgres has forgotten.
	Phantoms []Entry
	// Last is the stream's last entry when it was done, "" if there is none.
	Last string
}

// Loss is a number of events that were settled and are not in their stream any more; or, with no Stream, a Postgres
// that has gone back in time, by a failover or a restore.
type Loss struct {
	Stream string
	// Events is how many, -1 if that cannot be known.
	Events int64
	// First and Last are when the first and the last of them were settled; zero if that cannot be known.
	First, Last time.Time
	Noticed     time.Time
}

// Remedy is the command that brings the events back, or what there is to do instead.
func (l Loss) Remedy() string {
	switch {
	case l.Stream == "":
		return "posthaste phantoms names the events whose commits are missing; see docs/recovery.md"
	case l.First.IsZero():
		return "posthaste replay --stream=" + l.Stream +
			" --since=…, from before the loss; without history there is nothing to bring back"
	}
	// Times as they are in history, so that the range has all of them.
	const layout = "2006-01-02T15:04:05.999999Z07:00"
	return "posthaste replay --stream=" + l.Stream + " --since=" + l.First.UTC().Format(layout) + " --until=" +
		l.Last.UTC().Format(layout)
}

// Store is the relay's side of Postgres, implemented by posthaste/sql. Every call is bounded by its own timeout, and an
// error leaves nothing half done.
type Store interface {
	// Register makes sure this relay's row exists. Errors: *SecondNameError, and the schema errors of the store.
	Register(ctx context.Context) error
	State(ctx context.Context) (State, error)
	// Adopt writes a new owner, and where it publishes, where the epoch still is from; false if it is not. With it, and
	// only then, it notes what may be lost, and what has to be repaired. Nobody is active until SetActive.
	Adopt(ctx context.Context, a Adoption) (bool, error)
	// CountLosses counts what was noted as perhaps lost, forgets what was not, and returns what it found. It leaves out
	// the streams that are to be repaired yet. tail is Sink.Tail.
	CountLosses(ctx context.Context, tail func(ctx context.Context, stream, after string) ([]Entry, error)) ([]Loss,
		error)
	// Repairs lists what is to be repaired, one for each stream. What was settled longer before its adoption than
	// within is not restored.
	Repairs(ctx context.Context, within time.Duration) ([]Repair, error)
	// Log lists the events of r's stream that the marks from r.From on up to r.To have settled, page by page, in the
	// order of marks, parts and numbers, until visit fails. It keeps nothing open while visit works.
	Log(ctx context.Context, r Repair, visit func(page []Logged) error) error
	// Events reads events of the log, those that are there still, in order: the first few, and how many that makes.
	Events(ctx context.Context, list []Logged) (events []*Event, used int, err error)
	// Owed lists the events of a stream that are owed and visible.
	Owed(ctx context.Context, stream string, visit func(id uuid.UUID)) error
	// Restoring notes, before the first event is published again and from time to time, how many were so far. Whoever
	// loses these looks for them again, also if nobody comes to the end of the repair.
	Restoring(ctx context.Context, r Repair, restored int64) error
	// Repaired notes that r is done. ErrSuperseded if o is not the state's owner any more.
	Repaired(ctx context.Context, o Owner, r Repair, done Repaired) error
	// SetActive records what the owner's epoch does now; false if the epoch is not the state's any more.
	SetActive(ctx context.Context, epoch int64, active Mode, handover LSN, degraded string) (bool, error)
	// Streams lists every stream ever published to.
	Streams(ctx context.Context) ([]Stream, error)
	// Newest returns, by stream, the last entry that a mark or a repair has noted since the stream was last found to
	// lack something. Only the newest marks are read.
	Newest(ctx context.Context) (map[string]string, error)
	// Delivered reports whether anything was ever settled.
	Delivered(ctx context.Context) (bool, error)
	// Lost counts the settled events that are known to be lost and were not published again.
	Lost(ctx context.Context) (int64, error)
	// NoteStream records, durably, that stream, one of those of the type that base names, is about to be published to
	// under epoch, and tells whether its gate was raised before. ErrSuperseded if the epoch is not the state's any
	// more; an adoption waits for a note under way. *TakenError if it is a stream of another type.
	NoteStream(ctx context.Context, stream, base string, epoch int64) (gated bool, err error)
	// Ungated lists the streams of which the table does not know that their gates were raised.
	Ungated(ctx context.Context) ([]string, error)
	// Gated records that the gates of streams were raised: from now on one that is not there was forgotten.
	Gated(ctx context.Context, streams []string) error
	// NoteGroups records, by stream, the consumer groups that it has. Nothing is recorded if the epoch is not the
	// state's any more.
	NoteGroups(ctx context.Context, epoch int64, groups map[string][]string) error
	// CheckLayout returns an error that wraps ErrLayout if a type cannot have so many streams: the parts of aggregates
	// are not those of PartOf, or two types would have a stream of the same name.
	CheckLayout(ctx context.Context, shards int) error
	// ChangeLayout changes the names of streams, for o, which has just made one mark that of every part (SettleAll),
	// and has published nothing since: what that mark settles was published under the layout before, everything else
	// will be published under the new one, by the next owner. It fails, and changes nothing, if there is another mark.
	// ErrLayout as from CheckLayout, for a type that was published for the first time in between.
	// ErrSuperseded if o is not the state's owner any more.
	ChangeLayout(ctx context.Context, o Owner, to Layout) error
	// FirstLayout changes the prefix of streams' names for o, if nothing was ever published, and reports whether it
	// did. ErrSuperseded if o is not the state's owner any more.
	FirstLayout(ctx context.Context, o Owner, prefix string) (bool, error)
	// AwaitLayout waits until a synchronous standby, if there is one, has the last change of the layout, which may have
	// been committed without that. An adoption calls it before anything is published: events that are published under a
	// layout that a failover takes back would be published again, to other streams.
	AwaitLayout(ctx context.Context) error
	// InsertLSN is the end of the WAL written so far.
	InsertLSN(ctx context.Context) (LSN, error)
	// Horizon returns an LSN and a transaction id such that everything that could have committed at or before the LSN
	// is visible once VisibleBelow(xid) is true.
	Horizon(ctx context.Context) (LSN, uint64, error)
	VisibleBelow(ctx context.Context, xid uint64) (bool, error)
	// RaiseBarrier notes, before the slot is moved or made without a wait for visibility, what has to have ended before
	// it is streamed. It outlives this process: whoever leads next reads it. known: xid was taken after what an unknown
	// barrier stands for, and replaces it. ErrSuperseded if the epoch is not the state's any more: then the slot is not
	// to be moved.
	RaiseBarrier(ctx context.Context, epoch int64, xid uint64, known bool) error
	// LowerBarrier forgets the barrier, if it is not younger than xid.
	LowerBarrier(ctx context.Context, epoch int64, xid uint64) error
	// BeginPass writes a snapshot of now for o. ErrSuperseded if o is not the state's owner any more.
	BeginPass(ctx context.Context, o Owner) (Pass, error)
	// SettleAll makes pass, as it was written, the mark of every part: each has reached it, and nobody sweeps or
	// streams meanwhile. ErrSuperseded if o is not the state's owner any more.
	SettleAll(ctx context.Context, o Owner, pass Pass) error
	// Marker opens the session that moves the mark behind a stream. It fails on a server with another history than the
	// one that was adopted on: after a failover, ids and numbers that the stream knows may be given out again.
	Marker(ctx context.Context) (Marker, error)
	// Park notes a row in outbox_dead, which settles it, and tells whether that was done or need not be: the row is
	// parked, or was deleted. Otherwise it is not visible yet. ErrSuperseded, also if the call arrives late, when o is
	// not the state's owner any more: a later one may have published the row. An adoption waits for a park under way.
	Park(ctx context.Context, o Owner, row *Row, class, reason string, attempts int) (bool, error)
	// Audit takes a mark.
	Audit(ctx context.Context) (AuditMark, error)
	// Backlog counts the rows that are owed and tells the age of the oldest. What was published behind the mark is
	// among them, until the mark moves.
	Backlog(ctx context.Context) (rows int64, oldest time.Duration, err error)
	// Parked lists the dead events of aggregates, for block-key.
	Parked(ctx context.Context) ([]Dead, error)
	// LeaderSession returns the session that holds the leader's lock, the zero value if there is none.
	LeaderSession(ctx context.Context) (LeaderSession, error)
	// EndSession ends a session of the database.
	EndSession(ctx context.Context, pid int) error
	// Sound names what somebody has changed in the table so that a promise does not hold.
	Sound(ctx context.Context) error
	// Housekeep forgets dead events whose retry was published; it returns how many events are parked.
	Housekeep(ctx context.Context) (dead int64, err error)
	// KeepHistory deletes what is settled and past the retention, by the database's clock, and the marks with it.
	KeepHistory(ctx context.Context) error
}

// Locker opens the connection that holds an instance's locks.
type Locker interface {
	Open(ctx context.Context) (LockSession, error)
}

// LockSession is a connection of its own with the instance's advisory locks. The server turns them into leases: it ends
// the session when nothing was heard for 10 s. Methods belong to one goroutine.
type LockSession interface {
	// TryLead takes the leader lock if it is free.
	TryLead(ctx context.Context) (bool, error)
	// TryPipe takes the pipe lock if it is free: exclusively for whoever streams or sweeps alone, shared in poll mode.
	TryPipe(ctx context.Context, exclusive bool) (bool, error)
	// DropPipe gives one hold of the pipe lock back.
	DropPipe(ctx context.Context, exclusive bool) error
	// Lost is closed when the session is gone, and with it the locks.
	Lost() <-chan struct{}
	Close()
}

// SecondNameError means that another relay name already owns the table.
type SecondNameError struct{ Name, Existing string }

func (e *SecondNameError) Error() string {
	return fmt.Sprintf("this outbox table belongs to relay %q; a second relay name (%q) on one table is refused: use "+
		"--relay-name=%s, or a separate database",
		e.Existing, e.Name, e.Existing)
}

// Permanent reports that waiting cannot fix it.
func (*SecondNameError) Permanent() bool { return true }

// ErrSuperseded means that somebody else has adopted since: step down.
var ErrSuperseded = errors.New("another relay has taken over")

// Scope is what a sweep works under.
type Scope struct {
	Owner Owner
	// Layout is how streams are named.
	Layout Layout
	// Ensure makes sure that stream is noted and its gate adopted before the first publish.
	Ensure func(ctx context.Context, stream string) error
	// Lane is Sink.Lane for the owner, of a stream that Ensure has made sure of.
	Lane func(stream string, lane Lane) LanePublisher
	// Claimed is called after a part was claimed and before its rows are read: what others parked in it is known then.
	Claimed func(ctx context.Context) error
	// BlockKey asks that events behind a parked one of their aggregate are parked too.
	BlockKey bool
	// Blocked tells which event parked before blocks e, "" for none.
	Blocked func(e *Event) string
	// Published is told what was published and committed.
	Published func(stream string, events []*Event, suppressed int)
	// Parked is told of each event moved to outbox_dead.
	Parked func(e *Event, err error)
	// Outcome is told nil after every batch that was committed and when there is nothing to sweep, and every error in
	// between, whoever is to blame: readiness follows it.
	Outcome func(err error)
}

// Sweeper settles what is owed without the stream. It is implemented by posthaste/poll.
type Sweeper interface {
	// Run sweeps until ctx ends (then it returns nil) or the scope's ownership does: ErrGap, *FencedError,
	// *ForeignError, ErrSuperseded. Everything else it retries.
	Run(ctx context.Context, s Scope) error
	// Drain settles, in every part, everything that pass sees. It returns nil only then: otherwise Run's errors, or
	// ctx's.
	Drain(ctx context.Context, s Scope, pass Pass) error
}
