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

// ErrSaid is a failure that the command has reported already: nothing more is printed.
var ErrSaid = errors.New("failed")

// UsageError is a mistake on the command line that the parser could not see.
type UsageError struct{ text string }

// Error implements error.
func (e *UsageError) Error() string { return e.text }

// Usage returns a *UsageError.
func Usage(text string) error { return &UsageError{text} }

// Remedy returns what helps against a refusal of Postgres, as an addition to the error's text. It is empty where the
// error says so itself.
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

// WithRedisRemedy adds to an error of Redis what helps. It returns nil for nil.
func WithRedisRemedy(err error) error {
	switch class := sink.Class(err); class {
	case "", "other", "canceled", "fenced", "foreign", "gap", "restarted":
		return OneLine(err)
	default:
		return fmt.Errorf("%w (%s)", OneLine(err), sink.Remedy(class))
	}
}

// OneLine folds an error into one line, because the connection library lists its attempts on several. It returns nil
// for nil.
func OneLine(err error) error {
	if err == nil || !strings.Contains(err.Error(), "\n") {
		return err
	}
	return folded{err}
}

// folded is an error on one line.
type folded struct{ err error }

// Error implements error.
func (f folded) Error() string { return strings.Join(strings.Fields(f.err.Error()), " ") }

// Unwrap returns the error on several lines.
func (f folded) Unwrap() error { return f.err }
