package outbox

import (
	"bytes"
	"context"
	"encoding/hex"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"time"

	"github.com/google/uuid"
)

// Nonce distinguishes two holders of the same number.
type Nonce [16]byte

func (n Nonce) String() string { return hex.EncodeToString(n[:]) }

// Owner is the owner of a leadership in relay_state, which may publish. Instances that sweep concurrently with the
// leader act under the leader's owner.
type Owner struct {
	// Source identifies the database of the events. Each database has a gate of its own for each stream.
	Source uuid.UUID
	// Epoch is raised by one at every adoption. It is the fencing token.
	Epoch int64
	// Nonce is new at every adoption.
	Nonce Nonce
}

// Part numbers of lanes that do not belong to a part.
const (
	// StreamLane is the slot reader's.
	StreamLane = -1
	// RestoreLane republishes events that the sink has lost, during an adoption.
	RestoreLane = -2
)

// Lane is one numbered sequence of batches into one stream: that of the slot reader, or that of one claim of a part.
type Lane struct {
	// Part is StreamLane, RestoreLane or 0 … Partitions-1.
	Part int
	// Claim is the number of the claim, higher at every claim; for the other lanes it is 0.
	Claim int64
	// Nonce is that of the session that claims; for the other lanes it is the owner's.
	Nonce Nonce
}

// Name identifies the sequence of lanes that l continues, in the gate of a stream.
func (l Lane) Name() string {
	switch l.Part {
	case StreamLane:
		return "s"
	case RestoreLane:
		return "r"
	}
	return strconv.Itoa(l.Part)
}

// Mark means that the rows of a lane's batches up to and including Number are, or are about to be, settled.
type Mark struct {
	Stream string
	Lane   Lane
	Number int64
}

// Receipt is the sink's answer to a delivery that is completely published.
type Receipt struct {
	// Number is the highest batch number the delivery used in its lane.
	Number int64
	// Last is the stream's last entry when the delivery was complete. No entry of its events is after it.
	Last string
	// Suppressed counts the events that were in doubt and therefore not published a second time.
	Suppressed int
}

// StreamState is the state of a stream and its gate.
type StreamState struct {
	Stream string
	// Gate reports whether the gate exists.
	Gate bool
	// Last is the id of the last entry that the gate has let through and that is known to be in the stream, "" if no
	// such entry is known.
	Last string
	// Unknown is set if the table has no record of the stream, or of an entry that was settled: it has gone back.
	Unknown bool
	// Epoch and Nonce are the gate's owner; 0 and "" without one.
	Epoch int64
	Nonce string
	// Behind is set if the stream has entries that the gate does not know: the gate is older than the stream.
	Behind bool
	// Forgot is set if the stream lacks entries that the gate has let through or that the table knows: it was deleted,
	// or restored to an earlier state.
	Forgot bool
	// Now is the time by the sink's clock, which the ids of entries use.
	Now time.Time
	// Missing is by how much the gate's count of events is lower than this process's.
	Missing int64
	// Err is a *StreamError if the stream cannot be looked at; the rest is unknown then.
	Err error
}

// Intact reports whether gate and stream are consistent: the gate knows which unsettled events are in the stream.
func (s StreamState) Intact() bool { return s.Gate && !s.Forgot && !s.Behind && !s.Unknown }

// Beyond reports whether the gate has seen a later owner than o, or another one of the same epoch, so that the table
// with o has gone back.
func (s StreamState) Beyond(o Owner) bool {
	return s.Epoch > o.Epoch || s.Epoch == o.Epoch && s.Epoch > 0 && s.Nonce != o.Nonce.String()
}

// Unread counts the entries of a stream that a consumer group has not acknowledged.
type Unread struct {
	// Group is "" if the stream is so young that consumer groups may not have found it.
	Stream, Group string
	// Entries is roughly their number; Idle is how long they have waited without activity of the group.
	Entries int64
	Idle    time.Duration
}

// Entry is an event in a stream and its entry id.
type Entry struct {
	ID uuid.UUID
	// Millis and Number are the two halves of the entry's id.
	Millis, Number uint64
}

// NewEntry returns the entry of an event with the entry id at.
func NewEntry(event uuid.UUID, at string) Entry {
	e := Entry{ID: event}
	e.Millis, e.Number = splitID(at)
	return e
}

// String returns the entry id in the form of Redis.
func (e Entry) String() string { return fmt.Sprintf("%d-%d", e.Millis, e.Number) }

// SortEntries orders entries by the ids of their events, for FindEntry.
func SortEntries(list []Entry) {
	slices.SortFunc(list, func(a, b Entry) int { return bytes.Compare(a.ID[:], b.ID[:]) })
}

// FindEntry returns the index of an event in a list that SortEntries has ordered, of its first entry if it has several.
func FindEntry(list []Entry, event uuid.UUID) (int, bool) {
	return slices.BinarySearchFunc(list, event, func(e Entry, id uuid.UUID) int {
		return bytes.Compare(e.ID[:], id[:])
	})
}

// Member identifies a process that leads, or wants to lead.
type Member struct {
	// ID is the process. Server is the process of Postgres with its table, which has only one leader.
	ID, Server string
	// Holder is its display name.
	Holder string
}

// SignLasts is how long a sign of life counts. A relay that loses its Postgres stops signing, and its successor on a
// promoted standby waits no longer than this. TwinLasts replaces it when the sign was renewed while another relay
// waited. Then two databases have one identity, and a pause of one must not give its streams to the other.
const (
	SignLasts = 5 * time.Second
	TwinLasts = 30 * time.Second
)

// Sign is the sign of life of another leader.
type Sign struct {
	Member
	// Text changes with every sign.
	Text string
}

// LanePublisher numbers the batches of one lane.
type LanePublisher interface {
	// Deliver prepares the publication of events, which all belong to the lane's stream, in order. It does no I/O. The
	// previous delivery must be complete. The caller keeps events unchanged until the delivery is complete.
	Deliver(events []*Record) Delivery
	// Settled records that the batches up to number are settled; the next publish reports it to the gate.
	Settled(number int64)
	// Follows records, before the first delivery, that the session had an earlier claim of the part, and that its
	// batches up to number are settled. The gate does not put their events in doubt. A gate without them is a gap.
	Follows(claim, number int64)
}

// Delivery is one publication. Its place in the lane makes it safe to repeat.
type Delivery interface {
	// Publish makes one attempt, bounded by ctx. nil: every event is in the stream (or was skipped) and the receipt is
	// final. *PoisonError: the sink refuses one event; retry, or call Skip and publish again. ErrGap, *FencedError: the
	// lane is finished. After any other error call Publish again.
	Publish(ctx context.Context) (Receipt, error)
	// Skip skips the event of the last *PoisonError and every later one for which also (unless it is nil) returns true.
	// It returns the indexes of the latter.
	Skip(also func(e *Record) bool) []int
}

// Skipped has the indexes of the events that a Delivery skips.
type Skipped map[int]bool

// Skip adds events[i] and does the rest of Delivery.Skip.
func (s *Skipped) Skip(events []*Record, i int, also func(e *Record) bool) (places []int) {
	if *s == nil {
		*s = Skipped{}
	}
	(*s)[i] = true
	for i++; also != nil && i < len(events); i++ {
		if !(*s)[i] && also(events[i]) {
			(*s)[i] = true
			places = append(places, i)
		}
	}
	return places
}

// ErrGap means that the sink or the caller lost state (a flushed, restored or failed-over server): adopt again, sweep.
var ErrGap = errors.New("the gate has lost its place: adopt again")

// ErrMoved means that the sink was restarted or replaced by another server, which may lack acknowledged events. It is
// an ErrGap.
var ErrMoved = fmt.Errorf("the sink was restarted, or is another one: %w", ErrGap)

// StreamError means that the failure concerns one stream, or those of one node of a cluster; publishing to others
// continues.
type StreamError struct {
	Stream string
	// Unknown is set if the reply is of an unknown kind: repeating the delivery halves the batch. Lost is set if there
	// is no reply: a smaller batch may get one.
	Unknown, Lost bool
	Err           error
}

func (e *StreamError) Error() string { return e.Err.Error() }

// Unwrap returns the sink's own error.
func (e *StreamError) Unwrap() error { return e.Err }

// Lost reports whether err is a *StreamError without a reply.
func Lost(err error) bool {
	var stream *StreamError
	return errors.As(err, &stream) && stream.Lost
}

// Alone reports whether err concerns one stream, so that others need not wait.
func Alone(err error) bool {
	var stream *StreamError
	return errors.As(err, &stream)
}

// FencedError means that another owner has the stream or lane.
type FencedError struct {
	Stream string
	// Epoch is the gate's epoch.
	Epoch int64
}

func (e *FencedError) Error() string {
	return fmt.Sprintf("stream %q: fenced: the gate is at epoch %d", e.Stream, e.Epoch)
}

// Permanent reports that repeating the call cannot help.
func (*FencedError) Permanent() bool { return true }

// ForeignError means that the stream belongs to another database, or that databases share it in a way that excludes
// this one.
type ForeignError struct {
	Stream string
	// Source is the other database's identity, or that of one of several.
	Source string
	// Reason is the cause, worded to follow the stream's name; Remedy is what to do.
	Reason, Remedy string
}

func (e *ForeignError) Error() string {
	return fmt.Sprintf("stream %q %s%s%s", e.Stream, e.Reason, RemedyMark, e.Remedy)
}

// RemedyMark separates the problem from its remedy in the text of an error.
const RemedyMark = "; remedy: "

// Permanent reports that repeating the call cannot help.
func (*ForeignError) Permanent() bool { return true }

// TwinError means that two servers have databases with one identity, of which one is a copy, and the other one's relay
// is running.
type TwinError struct{ Holder string }

func (e *TwinError) Error() string {
	return fmt.Sprintf("%s leads for a database with the same identity, on another Postgres server%s", e.Holder,
		RemedyMark) + "if the other database is the right one, give this copy its own Redis, or a new identity: " +
		"UPDATE relay_state SET database_oid = 0, and restart its relay; if this database is the right one, stop the " +
		"other relay for good"
}

// Permanent reports that repeating the call cannot help.
func (*TwinError) Permanent() bool { return true }

// PoisonError means that the sink refuses one event because of its content and would accept others.
type PoisonError struct {
	// Index is the event's index in the delivery.
	Index int
	// ID is the event's id.
	ID uuid.UUID
	// Class is the error class, as in outbox_publish_errors_total.
	Class string
	// All is set if the stream itself is the cause and refuses every event.
	All bool
	// Guessed is set if the reply was of an unknown kind, and only its repetition speaks for the event as the cause.
	Guessed bool
	Err     error
}

func (e *PoisonError) Error() string { return fmt.Sprintf("event %s is refused: %v", e.ID, e.Err) }

// Unwrap returns the sink's own error.
func (e *PoisonError) Unwrap() error { return e.Err }
