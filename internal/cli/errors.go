package cli

import (
	"errors"
	"fmt"
	"strings"

	"github.com/jackc/pgerrcode"

	"posthaste/outbox"
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

// Error implements error.
func (e *ExitError) Error() string { return e.Err.Error() }

// Unwrap returns Err.
func (e *ExitError) Unwrap() error { return e.Err }

// UsageError is a mistake on the command line that the parser cannot detect.
type UsageError struct{ text string }

// Error implements error.
func (e *UsageError) Error() string { return e.text }

// Usage returns a *UsageError.
func Usage(text string) error { return &UsageError{text} }

// Remedy returns a remedy for an error of Postgres, to be appended to the error's text. It is empty if the text has
// it.
func Remedy(err error) string {
	switch state := sql.SQLState(err); {
	case state == pgerrcode.ReadOnlySQLTransaction, err != nil &&
		strings.Contains(err.Error(), "recovery is in progress"):
		return " (point --postgres-url at the primary)"
	case state == pgerrcode.InsufficientPrivilege && !errors.As(err, new(*outbox.SlotError)):
		return " (run it as a role with this right: see docs/operations.md)"
	}
	return ""
}

// WithRedisRemedy appends a remedy to an error of Redis. It returns nil for nil.
func WithRedisRemedy(err error) error {
	switch class := sink.Class(err); class {
	case "", "other", "canceled", "fenced", "foreign", "gap", "restarted":
		return OneLine(err)
	default:
		return fmt.Errorf("%w (%s)", OneLine(err), sink.Remedy(class))
	}
}

// OneLine folds an error into one line: the connection library lists its attempts on several. It returns nil for nil.
func OneLine(err error) error {
	if err == nil || !strings.Contains(err.Error(), "\n") {
		return err
	}
	return folded{err}
}

type folded struct{ err error }

// Error implements error.
func (f folded) Error() string { return strings.Join(strings.Fields(f.err.Error()), " ") }

// Unwrap returns the error on several lines.
func (f folded) Unwrap() error { return f.err }
