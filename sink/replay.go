package sink

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/google/uuid"
	"github.com/redis/go-redis/v9"

	"posthaste/internal/redisurl"
	"posthaste/outbox"
)

// ReplayKept is how long Redis keeps the note of a replay after its last activity, finished or not.
const ReplayKept = 30 * 24 * time.Hour

// ReplayNote is the state of a replay that Redis keeps.
type ReplayNote struct {
	// Run distinguishes the runs of a replay that was begun again.
	Run string
	// Since and Until bound what is replayed, by the time of publishing; fixed when the replay was begun.
	Since, Until time.Time
	// Total is how many events there were to replay; -1 if that was not counted.
	Total int64
	// Begun is when the replay was begun, Done when it was finished, zero before.
	Begun, Done time.Time
	// At is a place in history before which everything is published; "" is the beginning.
	At string
	// Count is how many entries had been published when At was noted.
	Count int64
}

// ReplayOptions configure a Replay.
type ReplayOptions struct {
	// Client is the connection to Redis; see NewClient. The caller closes it.
	Client redis.UniversalClient
	// Name identifies the replay: the same name continues it.
	Name string
	// Source is the source field of every entry, as in Options.
	Source string
	// Database is the identity of the database in the gates.
	Database uuid.UUID
	// Side means that the target is a separate stream to which no relay publishes.
	Side bool
}

// Replay publishes entries of history again without changing the gate, so it does not affect fencing, numbering, doubt
// or trimming of a running relay. Every call may be repeated until it succeeds. Replay is not safe for concurrent use.
type Replay struct {
	o     ReplayOptions
	run   string
	owner string
	// cursors are the places up to which the streams are known to be published, for the streams that were taken.
	cursors map[string]string
}

// NewReplay returns a replay. It does no I/O.
func NewReplay(o ReplayOptions) *Replay {
	return &Replay{o: o, owner: rand.Text(), cursors: map[string]string{}}
}

func (r *Replay) noteKey() string { return "{posthaste}:replay:" + r.o.Name }

// recordKey is in the stream's Cluster slot.
func recordKey(stream, run string) string {
	return strings.TrimSuffix(registerKey(stream), ":gate") + ":replay:" + run
}

// Find returns the note of the replay, nil if it was never begun.
func (r *Replay) Find(ctx context.Context) (*ReplayNote, error) {
	v, err := r.o.Client.HGetAll(ctx, r.noteKey()).Result()
	if err != nil {
		return nil, fmt.Errorf("look for an earlier replay: %w", err)
	}
	if v["run"] == "" {
		return nil, nil //nolint:nilnil // the absence of a note is the answer
	}
	return parseNote(v)
}

// Begin begins the replay that n describes and returns its note. If one was begun already it returns that note, unless
// restart is set. A restart deletes the records of the earlier run in streams, those that the replay may publish to,
// and so stops a process that still runs it.
func (r *Replay) Begin(ctx context.Context, n ReplayNote, restart bool, streams []string) (*ReplayNote, error) {
	again := "0"
	if restart {
		again = "1"
	}
	v, err := run(ctx, r.o.Client, replayBeginScript, []any{
		1, r.noteKey(), again, ReplayKept.Milliseconds(), "run", rand.Text(), "since", n.Since.UnixMicro(), "until",
		n.Until.UnixMicro(), "total", n.Total, "begun", n.Begun.UnixMicro(),
	})
	if err != nil {
		return nil, fmt.Errorf("begin the replay: %w", err)
	}
	fields := map[string]string{}
	for i := 1; i+1 < len(v); i += 2 {
		fields[text(v, i)] = text(v, i+1)
	}
	if old := text(v, 0); old != "" {
		for _, s := range streams {
			if err := r.o.Client.Del(ctx, recordKey(s, old)).Err(); err != nil {
				return nil, fmt.Errorf("end the earlier replay into stream %q: %w", s, err)
			}
		}
	}
	note, err := parseNote(fields)
	if err == nil {
		r.run = note.Run
	}
	return note, err
}

func parseNote(v map[string]string) (*ReplayNote, error) {
	var bad error
	late := func(name string) bool { return v[name] == "" && (name == "count" || name == "done") } // not noted yet
	number := func(name string) (n int64) {
		if late(name) {
			return 0
		}
		n, err := strconv.ParseInt(v[name], 10, 64)
		if err != nil {
			bad = fmt.Errorf("the note of the replay: field %s: %w", name, err)
		}
		return n
	}
	at := func(name string) time.Time {
		if late(name) {
			return time.Time{}
		}
		return time.UnixMicro(number(name)).UTC()
	}
	n := &ReplayNote{
		Run: v["run"], At: v["at"], Since: at("since"), Until: at("until"), Begun: at("begun"), Done: at("done"),
		Total: number("total"), Count: number("count"),
	}
	return n, bad
}

// ErrReplayTaken means that another process has taken the replay over or begun it again.
var ErrReplayTaken = errors.New("another process has taken this replay over")

// ErrReplayGone means that Redis has lost the progress of this replay.
var ErrReplayGone = errors.New(
	"redis has lost the progress of this replay (flushed, evicted, failed over, or begun again elsewhere)")

// ErrReplayMoved means that Redis failed over to a replica or was restored, and lost entries together with the record
// of them. Begin, with a Replay of the same name, continues from there.
var ErrReplayMoved = errors.New("redis has lost the last entries of this replay")

// Note records that everything before the place at is published, count entries in all; done ends the replay. It is only
// a hint: the cursor that is recorded with every entry decides.
func (r *Replay) Note(ctx context.Context, at string, count int64, done time.Time) error {
	args := []any{1, r.noteKey(), r.run, ReplayKept.Milliseconds(), "at", at, "count", count}
	if !done.IsZero() {
		args = append(args, "done", done.UnixMicro())
	}
	v, err := run(ctx, r.o.Client, replayNoteScript, args)
	if err == nil && text(v, 0) != "OK" {
		err = ErrReplayGone
	}
	if err != nil {
		return fmt.Errorf("note the replay's progress: %w", err)
	}
	return nil
}

// ReplayEntry is an event and its place in history. Places of one replay ascend, and none is "".
type ReplayEntry struct {
	Place string
	Event *outbox.Record
}

// Take makes this process the replayer of stream, and returns the place up to which it is published, "" before the
// first entry. From then on the previous process is refused.
func (r *Replay) Take(ctx context.Context, stream string) (string, error) {
	if c, ok := r.cursors[stream]; ok {
		return c, nil
	}
	v, err := run(ctx, r.o.Client, replayScript, r.args(stream, "?"))
	if err == nil {
		err = r.answer(stream, v)
	}
	if err != nil {
		return "", fmt.Errorf("replay into stream %q: %w", stream, err)
	}
	return r.cursors[stream], nil
}

// Publish appends the entries to a stream that was taken, each atomically with the new cursor. It may be repeated with
// the same entries until it returns nil: then each of them is in the stream once. After a ReplayError repeating does
// not help.
func (r *Replay) Publish(ctx context.Context, stream string, entries []ReplayEntry) error {
	// A call that failed in the middle may have appended some of them.
	for i := range entries {
		if entries[i].Place == r.cursors[stream] {
			entries = entries[i+1:]
			break
		}
	}
	for some := range slices.Chunk(entries, redisurl.Fit(2+len(r.args(stream, "")), replayArgs)) {
		if err := r.publish(ctx, stream, some); err != nil {
			return fmt.Errorf("replay into stream %q: %w", stream, err)
		}
	}
	return nil
}

// replayArgs is the number of arguments of an entry.
const replayArgs = 8

// publish makes one script call.
func (r *Replay) publish(ctx context.Context, stream string, entries []ReplayEntry) error {
	args := r.args(stream, r.cursors[stream])
	var head []byte
	for _, e := range entries {
		head = appendHead(head[:0], e.Event)
		traceParent, headers := e.Event.SplitHeaders()
		args = append(args, e.Place, string(head[:36]), e.Event.Type, e.Event.AggregateID, string(head[36:]),
			e.Event.Payload, traceParent, headers)
	}
	v, err := run(ctx, r.o.Client, replayScript, args)
	if err == nil {
		err = r.answer(stream, v)
	}
	if err == nil && text(v, 0) == "XADD" {
		err = replyError(text(v, 2))
		if class, poison := classify(err.Error()); poison {
			next := entries[0]
			for i := range entries {
				if entries[i].Place == r.cursors[stream] {
					next = entries[i+1]
				}
			}
			err = &ReplayError{fmt.Sprintf("redis refuses event %s (%s)", next.Event.ID, class)}
		}
	}
	return err
}

func (r *Replay) args(stream, from string) []any {
	side := "0"
	if r.o.Side {
		side = "1"
	}
	return []any{
		4, stream, registerKey(stream), gateKey(stream, r.o.Database), recordKey(stream, r.run), side,
		r.o.Database.String(), r.owner, ReplayKept.Milliseconds(), r.o.Source, from,
	}
}

// ReplayError is a refusal that repeating does not fix.
type ReplayError struct{ Reason string }

func (e *ReplayError) Error() string { return e.Reason }

// Permanent reports that repeating does not help.
func (*ReplayError) Permanent() bool { return true }

// answer stores the cursor in the script's answer and converts refusals to errors.
func (r *Replay) answer(stream string, v []any) error {
	switch text(v, 0) {
	case "OK", "XADD":
		r.cursors[stream] = text(v, 1)
		return nil
	case "GONE":
		return ErrReplayGone
	case "TAKEN":
		return ErrReplayTaken
	case "MOVED":
		return ErrReplayMoved
	case "TYPE":
		return &ReplayError{"the key holds a " + text(v, 1) + ", not a stream"}
	case "LIVE":
		return &ReplayError{"a relay publishes to it: omit --to to replay into the events' own " +
			"streams, or name another stream"}
	case "FOREIGN":
		return &ReplayError{fmt.Sprintf("another database (%s, source %s) publishes to it, and this one does not: "+
			"name another stream with --to, or see posthaste adopt", text(v, 2), text(v, 1))}
	}
	return errors.New("unexpected reply to the replay script")
}
