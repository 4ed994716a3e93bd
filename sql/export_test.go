package sql

import (
	"context"
	"time"

	"posthaste/outbox"
)

// KeepHistoryAt is s.KeepHistory at another time.
func KeepHistoryAt(ctx context.Context, s outbox.Store, now time.Time) error {
	return s.(*store).keepHistory(ctx, &now)
}

// SessionOf is the connection of s.
func SessionOf(s *Sweep) DB { return s.conn }

// Awaits is what PlaceOrder asks before it sends.
var Awaits = awaits

// Waiting is how many orders wait for their turn.
func Waiting(w *Placer) int {
	w.mu.Lock()
	defer w.mu.Unlock()
	return len(w.waiting)
}

// Patient has w let orders wait for as long as a test may take, and still tries them by themselves.
func Patient(w *Placer) { w.turn, w.alone = time.Minute, time.Minute }

// BrokenPlacer panics when it inserts.
func BrokenPlacer() *Placer { return &Placer{turn: time.Minute} }
