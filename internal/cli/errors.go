package cli

import (
	"cmp"
	"context"
	"errors"
	"net/url"
	"strings"

	"posthaste/internal/ops"
	"posthaste/internal/redisurl"
	"posthaste/internal/socket"
	"posthaste/sink"
	"posthaste/sql"
)

// ErrSaid is a failure that the command has already reported, so nothing more is printed.
var ErrSaid = errors.New("failed")

// ExitError is a failure with an exit code of its own.
type ExitError struct {
	Code int
	Err  error
}

func (e *ExitError) Error() string { return e.Err.Error() }

func (e *ExitError) Unwrap() error { return e.Err }

// UsageError is a mistake on the command line that the parser cannot detect.
type UsageError struct{ text string }

func (e *UsageError) Error() string { return e.text }

func Usage(text string) error { return &UsageError{text} }

// WithRedisRemedy marks an error as one of a call to Redis, for Line. It returns nil for nil.
func WithRedisRemedy(err error) error {
	if err == nil {
		return nil
	}
	return ofRedis{err}
}

type ofRedis struct{ error }

func (e ofRedis) Unwrap() error { return e.error }

// Line returns the one line that reports err: the problem, with what it concerns, and the remedy. redisAt names the
// server or servers of the settings.
func Line(err error, redisAt string) string {
	problem, remedy := sql.Explain(err)
	var request *url.Error
	switch {
	case problem != "":
	case errors.As(err, &request):
		if failure := socket.Failure(err); failure != "" {
			problem, remedy = request.URL+" "+failure, "check the address, and that its process runs"
		}
	case errors.As(err, new(ofRedis)), errors.As(err, new(*sink.NotReadyError)), redisurl.IsReply(err):
		problem, remedy = sink.Explain(err, redisAt)
	case errors.Is(err, context.DeadlineExceeded):
		step, _, _ := strings.Cut(err.Error(), ": timeout")
		step, _, _ = strings.Cut(step, context.DeadlineExceeded.Error())
		problem = strings.TrimSpace(step + " did not end in time")
		remedy = "posthaste doctor checks Postgres and Redis"
	}
	problem = cmp.Or(problem, err.Error())
	if strings.Contains(problem, "recovery is in progress") {
		remedy = "point --postgres-url at the primary"
	}
	if remedy != "" {
		problem += ": " + remedy
	}
	return ops.Printable(strings.Join(strings.Fields(problem), " "))
}
