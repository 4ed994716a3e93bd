package consumer

import (
	"errors"
	"time"
)

type permanentError struct{ error }

func (e *permanentError) Unwrap() error { return e.error }
func (*permanentError) Permanent() bool { return true }

// Permanent marks an error that no retry can fix: the event goes to its dead stream at once. Any error with a method
// Permanent() bool that returns true counts the same. Permanent(nil) is nil.
func Permanent(err error) error {
	if err == nil {
		return nil
	}
	return &permanentError{err}
}

type unavailableError struct{ error }

func (e *unavailableError) Unwrap() error   { return e.error }
func (*unavailableError) Unavailable() bool { return true }

// Unavailable marks an error that is not the event's fault, for example a database that cannot be reached. The event
// is retried with backoff for as long as it takes, and no attempt is counted. Without this mark an outage is recognized
// only if nearly all events fail. Any error with a method Unavailable() bool that returns true counts the same. If it
// also has a method RetryAfter() time.Duration, the retry begins no sooner than that. Unavailable(nil) is nil.
func Unavailable(err error) error {
	if err == nil {
		return nil
	}
	return &unavailableError{err}
}

func isPermanent(err error) bool {
	var p interface{ Permanent() bool }
	return errors.As(err, &p) && p.Permanent()
}

func isUnavailable(err error) bool {
	var u interface{ Unavailable() bool }
	return errors.As(err, &u) && u.Unavailable()
}

func retryAfter(err error) time.Duration {
	var r interface{ RetryAfter() time.Duration }
	if errors.As(err, &r) {
		return r.RetryAfter()
	}
	return 0
}

var errGoexit = errors.New("the handler ended its goroutine (runtime.Goexit)")
