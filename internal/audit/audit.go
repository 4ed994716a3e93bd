// Package audit notes who changed what: every change that an operator makes by terminal, HTTP or console, in the table
// posthaste_audit, which only grows, and in one line of the log.
//
// There is one scheme for all changes, whether they are in Postgres, in Redis or in both. Do writes an entry 'begun',
// makes the change, and writes a second entry with the same attempt and its outcome:
//
//	ok       it is done
//	refused  it was not done; the reason says why: nothing is parked under the id, or Postgres denies it to the role
//	failed   it was not done, or not entirely; the reason is the class of the error, never its text
//
// A change whose first entry cannot be written is not made. An entry 'begun' that stays alone means that the process
// ended, or that Postgres was gone, before the outcome was written: whether the change was made is in the log, or not
// known. (An entry in the transaction of the change would need no second one, but half of the changes are in Redis.)
//
// What was refused before it began (a wrong token, a page of another origin) is a single entry. Anybody can cause
// those, so few are written, and the rest are counted: see Refuse.
//
// Entries hold ids, names and arguments; no payloads, no tokens, no texts of errors.
package audit

import (
	"context"
	"embed"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"os/user"
	"regexp"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"posthaste/internal/statement"
	"posthaste/sql"
)

//go:embed queries/*.sql
var files embed.FS

var query = statement.In(files)

// What changes something, as entries call it.
const (
	Mode        = "mode"
	DeadRetry   = "dead retry"
	DeadDrop    = "dead drop"
	Replay      = "replay"
	StreamsDrop = "streams drop"
	Spread      = "streams spread"
	Leave       = "streams leave"
	GroupsDrop  = "groups drop"
	Adopt       = "adopt"
	Unfreeze    = "credits unfreeze"
	Uninstall   = "uninstall"
)

// Outcomes of an attempt.
const (
	begun   = "begun"
	ok      = "ok"
	refused = "refused"
	failed  = "failed"
)

// Detail is what exactly was asked for or done. Long texts and lists are cut.
type Detail map[string]any

// Who is who asks for a change.
type Who struct {
	// Actor is the role of a token, or the user and host of a terminal; Source the address of the peer, or "terminal".
	Actor, Source string
}

// Terminal is who runs this process.
func Terminal() Who {
	name := "uid " + strconv.Itoa(os.Getuid()) // where nobody knows its name, as in containers
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

	mu sync.Mutex
	// credit is how many refusals may be written now, as of filled; unwritten is how many were not since the last one.
	credit    float64
	filled    time.Time
	unwritten int
}

// New returns a trail into the pool's table. Without a pool (nil) there is only the log: for what removes the table.
func New(pool *pgxpool.Pool, log *slog.Logger) *Trail {
	return &Trail{pool: pool, log: log.With("component", "audit"), now: time.Now, credit: refusedBurst}
}

// ErrNoEntry means that nothing was changed, because the entry of the change could not be written.
var ErrNoEntry = errors.New("nothing was changed, because posthaste_audit did not take the entry")

// writeTimeout bounds the writing of an entry.
const writeTimeout = 5 * time.Second

// Do makes a change with its entries. change returns what became of it, which is noted beside args, and its error,
// which Do returns. Other errors: ErrNoEntry.
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
	for _, part := range []Detail{args, result} {
		for k, v := range part {
			e.detail[k] = v
		}
	}
	// Also if nobody waits for the answer any more.
	wctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), writeTimeout)
	defer cancel()
	if werr := t.write(wctx, &e); werr != nil {
		t.log.Error("the outcome of a change is not in posthaste_audit", "attempt", e.attempt, "err", werr)
	}
	t.say(&e)
	return err
}

// What is written of refusals by one process: so many at once, then one each refusedEvery, which is 1,440 a day.
const (
	refusedBurst = 20
	refusedEvery = time.Minute
)

// Refuse notes an attempt that did not begin, in table and log. Beyond the bound it only counts: the next refusal that
// is written says how many were not ("unwritten"). It logs its own failures.
func (t *Trail) Refuse(ctx context.Context, who Who, action, reason string, args Detail) {
	unwritten, allowed := t.take()
	if !allowed {
		return
	}
	e := entry{attempt: uuid.New(), outcome: refused, reason: reason, action: action, who: who, detail: Detail{}}
	for k, v := range args {
		e.detail[k] = v
	}
	if unwritten > 0 {
		e.detail["unwritten"] = unwritten
	}
	// Also if whoever was refused has gone.
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), writeTimeout)
	defer cancel()
	if err := t.write(ctx, &e); err != nil {
		t.log.Error("a refusal is not in posthaste_audit", "attempt", e.attempt, "err", err)
	}
	t.say(&e)
}

// take reports whether one more refusal may be written, and how many were not before it.
func (t *Trail) take() (unwritten int, allowed bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	now := t.now()
	if !t.filled.IsZero() {
		t.credit = min(refusedBurst, t.credit+float64(now.Sub(t.filled))/float64(refusedEvery))
	}
	t.filled = now
	if t.credit < 1 {
		t.unwritten++
		return 0, false
	}
	t.credit--
	unwritten, t.unwritten = t.unwritten, 0
	return unwritten, true
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

// say writes the line of the log.
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

// short cuts a text, and takes out what Postgres cannot store.
func short(s string) string {
	s = strings.ReplaceAll(strings.ToValidUTF8(s, "?"), "\x00", "?")
	if len(s) > maxText {
		s = strings.ToValidUTF8(s[:maxText], "") + "…"
	}
	return s
}

// json is the detail within its bounds.
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

// anErrorOfRedis is the word that such an error begins with.
var anErrorOfRedis = regexp.MustCompile(`^[A-Z]{2,32}$`)

// outcomeOf says what an error makes of a change, without its text.
func outcomeOf(err error) (outcome, reason string) {
	var redis interface {
		error
		RedisError()
	}
	var network net.Error
	switch {
	case err == nil:
		return ok, ""
	case errors.Is(err, errPartly):
		return failed, "partly"
	case errors.Is(err, sql.ErrNotParked):
		return refused, "not parked"
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
	case errors.As(err, &network):
		return failed, "connection"
	}
	return failed, "error"
}

// Tally adds up what became of the members of a change to many.
type Tally struct {
	done   []string
	failed int
	first  error
}

// Add notes what became of one.
func (t *Tally) Add(name string, err error) {
	if err == nil {
		t.done = append(t.done, name)
		return
	}
	t.failed++
	if t.first == nil {
		t.first = err
	}
}

// errPartly means that a change was made to some, and not to others.
var errPartly = errors.New("not all could be changed")

// Result is what Do is told of all.
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

// Entry is what is shown of an attempt.
type Entry struct {
	At      time.Time       `json:"at"`
	Attempt uuid.UUID       `json:"attempt"`
	Outcome string          `json:"outcome"`
	Reason  string          `json:"reason,omitempty"`
	Action  string          `json:"action"`
	Actor   string          `json:"actor"`
	Source  string          `json:"source"`
	Detail  json.RawMessage `json:"detail"`
	// Role is the role of Postgres that wrote the entry.
	Role string `json:"role"`
}

// List returns the newest attempts since a time, the newest first, at most limit. One without an outcome is 'begun'.
func List(ctx context.Context, db sql.DB, since time.Time, limit int) ([]Entry, error) {
	rows, err := db.Query(ctx, query("list"), since, limit)
	if err != nil {
		return nil, fmt.Errorf("list posthaste_audit: %w", err)
	}
	list, err := pgx.CollectRows(rows, pgx.RowToStructByPos[Entry])
	if err != nil {
		return nil, fmt.Errorf("list posthaste_audit: %w", err)
	}
	return list, nil
}
