// Package audit records every change that an operator makes by terminal, HTTP or console: in the append-only table
// posthaste_audit, and in one line of the log.
//
// There is one scheme for all changes, in Postgres, in Redis or in both. Do writes an entry 'begun', makes the
// change, and writes a second entry with the same attempt and its outcome:
//
//	ok       it is done
//	refused  it was not done; the reason says why: nothing is parked under the id, or Postgres denies it to the role
//	failed   it was not done, or not entirely; the reason is the class of the error, never its text
//
// If the first entry cannot be written, the change is not made. A single entry 'begun' means that the process ended,
// or Postgres was gone, before the outcome was written: the log may have the outcome. (An entry in the change's own
// transaction would not need a second one, but half of the changes are in Redis.)
//
// A request that is refused before it begins (a wrong token, a page of another origin) gives a single entry. Any
// client can cause those, so only a few are written and the rest are counted: see Refuse.
//
// Entries hold ids, names and arguments; no payloads, no tokens, no texts of errors.
package audit

import (
	"cmp"
	"context"
	"embed"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net"
	"os"
	"os/user"
	"regexp"
	"strconv"
	"strings"
	"sync/atomic"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5/pgxpool"
	"golang.org/x/time/rate"

	"posthaste/internal/statement"
	"posthaste/sql"
)

//go:embed queries/*.sql
var files embed.FS

var query = statement.In(files)

// Names of actions in entries.
const (
	Mode        = "mode"
	DeadRetry   = "dead retry"
	DeadDrop    = "dead drop"
	Replay      = "replay"
	StreamsDrop = "streams drop"
	Phantoms    = "phantoms"
	Spread      = "streams spread"
	Leave       = "streams leave"
	GroupsDrop  = "groups drop"
	Adopt       = "adopt"
	Unfreeze    = "credits unfreeze"
	Uninstall   = "uninstall"

	BridgeCreate = "bridge create"
	BridgeDrop   = "bridge drop"
)

// Outcomes of an attempt.
const (
	begun   = "begun"
	ok      = "ok"
	refused = "refused"
	failed  = "failed"
)

// Detail has the arguments or the results of a change. Long texts and lists are cut.
type Detail map[string]any

// Who identifies the person or process that makes a change.
type Who struct {
	// Actor is the role of a token, or the user and host of a terminal. Source is the address of the peer, or
	// "terminal".
	Actor, Source string
}

// Terminal identifies the user of this process.
func Terminal() Who {
	name := "uid " + strconv.Itoa(os.Getuid()) // without a name, as in containers
	if u, err := user.Current(); err == nil {
		name = u.Username
	}
	host, err := os.Hostname()
	if err != nil {
		host = "unknown"
	}
	return Who{Actor: name + "@" + host, Source: "terminal"}
}

// Trail writes entries. It may be used by several goroutines.
type Trail struct {
	pool *pgxpool.Pool
	log  *slog.Logger
	now  func() time.Time
	// refusals bounds the refusals that are written. unwritten counts those not written since the last one.
	refusals  *rate.Limiter
	unwritten atomic.Int64
}

// New returns a trail into the pool's table. If pool is nil, it only logs: for the command that drops the table.
func New(pool *pgxpool.Pool, log *slog.Logger) *Trail {
	return &Trail{
		pool: pool, log: log.With("component", "audit"), now: time.Now,
		refusals: rate.NewLimiter(rate.Every(refusedEvery), refusedBurst),
	}
}

// ErrNoEntry means that nothing was changed, because the entry of the change could not be written.
var ErrNoEntry = errors.New("nothing was changed, because posthaste_audit did not take the entry")

const writeTimeout = 5 * time.Second

// Do makes a change with its entries. change returns its results, which the entry has in addition to args, and its
// error, which Do returns. Do returns ErrNoEntry if it could not write the first entry.
func (t *Trail) Do(
	ctx context.Context, who Who, action string, args Detail, change func(ctx context.Context) (Detail, error),
) error {
	e := entry{attempt: uuid.New(), outcome: begun, action: action, who: who, detail: args}
	bctx, cancel := context.WithTimeout(ctx, writeTimeout)
	err := t.write(bctx, &e)
	cancel()
	if err != nil {
		e.outcome, e.reason = failed, "no entry"
		t.say(&e)
		return fmt.Errorf("%w: %w", ErrNoEntry, err)
	}
	result, err := change(ctx)
	e.outcome, e.reason = outcomeOf(err)
	e.detail = Detail{}
	maps.Copy(e.detail, args)
	maps.Copy(e.detail, result)
	// The outcome is written even if the client has disconnected.
	wctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), writeTimeout)
	defer cancel()
	if werr := t.write(wctx, &e); werr != nil {
		t.log.Error("the outcome of a change is not in posthaste_audit", "attempt", e.attempt, "err", werr)
	}
	t.say(&e)
	return err
}

// Bounds of the refusals that one process writes: a burst, then one per refusedEvery, which is 1,440 a day.
const (
	refusedBurst = 20
	refusedEvery = time.Minute
)

// Refuse records an attempt that did not begin, in table and log. Beyond the bound it only counts: the next refusal
// that is written has the number of those that were not ("unwritten"). It logs its own failures.
func (t *Trail) Refuse(ctx context.Context, who Who, action, reason string, args Detail) {
	if !t.refusals.AllowN(t.now(), 1) {
		t.unwritten.Add(1)
		return
	}
	e := entry{attempt: uuid.New(), outcome: refused, reason: reason, action: action, who: who, detail: Detail{}}
	maps.Copy(e.detail, args)
	if n := t.unwritten.Swap(0); n > 0 {
		e.detail["unwritten"] = n
	}
	// The refusal is written even if the client has disconnected.
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), writeTimeout)
	defer cancel()
	if err := t.write(ctx, &e); err != nil {
		t.log.Error("a refusal is not in posthaste_audit", "attempt", e.attempt, "err", err)
	}
	t.say(&e)
}

// entry is a row.
type entry struct {
	attempt                 uuid.UUID
	outcome, reason, action string
	who                     Who
	detail                  Detail
}

func (t *Trail) write(ctx context.Context, e *entry) error {
	if t.pool == nil {
		return nil
	}
	_, err := t.pool.Exec(ctx, query("add"), e.attempt, e.outcome, short(e.reason), e.action, short(e.who.Actor),
		short(e.who.Source), e.detail.json())
	return err
}

// say logs an entry.
func (t *Trail) say(e *entry) {
	level := slog.LevelInfo
	if e.outcome != ok {
		level = slog.LevelWarn
	}
	t.log.Log(context.Background(), level, "operator", "action", e.action, "outcome", e.outcome,
		"reason", short(e.reason), "actor", short(e.who.Actor), "source", short(e.who.Source), "attempt", e.attempt,
		"detail", string(e.detail.json()))
}

// Bounds of a detail: bytes of a text, members of a list, bytes of the whole.
const (
	maxText   = 256
	maxList   = 100
	maxDetail = 16 << 10
)

// short cuts a text and removes what Postgres cannot store.
func short(s string) string {
	s = strings.ReplaceAll(strings.ToValidUTF8(s, "?"), "\x00", "?")
	if len(s) > maxText {
		s = strings.ToValidUTF8(s[:maxText], "") + "…"
	}
	return s
}

func (d Detail) json() []byte {
	cut := make(Detail, len(d))
	for k, v := range d {
		switch v := v.(type) {
		case string:
			cut[k] = short(v)
		case []string:
			list := make([]string, 0, min(len(v), maxList))
			for _, s := range v[:min(len(v), maxList)] {
				list = append(list, short(s))
			}
			cut[k] = list
			if more := len(v) - maxList; more > 0 {
				cut[k+"_more"] = more
			}
		default:
			cut[k] = v
		}
	}
	b, err := json.Marshal(cut)
	if err != nil || len(b) > maxDetail {
		return fmt.Appendf(nil, `{"cut":%d}`, len(b))
	}
	return b
}

// anErrorOfRedis matches the first word of an error of Redis.
var anErrorOfRedis = regexp.MustCompile(`^[A-Z]{2,32}$`)

// outcomeOf returns the outcome and the class of an error, without its text.
func outcomeOf(err error) (outcome, reason string) {
	var redis interface {
		error
		RedisError()
	}
	switch {
	case err == nil:
		return ok, ""
	case errors.Is(err, errPartly):
		return failed, "partly"
	case errors.Is(err, sql.ErrNotParked):
		return refused, "not dead"
	case errors.Is(err, sql.ErrUnreadable):
		return refused, "unreadable"
	case sql.Denied(err):
		return refused, "denied by postgres"
	case errors.Is(err, context.DeadlineExceeded):
		return failed, "timeout"
	case errors.Is(err, context.Canceled):
		return failed, "interrupted"
	case sql.SQLState(err) != "":
		return failed, "postgres " + sql.SQLState(err)
	case errors.As(err, &redis):
		if word, _, _ := strings.Cut(redis.Error(), " "); anErrorOfRedis.MatchString(word) {
			return failed, "redis " + word
		}
		return failed, "redis"
	case errors.As(err, new(net.Error)):
		return failed, "connection"
	}
	return failed, "error"
}

// Tally sums the results of a change to several objects.
type Tally struct {
	done   []string
	failed int
	first  error
}

func (t *Tally) Add(name string, err error) {
	if err == nil {
		t.done = append(t.done, name)
		return
	}
	t.failed++
	t.first = cmp.Or(t.first, err)
}

// errPartly means that a change was made to some objects only.
var errPartly = errors.New("not all could be changed")

// Result returns the results for Do.
func (t *Tally) Result() (Detail, error) {
	d := Detail{"done": len(t.done), "failed": t.failed}
	if len(t.done) == 0 {
		return d, t.first
	}
	d["done_ids"] = t.done
	if t.failed > 0 {
		return d, errPartly
	}
	return d, nil
}

// Entry is an attempt with its outcome.
type Entry struct {
	At      time.Time       `json:"at"`
	Attempt uuid.UUID       `json:"attempt"`
	Outcome string          `json:"outcome"`
	Reason  string          `json:"reason,omitempty"`
	Action  string          `json:"action"`
	Actor   string          `json:"actor"`
	Source  string          `json:"source"`
	Detail  json.RawMessage `json:"detail"`
	// Role is the Postgres role that wrote the entry.
	Role string `json:"role"`
}

// List returns the newest attempts since a time, the newest first, at most limit. Without an outcome it is 'begun'.
func List(ctx context.Context, db sql.DB, since time.Time, limit int) ([]Entry, error) {
	return statement.Structs[Entry](ctx, db, "list posthaste_audit", query("list"), since, limit)
}
