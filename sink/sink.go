// Package sink publishes events to Redis Streams and Pub/Sub, and makes every publish safe to repeat.
//
// Each database has a gate for each stream, a hash in the same Cluster slot. One script per batch checks the gate,
// appends the entries and notes what it appended, so a lost reply, a crash or a second owner can neither lose an event
// nor publish it twice. A gate that does not know its caller any more (flushed, restored, failed over) answers GAP:
// adopt again and publish what is unsettled.
package sink

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/google/uuid"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/redis/go-redis/v9"

	"posthaste/internal/outage"
	"posthaste/internal/redisurl"
	"posthaste/outbox"
	"posthaste/sink/metrics"
)

// Options configure a Sink.
type Options struct {
	// Client is the connection to Redis; see NewClient. The caller closes it.
	Client redis.UniversalClient
	// Server keeps Client bound to one process of Redis; see NewBoundClient. nil allows any.
	Server *Server
	// Source is the source field of every entry, for example /posthaste/default.
	Source string
	// Shared lets other databases publish to the same streams. Each needs a Source of its own.
	Shared bool
	// PubSub also publishes each payload on the channel ChannelPrefix + the event's type. Types that begin with __ have
	// no channel, because those are Redis' own.
	PubSub        bool
	ChannelPrefix string
	// Durability is what Confirm waits for.
	Durability Durability
	// MaxLen is the approximate length to which Trim shortens a stream; 0 never trims.
	MaxLen int64
	// TrimForce lets Trim remove entries that a consumer group has not acknowledged.
	TrimForce bool
	// Registerer takes the metrics; nil for none.
	Registerer prometheus.Registerer
	// Logger gets warnings; nil for none.
	Logger *slog.Logger
}

// Sink publishes events to Redis. It is safe for concurrent use.
type Sink struct {
	o   Options
	m   *redisMetrics
	log *slog.Logger

	// observing guards observed: the run ids of the last observed Redis, or of the masters of the cluster.
	observing sync.Mutex
	observed  []string
	// moved is set when the server was replaced although its connections remained open.
	moved atomic.Bool
	// let has, by stream, the known number of events that its gate has let through.
	let sync.Map

	// refusals is the run of refused messages of Pub/Sub, whose last one was at refused, in nanoseconds.
	refusals outage.Run
	refused  atomic.Int64

	// batchBytes bounds one script call. It only shrinks, to what the server can buffer. batchEvents bounds it as well,
	// and recovers by one event for each call that is accepted.
	batchBytes, batchEvents atomic.Int64
}

// New returns a sink. It does no I/O.
func New(o Options) *Sink {
	if o.Logger == nil {
		o.Logger = slog.New(slog.DiscardHandler)
	}
	s := &Sink{o: o, m: newMetrics(o.Registerer), log: o.Logger.With("component", "sink")}
	s.batchBytes.Store(maxBatchBytes)
	s.batchEvents.Store(maxBatchEvents)
	return s
}

// memory returns the known number of events that the gate of stream has let through.
func (s *Sink) memory(stream string) *atomic.Int64 {
	v, ok := s.let.Load(stream)
	if !ok {
		v, _ = s.let.LoadOrStore(stream, new(atomic.Int64))
	}
	return v.(*atomic.Int64)
}

// registerKey returns the key of a stream's register, which is in the same Cluster slot. See lua/register.lua.
func registerKey(stream string) string {
	if open := strings.IndexByte(stream, '{'); open >= 0 && strings.IndexByte(stream[open+1:], '}') > 0 {
		return stream + ":gate" // the prefix has a hash tag of its own
	}
	return "{" + stream + "}:gate"
}

// gateKey returns the key of the gate of a database. See lua/gate.lua.
func gateKey(stream string, source uuid.UUID) string {
	return registerKey(stream) + ":" + source.String()
}

// whatever accepts a gate that has let through any number of events.
const whatever int64 = -1

// Adopt implements stream.Sink.
func (s *Sink) Adopt(ctx context.Context, stream string, o outbox.Owner, intact bool) error {
	if intact {
		return s.adopt(ctx, stream, o, "0", s.memory(stream).Load())
	}
	return s.adopt(ctx, stream, o, "0", whatever)
}

// TakeOver is Adopt for a stream from which other databases exclude o's. It removes them from the register, and the
// events that they left unsettled become doubt. Without such a database it is the same as Adopt.
func (s *Sink) TakeOver(ctx context.Context, stream string, o outbox.Owner) error {
	return s.adopt(ctx, stream, o, "1", whatever)
}

func (s *Sink) adopt(ctx context.Context, stream string, o outbox.Owner, force string, least int64) error {
	reply, err := run(ctx, s.o.Client, adoptScript, append(gateArgs(stream, o), o.Source.String(), force, least,
		s.o.Source, s.alone()))
	switch {
	case err != nil:
	case text(reply, 0) == "FOREIGN":
		err = s.foreign(stream, reply)
	default:
		err = verdict(stream, reply)
	}
	if err == nil {
		s.memory(stream).Store(number(reply, 1)) // the gate's number counts, even if it is lower
	}
	return s.failed(stepAdopt, stream, err)
}

// Missed implements stream.Sink.
func (s *Sink) Missed(streams int) {
	s.m.Errors.WithLabelValues(Class(outbox.ErrGap)).Add(float64(streams))
}

// tailEntries and tailBytes bound what Redis scans of a stream in one call of Tail. pageTimeout bounds the time of such
// a call and of Look.
const (
	tailEntries = 1000
	tailBytes   = 4 << 20
	pageTimeout = 5 * time.Second
)

// Tail implements stream.Sink. It reads page by page; ctx bounds the whole. It omits entries that are not posthaste's,
// and in a shared stream those of other databases.
func (s *Sink) Tail(ctx context.Context, stream, after string) ([]outbox.Entry, error) {
	var tail []outbox.Entry
	err := s.entries(ctx, stream, after, func(page []outbox.Entry) bool {
		tail = append(tail, page...)
		return true
	})
	return tail, err
}

// entries passes Tail's entries to visit page by page, until visit returns false.
func (s *Sink) entries(ctx context.Context, stream, after string, visit func(page []outbox.Entry) bool) error {
	from := "-"
	if after != "" {
		from = "(" + after
	}
	for {
		var list []outbox.Entry
		pctx, cancel := context.WithTimeout(ctx, pageTimeout)
		page, err := run(pctx, s.o.Client, tailScript, []any{1, stream, from, tailEntries, tailBytes, s.name()})
		cancel()
		if notAStream(err) {
			return nil
		}
		if err != nil {
			return s.failed(stepList, stream, err)
		}
		for i := 1; i+1 < len(page); i += 2 {
			if id, err := uuid.Parse(text(page, i+1)); err == nil {
				list = append(list, outbox.NewEntry(id, text(page, i)))
			}
		}
		last := text(page, 0)
		if !visit(list) || last == "" {
			return nil
		}
		from = "(" + last
	}
}

// recallEvents bounds the events that one call of Recall adds, because the script writes them at once.
const recallEvents = 5000

// Recall implements stream.Sink.
func (s *Sink) Recall(ctx context.Context, o outbox.Owner, stream string, ids []uuid.UUID, last string) error {
	for {
		n := min(len(ids), recallEvents)
		blob := make([]byte, 0, n*len(uuid.UUID{}))
		for _, id := range ids[:n] {
			blob = append(blob, id[:]...)
		}
		known := "" // the gate gets the stream's end only with the last events
		if ids = ids[n:]; len(ids) == 0 {
			known = last
		}
		err := s.call(ctx, stepRecall, stream, recallScript, append(gateArgs(stream, o), known, blob))
		if err != nil || len(ids) == 0 {
			return err
		}
	}
}

// Check implements stream.Sink.
func (s *Sink) Check(ctx context.Context, o outbox.Owner, streams []string) error {
	calls := make([]streamCall, len(streams))
	for i, stream := range streams {
		calls[i] = streamCall{stream: stream, args: gateArgs(stream, o)}
	}
	return s.verdicts(stepCheck, calls, runAll(ctx, s.o.Client, checkScript, calls))
}

// Settled implements stream.Sink. It tries every stream and returns the first error.
func (s *Sink) Settled(ctx context.Context, o outbox.Owner, marks []outbox.Mark) error {
	calls := callsByStream(marks, func(stream string) []any { return gateArgs(stream, o) })
	return s.verdicts("settle", calls, runAll(ctx, s.o.Client, settleScript, calls))
}

// ForgetDoubt implements stream.Sink. Events that a later claim of a part inherited from an earlier claim since the
// adoption stay in doubt: their rows may still be unsettled.
func (s *Sink) ForgetDoubt(ctx context.Context, o outbox.Owner, stream string) error {
	return s.call(ctx, "forget doubt", stream, forgetScript, gateArgs(stream, o))
}

// call makes one call of a script that answers with a verdict.
func (s *Sink) call(ctx context.Context, step, stream string, sc *script, args []any) error {
	reply, err := run(ctx, s.o.Client, sc, args)
	if err == nil {
		err = verdict(stream, reply)
	}
	return s.failed(step, stream, err)
}

// Trim implements stream.Sink. It only removes whole nodes of the stream, so up to stream-node-max-entries may stay
// beyond MaxLen.
func (s *Sink) Trim(ctx context.Context, stream string) error {
	if s.o.MaxLen <= 0 {
		return nil
	}
	force := "0"
	if s.o.TrimForce {
		force = "1"
	}
	_, err := run(ctx, s.o.Client, trimScript, []any{1, stream, s.o.MaxLen, force})
	if notAStream(err) {
		return nil
	}
	return s.failed("trim", stream, err)
}

// notAStream reports whether the key is of another type, so that there is nothing to trim or read. Publishing to it is
// refused and reported by the publisher; the housekeeping of the other streams continues.
func notAStream(err error) bool { return err != nil && Class(err) == classWrongType }

// failed counts err and adds the step in which it happened and the node of a cluster.
func (s *Sink) failed(step, stream string, err error) error {
	if err == nil {
		return nil
	}
	class := Class(err)
	s.m.Errors.WithLabelValues(class).Inc()
	many, cluster := s.o.Client.(*redis.ClusterClient)
	if cluster && reload[class] {
		many.ReloadState(context.Background()) // in the background; otherwise it happens once a minute
	}
	if errors.Is(err, errOther) {
		return outbox.ErrMoved
	}
	if metrics.Permanent(err) {
		return err // names the stream itself
	}
	if stream == "" {
		return fmt.Errorf("%s: %w", step, err)
	}
	if cluster {
		if node, nerr := many.MasterForKey(ended, stream); nerr == nil {
			err = redisurl.Node{Addr: node.Options().Addr}.Named(err)
		}
	}
	wrapped := fmt.Errorf("%s stream %q: %w", step, stream, err)
	answered := redisurl.IsReply(err)
	ofNode := cluster && slices.Contains(nodeSteps, step) && class != "canceled"
	if ofNode || answered && oneStream[class] {
		return &outbox.StreamError{
			Stream: stream, Unknown: answered && class == classOther, Lost: !answered, Err: wrapped,
		}
	}
	return wrapped
}

// The steps that concern one stream of a node, so that those of other nodes need not wait.
const (
	stepPublish = "publish to"
	stepAdopt   = "adopt"
	stepCheck   = "check"
	stepLook    = "look at"
	stepGroups  = "look at the groups of"
	stepRegroup = "make the groups of"
	stepName    = "name the streams of"
	stepList    = "list"
	stepRecall  = "recall"
	stepConfirm = "confirm"
)

var nodeSteps = []string{
	stepPublish, stepAdopt, stepCheck, stepLook, stepGroups, stepRegroup, stepName, stepList, stepRecall, stepConfirm,
}

// oneStream are the classes of replies that concern one stream. No known server refuses all streams with one of them;
// one that does refuses each separately.
var oneStream = map[string]bool{
	"noperm": true, "crossslot": true, classWrongType: true, "gatetype": true, "exhausted": true, "other": true,
}

// reload are the classes after which the client reloads the masters of a cluster.
var reload = map[string]bool{
	"connection": true, "timeout": true, "tls": true, "clusterdown": true, "moved": true, "readonly": true,
	"restarted": true, "masterdown": true, "loading": true,
}

// ended prevents I/O.
var ended = func() context.Context {
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	return ctx
}()

// streamCall is one script call on one stream; args begin with the number of keys.
type streamCall struct {
	stream string
	args   []any
}

// markArgs is the number of arguments of a mark.
const markArgs = 4

// callsByStream groups marks so that each stream's gate gets one call, or a few if there are very many marks.
func callsByStream(marks []outbox.Mark, head func(stream string) []any) []streamCall {
	var calls []streamCall
	at := make(map[string]int, len(marks))
	for _, m := range marks {
		i, ok := at[m.Stream]
		if !ok || len(calls[i].args)+markArgs > redisurl.Fit(2, 1) {
			i = len(calls)
			at[m.Stream] = i
			calls = append(calls, streamCall{stream: m.Stream, args: head(m.Stream)})
		}
		if m.Number > 0 {
			calls[i].args = append(calls[i].args, m.Lane.Name(), m.Lane.Claim, m.Lane.Nonce.String(), m.Number)
		}
	}
	return calls
}

// verdicts returns the gravest error of several calls: one that is permanent, or the first. In a cluster, a node that
// does not answer must not hide the errors of others.
func (s *Sink) verdicts(step string, calls []streamCall, cmds []*redis.Cmd) error {
	var first error
	for i, c := range calls {
		reply, err := cmds[i].Slice()
		if err == nil {
			err = verdict(c.stream, reply)
		}
		if err = s.failed(step, c.stream, err); first == nil || !metrics.Permanent(first) && metrics.Permanent(err) {
			first = err
		}
	}
	return first
}

// gateArgs returns the first arguments of every script of the gate.
func gateArgs(stream string, o outbox.Owner) []any {
	return append(keys(stream, o.Source), o.Epoch, o.Nonce.String())
}

// keys returns the number of a stream's keys and the keys. All must be named: while a slot moves, one master may lack a
// key because the other already has it.
func keys(stream string, source uuid.UUID) []any {
	return []any{3, stream, registerKey(stream), gateKey(stream, source)}
}

// remaining returns what is left until ctx's deadline, at most limit.
func remaining(ctx context.Context, limit time.Duration) time.Duration {
	if d, ok := ctx.Deadline(); ok {
		return min(time.Until(d), limit)
	}
	return limit
}
