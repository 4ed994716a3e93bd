//go:build failpoints

package failpoint

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"regexp"
	"runtime"
	"strings"
	"sync"
	"syscall"

	"github.com/jackc/pgx/v5"
)

// Before is called before a message is sent to a server, After when the server has answered.
func Before(what string, values ...any) { cross("before", what, values) }

// After is Before's counterpart.
func After(what string, values ...any) { cross("after", what, values) }

// Answer returns the arguments of After.
func Answer(reply any, err error) []any {
	if err != nil {
		return []any{reply, err.Error()}
	}
	return []any{reply, ""}
}

// Statements makes the connections of cfg call Before and After for each statement.
func Statements(cfg *pgx.ConnConfig) { cfg.Tracer = tracer{} }

var (
	// action is kill or stop; at is the step, preceded by the moment.
	action, at, _ = strings.Cut(os.Getenv("POSTHASTE_FAILPOINT"), " ")
	trace         = os.Getenv("POSTHASTE_FAILPOINT_TRACE")
	events        = os.Getenv("POSTHASTE_FAILPOINT_LOG")

	mu   sync.Mutex
	seen = map[string]bool{}
	once sync.Once
)

// cross records a step, and performs the action if it is the configured one.
func cross(moment, what string, values []any) {
	step := name(what)
	if step == "" {
		return
	}
	if events != "" {
		write(moment, step, values)
	}
	step = moment + " " + step
	if trace != "" {
		note(step)
	}
	if step != at {
		return
	}
	once.Do(func() {
		switch action {
		case "kill":
			_ = syscall.Kill(os.Getpid(), syscall.SIGKILL)
			select {}
		case "stop":
			_ = syscall.Kill(os.Getpid(), syscall.SIGSTOP)
		}
	})
}

// note appends a step to the file, once.
func note(step string) {
	mu.Lock()
	defer mu.Unlock()
	if seen[step] {
		return
	}
	seen[step] = true
	appendTo(trace, []byte(step+"\n"))
}

// write records a step with its arguments or its answer. Each line is one write to the end of a file that processes
// share, so the order of lines is the order of writes.
func write(moment, step string, values []any) {
	line, err := json.Marshal(Event{os.Getpid(), goroutine(), moment, step, values})
	if err == nil {
		appendTo(events, append(line, '\n'))
	}
}

func appendTo(path string, line []byte) {
	f, err := os.OpenFile(path, os.O_APPEND|os.O_CREATE|os.O_WRONLY, 0o600)
	if err != nil {
		return
	}
	defer f.Close()
	_, _ = f.Write(line)
}

// goroutine is the number of the calling goroutine.
func goroutine() (n int) {
	var text [64]byte
	_, _ = fmt.Sscanf(string(text[:runtime.Stack(text[:], false)]), "goroutine %d ", &n)
	return n
}

// subject is a subject of NATS, of which a step's name has what precedes the names of streams and lanes.
var subject = regexp.MustCompile(`^(?:\$JS\.API\.([A-Z]+(?:\.[A-Z]+)*)|(posthaste-\w+|outbox))(?:\..*)?$`)

// name is the name of the caller's step; empty if the caller is not in relay, relay/sweep, the stream reader or the
// sink of NATS, which makes some requests in goroutines of its own.
func name(what string) string {
	what = subject.ReplaceAllString(what, "$1$2")
	pcs := make([]uintptr, 64)
	frames := runtime.CallersFrames(pcs[:runtime.Callers(1, pcs)])
	method := ""
	for {
		f, more := frames.Next()
		if strings.HasSuffix(f.Function, ".initConn") {
			return "" // a new connection to Redis introduces itself
		}
		if pkg, fn, ours := strings.Cut(f.Function, "."); ours && strings.HasPrefix(pkg, "posthaste/") {
			fn = plain(fn)
			switch pkg {
			case "posthaste/relay", "posthaste/relay/sweep":
				return fn + " " + method + " " + what
			case "posthaste/internal/failpoint", "posthaste/internal/app", "posthaste/relay/stream":
			default:
				if fn == "Sink.each" { // it calls a method of the sink in goroutines
					break
				}
				method = strings.TrimPrefix(pkg, "posthaste/") + "." + fn
			}
		}
		if !more {
			if strings.HasPrefix(method, "cdc.") {
				return "reader " + method + " " + what
			}
			if strings.HasPrefix(method, "sink/jetstream.") {
				return "sink " + method + " " + what
			}
			return ""
		}
	}
}

var literal = regexp.MustCompile(`\.(func|gowrap)?\d+|-fm$|-range\d+|\[\.\.\.\]`)

// plain is the name of a function or method without pointers and function literals.
func plain(fn string) string {
	return strings.NewReplacer("(*", "", ")", "").Replace(literal.ReplaceAllString(fn, ""))
}

// words are the first words of a statement.
func words(sql string) string {
	var list []string
	for line := range strings.Lines(sql) {
		if !strings.HasPrefix(strings.TrimSpace(line), "--") {
			list = append(list, strings.Fields(line)...)
		}
	}
	return strings.Join(list[:min(len(list), 6)], " ")
}

type tracer struct{}

type statement struct{}

// TraceQueryStart implements pgx.QueryTracer.
func (tracer) TraceQueryStart(ctx context.Context, _ *pgx.Conn, data pgx.TraceQueryStartData) context.Context {
	what := words(data.SQL)
	Before(what, data.Args...)
	return context.WithValue(ctx, statement{}, what)
}

// TraceQueryEnd implements pgx.QueryTracer.
func (tracer) TraceQueryEnd(ctx context.Context, _ *pgx.Conn, data pgx.TraceQueryEndData) {
	what, _ := ctx.Value(statement{}).(string)
	After(what, Answer(nil, data.Err)...)
}

// TraceBatchStart implements pgx.BatchTracer.
func (tracer) TraceBatchStart(ctx context.Context, _ *pgx.Conn, data pgx.TraceBatchStartData) context.Context {
	var last []any
	for _, q := range data.Batch.QueuedQueries {
		if len(q.Arguments) > 0 {
			last = q.Arguments
		}
	}
	Before("batch", last...)
	return ctx
}

// TraceBatchQuery implements pgx.BatchTracer.
func (tracer) TraceBatchQuery(context.Context, *pgx.Conn, pgx.TraceBatchQueryData) {}

// TraceBatchEnd implements pgx.BatchTracer.
func (tracer) TraceBatchEnd(_ context.Context, _ *pgx.Conn, data pgx.TraceBatchEndData) {
	After("batch", Answer(nil, data.Err)...)
}
