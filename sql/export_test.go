package sql

import (
	"context"
	"time"
)

// KeepHistoryAt is s.KeepHistory at another time.
func KeepHistoryAt(ctx context.Context, s *Store, now time.Time) error {
	return s.keepHistory(ctx, &now)
}

// SessionOf is the connection of s.
func SessionOf(s *Sweep) DB { return s.conn }

var Awaits = awaits

// Waiting returns how many orders wait for their group.
func Waiting(w *Placer) int {
	_, n := w.queue.State()
	return n
}

// Patient removes w's limits on waiting.
func Patient(w *Placer) { w.turn, w.alone = time.Minute, time.Minute }
