package sql

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"

	"posthaste/outbox"
)

const (
	// leaseTimeout is how long the server waits for a statement before it ends a session that holds locks.
	leaseTimeout = 10 * time.Second
	// leasePing is the interval of a session's pings.
	leasePing = 2 * time.Second
	// The application names of sessions that hold locks: see lock_holder.sql and pulse.sql.
	locksName    = "posthaste locks"
	sinklessName = "posthaste locks without sink"
)

type locks struct {
	url, schema string
	log         *slog.Logger
	once        sync.Once // for the warning of a pooler
}

// NewLocks returns a Locker for the database at url. Its sessions are connections that only hold an instance's advisory
// locks. log may be nil.
func NewLocks(url, schema string, log *slog.Logger) outbox.Locker {
	return &locks{url: url, schema: schema, log: cmp.Or(log, slog.New(slog.DiscardHandler))}
}

// Open connects. The session pings every 2 s. The server ends a session that was idle for 10 s, which frees the locks
// of a frozen process.
func (l *locks) Open(ctx context.Context) (outbox.LockSession, error) {
	cfg, err := ConnConfig(l.url, l.schema, "locks")
	if err != nil {
		return nil, err
	}
	cfg.RuntimeParams["application_name"] = locksName // overrides a name in the URL
	cfg.RuntimeParams["idle_session_timeout"] = fmt.Sprintf("%dms", leaseTimeout.Milliseconds())
	ctx, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	conn, pooling, err := connectSession(ctx, cfg)
	if err != nil {
		return nil, fmt.Errorf("open the lock session: %w", err)
	}
	if pooling != Unpooled {
		l.once.Do(func() {
			l.log.Warn("a pooler is between this relay and Postgres: mode poll works, cdc needs a direct connection",
				"pool_mode", pooling)
		})
	}
	s := &lockSession{conn: conn, log: l.log, lost: make(chan struct{}), done: make(chan struct{})}
	if s.leader, err = s.key(ctx, "leader"); err == nil {
		s.pipe, err = s.key(ctx, "pipe")
	}
	if err != nil {
		_ = conn.Close(context.WithoutCancel(ctx))
		return nil, fmt.Errorf("open the lock session: %w", err)
	}
	pings, stop := context.WithCancel(context.Background())
	s.stop = stop
	go s.ping(pings)
	return s, nil
}

type lockSession struct {
	// mu serializes the connection's use between its owner and the pinger.
	mu           sync.Mutex
	conn         *pgx.Conn
	leader, pipe int64
	log          *slog.Logger
	once         sync.Once
	lost         chan struct{} // closed once, when the session has ended
	stop         context.CancelFunc
	done         chan struct{} // closed when the pinger has stopped
}

func (s *lockSession) key(ctx context.Context, name string) (int64, error) {
	var k int64
	err := s.conn.QueryRow(ctx, query("lock_key"), name).Scan(&k)
	return k, err
}

// ping keeps the session from being idle. It stops at the first ping that is not answered within callTimeout. leasePing
// and callTimeout together are less than leaseTimeout, so the owner notices the loss before the server frees the locks.
func (s *lockSession) ping(ctx context.Context) {
	defer close(s.done)
	t := time.NewTicker(leasePing)
	defer t.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-t.C:
		}
		if _, err := s.call(ctx, "SELECT true"); err != nil {
			return
		}
	}
}

// call runs a query for one boolean. Any error ends the session, because its state on the server is unknown.
func (s *lockSession) call(ctx context.Context, text string, args ...any) (bool, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	ctx, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	var ok bool
	if err := s.conn.QueryRow(ctx, text, args...).Scan(&ok); err != nil {
		s.lose(err)
		return false, fmt.Errorf("lock session: %w", err)
	}
	return ok, nil
}

func (s *lockSession) lose(err error) {
	s.once.Do(func() {
		if !errors.Is(err, context.Canceled) {
			s.log.Warn("lock session lost", "err", err)
		}
		close(s.lost)
	})
}

func (s *lockSession) TryLead(ctx context.Context) (bool, error) {
	return s.call(ctx, query("lock_try"), s.leader)
}

func (s *lockSession) TryPipe(ctx context.Context, exclusive bool) (bool, error) {
	if exclusive {
		return s.call(ctx, query("lock_try"), s.pipe)
	}
	return s.call(ctx, query("lock_try_shared"), s.pipe)
}

func (s *lockSession) DropPipe(ctx context.Context, exclusive bool) error {
	text := query("lock_drop_shared")
	if exclusive {
		text = query("lock_drop")
	}
	_, err := s.call(ctx, text, s.pipe)
	return err
}

// TellSink sets the session's application name.
func (s *lockSession) TellSink(ctx context.Context, reached bool) error {
	name := sinklessName
	if reached {
		name = locksName
	}
	_, err := s.call(ctx, query("lock_name"), name)
	return err
}

func (s *lockSession) Lost() <-chan struct{} { return s.lost }

// Close ends the session, which frees its locks.
func (s *lockSession) Close() {
	s.stop()
	<-s.done
	s.mu.Lock()
	defer s.mu.Unlock()
	ctx, cancel := context.WithTimeout(context.Background(), time.Second)
	defer cancel()
	_ = s.conn.Close(ctx)
}

// LeaderSession returns the session that holds the leader's lock, the zero value if no session does.
func LeaderSession(ctx context.Context, db DB) (s outbox.LeaderSession, err error) {
	err = db.QueryRow(ctx, query("lock_holder")).
		Scan(&s.PID, &s.Application, &s.Role, &s.Address, &s.Relay, &s.Sinkless)
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

// EndSession terminates the session pid if it holds the leader's lock. The role may lack the right to do so.
func (s *Store) EndSession(ctx context.Context, pid int) error {
	_, err := s.exec(ctx, fmt.Sprintf("end session %d", pid), "session_end", pid)
	return err
}
