package sql

import (
	"context"
	"errors"
	"fmt"

	"github.com/jackc/pgx/v5"

	"posthaste/outbox"
)

// LeaderSession returns the session that holds the leader's lock, the zero value if no session does.
func LeaderSession(ctx context.Context, db DB) (s outbox.LeaderSession, err error) {
	err = db.QueryRow(ctx, query("lock_holder")).Scan(&s.PID, &s.Application, &s.Role, &s.Address, &s.Relay, &s.Sinkless)
	if errors.Is(err, pgx.ErrNoRows) {
		return s, nil
	}
	if err != nil {
		return s, fmt.Errorf("look for the holder of the leader's lock: %w", err)
	}
	return s, nil
}

func (s *Store) LeaderSession(ctx context.Context) (outbox.LeaderSession, error) {
	ctx, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	return LeaderSession(ctx, s.pool)
}

// EndSession terminates the session pid. The role may lack the right to do so.
func (s *Store) EndSession(ctx context.Context, pid int) error {
	_, err := s.exec(ctx, fmt.Sprintf("end session %d", pid), "session_end", pid)
	return err
}
