package api

import (
	"context"
	"errors"
	"net/http"
	"strings"
	"sync"
	"time"

	"posthaste/idem"
	"posthaste/internal/redisurl"
	"posthaste/sql"
)

// readyTimeout bounds one check of the servers.
const readyTimeout = 2 * time.Second

// Readiness is the body of /readyz.
type Readiness struct {
	// Reasons why no order can be taken: "postgres", "commits" (they wait for a synchronous standby), "read_only",
	// "schema", "tables", "jwks" (no keys to verify tokens). Empty when ready.
	Reasons []string `json:"reasons,omitempty"`
	// Remedy has the operator's remedy for each reason that has one.
	Remedy []string `json:"remedy,omitempty"`
	// Degraded lists problems that do not prevent orders: "schema_newer"; "redis", in a cluster with the nodes that do
	// not answer; "redis_eviction"; "guard: " with Redis' error for the guard's script; "guard_memory" (see
	// idem.Guard.Short); "jwks": the keys of the tokens' issuer cannot be refreshed, and the last ones are used.
	Degraded []string `json:"degraded,omitempty"`
}

// Ready checks Postgres and Redis. It takes at most two seconds.
func (s *Server) Ready(ctx context.Context) Readiness {
	ctx, cancel := context.WithTimeout(ctx, readyTimeout)
	defer cancel()
	var r Readiness
	var wg sync.WaitGroup
	var newer, degraded, remedies []string
	wg.Go(func() { r.Reasons, r.Remedy, newer = s.postgresTrouble(ctx) })
	wg.Go(func() { degraded, remedies = s.redisTrouble(ctx) })
	wg.Wait()
	r.Degraded, r.Remedy = append(newer, degraded...), append(r.Remedy, remedies...)
	switch {
	case s.o.Tokens == nil:
	case !s.o.Tokens.keys.set.Load().good():
		r.Reasons = append(r.Reasons, "jwks")
		r.Remedy = append(r.Remedy, "jwks: the issuer's keys cannot be read; look at the log, and at --jwt-jwks")
	case s.o.Tokens.keys.failing.Load():
		r.Degraded = append(r.Degraded, "jwks")
	}
	return r
}

func (s *Server) postgresTrouble(ctx context.Context) (reasons, remedies, degraded []string) {
	err := s.checkConnection(ctx)
	if err == nil {
		err = sql.CheckSchema(ctx, s.o.Probe)
	}
	switch {
	case err == nil:
		s.fitted.Store(true)
	case s.fitted.Load() && errors.Is(err, sql.ErrSchemaNewer):
		// A newer version has migrated. Its schema works for this version, which takes orders until it is replaced.
		degraded, err = []string{"schema_newer"}, nil
	}
	for _, check := range []func(context.Context, sql.DB) error{
		sql.CheckOrderTables, sql.CheckWritable, sql.CheckCommits,
	} {
		if err == nil {
			err = check(ctx, s.o.Probe)
		}
	}
	switch {
	case err == nil:
		s.refused.Store(false)
		return nil, nil, degraded
	case errors.As(err, new(*sql.OrderTablesError)):
		return []string{"tables"}, []string{err.Error()}, degraded
	case errors.Is(err, sql.ErrCommitsWait):
		return []string{"commits"}, []string{err.Error() + ": " + sql.StandbyRemedy}, degraded
	case errors.Is(err, sql.ErrReadOnly):
		return []string{"read_only"}, []string{err.Error()}, degraded
	case errors.Is(err, sql.ErrSchemaMissing), errors.Is(err, sql.ErrSchemaNewer):
		return []string{"schema"}, []string{err.Error()}, nil
	case sql.LoginRefused(err):
		if s.refused.CompareAndSwap(false, true) {
			s.log.Warn("postgres refuses the user or the password", "err", err)
		}
		return []string{"postgres"}, []string{"postgres: " + err.Error()}, nil
	case errors.Is(err, context.DeadlineExceeded), sql.SQLState(err) == "55P03": // lock_timeout, which is as long
		remedies = []string{"postgres: no answer in time; posthaste doctor names what holds a lock"}
		return []string{"postgres"}, remedies, nil
	default:
		return []string{"postgres"}, nil, nil
	}
}

// checkConnection connects as orders do, if they have no connection. The probe may have one that could not be made now:
// the password was changed, or the limit of connections is reached.
func (s *Server) checkConnection(ctx context.Context) error {
	if st := s.o.Pool.Stat(); st.AcquiredConns()+st.IdleConns() > 0 {
		return nil
	}
	c, err := sql.Connect(ctx, s.o.Pool.Config().ConnConfig)
	if err == nil {
		err = c.Close(ctx)
	}
	return err
}

func (s *Server) redisTrouble(ctx context.Context) (degraded, remedies []string) {
	if s.o.Redis == nil {
		return []string{"redis"}, nil
	}
	silent := idem.Unreachable(ctx, s.o.Redis)
	if len(silent) > 0 {
		if err := s.o.Redis.Ping(ctx).Err(); redisurl.LoginRefused(err) {
			remedies = []string{"redis: " + redisurl.WithAuthRemedy(err).Error()}
		}
		if silent[0] == "" {
			return []string{"redis"}, remedies
		}
		return []string{"redis: no answer from node " + strings.Join(silent, ", ")}, remedies
	}
	if policy := s.checkEviction(ctx); policy != "" && policy != evictionSafe {
		return []string{"redis_eviction"}, nil
	}
	// A server that answers PING may refuse scripts: memory is full, it is a replica, or rights are missing.
	if err := s.guard.Check(ctx); err != nil {
		return []string{"guard: " + err.Error()}, nil
	}
	if s.guard.Short() {
		return []string{"guard_memory"}, nil
	}
	return nil, nil
}

const evictionSafe = "noeviction"

// checkEviction returns Redis' eviction policy and logs once that it is unsafe. It returns "" if the policy is unknown.
func (s *Server) checkEviction(ctx context.Context) string {
	policy, err := idem.EvictionPolicy(ctx, s.o.Redis)
	if err != nil {
		return ""
	}
	if old := s.eviction.Swap(&policy); old == nil || *old != policy {
		if policy == evictionSafe {
			s.metrics.eviction.Set(0)
			s.log.Info("redis keeps every key", "maxmemory_policy", policy)
		} else {
			s.metrics.eviction.Set(1)
			s.log.Warn("redis may evict keys when its memory is full", "maxmemory_policy", policy)
		}
	}
	return policy
}

// Readyz returns the handler of /readyz on the admin listener: 503 with reasons while no order can be taken, otherwise
// 200 with the degradations. Concurrent requests share a check.
func (s *Server) Readyz() http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		state, err := s.ready.Get(r.Context())
		if err != nil {
			return // the client is gone
		}
		w.Header().Set("Content-Type", "application/json")
		w.Header().Set("Cache-Control", "no-store")
		if len(state.Reasons) > 0 {
			w.WriteHeader(http.StatusServiceUnavailable)
		}
		_, _ = w.Write(marshal(state))
	})
}
