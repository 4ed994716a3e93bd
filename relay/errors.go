package relay

import (
	"errors"

	"posthaste/outbox"
)

// The causes with which a part ends another.
var (
	errLockLost    = errors.New("the lock session is gone")
	errToggled     = errors.New("another mode is wanted")
	errBlocked     = errors.New("a stream is blocked: the hand-over waits for it, and polling continues")
	errSourceEnded = errors.New("the source ended")
	errSweepEnded  = errors.New("polling ended")
)

// superseded reports whether another owner has adopted.
func superseded(err error) bool { return errors.Is(err, outbox.ErrSuperseded) }

// never is for calls without an error that is final.
func never(error) bool { return false }

// displaced reports whether a gate does not belong to its owner any more.
func displaced(err error) bool {
	return errors.Is(err, outbox.ErrGap) || errors.As(err, new(*outbox.FencedError))
}

// finished reports whether err ends the lane it came from.
func finished(err error) bool { return displaced(err) || errors.As(err, new(*outbox.ForeignError)) }

// hopeless reports whether this owner can no longer publish or settle anything.
func hopeless(cause error) bool {
	return errors.Is(cause, errLockLost) || superseded(cause) || displaced(cause)
}

// slotReason names the condition behind an error that ended or prevented the stream.
func slotReason(err error) string {
	var se *outbox.SlotError
	switch {
	case err == nil:
		return outbox.ReasonStop
	case errors.As(err, &se):
		return se.Reason
	case errors.Is(err, outbox.ErrMoved):
		return outbox.ReasonRestarted
	case errors.Is(err, outbox.ErrGap):
		return outbox.ReasonGap
	case displaced(err), superseded(err):
		return outbox.ReasonFenced
	default:
		return outbox.ReasonConnection
	}
}
