package sql

import (
	"context"
	"time"
)

// KeepHistoryAt is KeepHistory at another time.
func (s *Store) KeepHistoryAt(ctx context.Context, now time.Time) error {
	return s.keepHistory(ctx, &now)
}
