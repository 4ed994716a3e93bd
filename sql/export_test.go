package sql

import (
	"context"
	"time"

	"posthaste/outbox"
)

// ParseSnapshot is parseSnapshot for the tests.
var ParseSnapshot = parseSnapshot

// KeepHistoryAt is s.KeepHistory at another time.
func KeepHistoryAt(ctx context.Context, s outbox.Store, now time.Time) error {
	return s.(*store).keepHistory(ctx, &now)
}
