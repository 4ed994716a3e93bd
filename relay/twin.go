package relay

import (
	"context"
	"fmt"
	"time"

	"github.com/google/uuid"

	"posthaste/internal/pause"
	"posthaste/outbox"
)

// A copy of a server's files has the table of the original and the same identity for the sink. Each would overtake the
// other's gates again and again. So a leader signs in the sink that it is alive, and no instance adopts while a leader
// on another server signs.

// twin holds the sign of a leader on another server. renewed is set when that leader has signed again. A leader whose
// Postgres was restarted, or replaced by its standby, does not sign again.
type twin struct {
	sign    *outbox.Sign
	renewed bool
}

// alone signs, and returns an error if another leader does. seen holds the results of previous calls.
func (l *leadership) alone(ctx context.Context, st outbox.State, seen *twin) error {
	ctx, cancel := context.WithTimeout(ctx, publishTimeout)
	defer cancel()
	m := outbox.Member{ID: l.id, Server: st.Server, Holder: l.holder}
	other, err := l.sink.Alive(ctx, st.Owner.Source, m, seen.sign)
	if err != nil {
		return err
	}
	if other != nil {
		l.signed.Store(nil)
		seen.renewed = seen.renewed || seen.sign != nil && seen.sign.Text != other.Text
		if seen.sign = other; seen.renewed {
			return &outbox.TwinError{Holder: other.Holder}
		}
		return fmt.Errorf("%s, which has led on another server of Postgres, may still be at work", other.Holder)
	}
	l.signed.Store(&signed{source: st.Owner.Source, member: m})
	l.health.clear(conditionTwin)
	return nil
}

// signed is a sign of life.
type signed struct {
	source uuid.UUID
	member outbox.Member
}

// sign repeats the sign of life in every phase of the leader. It ends with the session that has the leader's lock.
func (l *leadership) sign(ctx context.Context) {
	for pause.For(ctx, time.Second) == nil {
		if s := l.signed.Load(); s != nil {
			actx, cancel := context.WithTimeout(ctx, publishTimeout)
			_, _ = l.sink.Alive(actx, s.source, s.member, nil) // if it is refused, the gates tell
			cancel()
		}
	}
}
