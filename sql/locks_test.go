package sql_test

import (
	"errors"
	"fmt"
	"log/slog"
	"os"
	"strings"
	"testing"
	"time"

	"posthaste/internal/lab/testenv"
	"posthaste/outbox"
	"posthaste/sql"
)

// notYet is for calls that are repeated until they succeed.
func notYet(ok bool, err error) error { return testenv.FailIf(err != nil || !ok, "%v: %w", ok, err) }

func queryText(tb testing.TB, name string) string {
	tb.Helper()
	b, err := os.ReadFile("queries/" + name + ".sql")
	must(tb, err)
	return string(b)
}

func session(tb testing.TB, url string) outbox.LockSession {
	tb.Helper()
	s, err := sql.NewLocks(url, "public", testenv.Logger(tb)).Open(tb.Context())
	must(tb, err)
	tb.Cleanup(s.Close)
	return s
}

func TestLocksBetweenSessions(t *testing.T) {
	t.Parallel()
	d := testenv.Postgres(t)
	a, b := session(t, d.URL), session(t, d.URL)
	ctx := t.Context()
	is(t, true)(a.TryLead(ctx))  // a leads
	is(t, false)(b.TryLead(ctx)) // b leads too

	is(t, true)(a.TryPipe(ctx, true))   // a alone
	is(t, false)(b.TryPipe(ctx, false)) // b beside it
	is(t, true)(a.TryPipe(ctx, false))  // a shares its own
	must(t, a.DropPipe(ctx, true))
	is(t, true)(b.TryPipe(ctx, false)) // b beside the shared one
	is(t, false)(a.TryPipe(ctx, true)) // a alone again
	must(t, b.DropPipe(ctx, false))
	is(t, true)(a.TryPipe(ctx, true)) // a alone, while it shares
	must(t, a.DropPipe(ctx, false))
	is(t, false)(b.TryPipe(ctx, false)) // b beside it
	must(t, a.DropPipe(ctx, true))
	is(t, true)(b.TryPipe(ctx, true)) // b alone

	a.Close()
	testenv.Eventually(t, 20*time.Second, func() error {
		return notYet(b.TryLead(ctx))
	})
	a.Close() // idempotent
	d.Exec(t, "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = current_database() AND "+
		"application_name = 'posthaste locks'")
	testenv.Eventually(t, 20*time.Second, func() error {
		select {
		case <-b.Lost():
			return nil
		default:
			return errors.New("the session is not known to be lost")
		}
	})
	if ok, err := b.TryLead(ctx); err == nil || ok {
		t.Errorf("a lost session leads: %v, %v", ok, err)
	}
}

// The network drops all packets. The holder notices before the server gives the lock to another session.
func TestASilentSessionLosesItsLease(t *testing.T) {
	t.Parallel()
	d := testenv.Postgres(t)
	cfg := d.Pool.Config().ConnConfig
	proxy := testenv.NewLink(t, fmt.Sprintf("%s:%d", cfg.Host, cfg.Port))
	holder := session(t, strings.Replace(d.URL, fmt.Sprintf("%s:%d", cfg.Host, cfg.Port), proxy.Addr(), 1))
	other := session(t, d.URL)
	is(t, true)(holder.TryLead(t.Context()))
	proxy.Set(testenv.Trouble{LoseRequests: true, LoseReplies: true})
	known := make(chan time.Time, 1)
	go func() { <-holder.Lost(); known <- time.Now() }()
	start := time.Now()
	asked, still := start, time.Duration(0)
	testenv.Eventually(t, 20*time.Second, func() error {
		still, asked = max(still, time.Since(asked)), time.Now()
		return notYet(other.TryLead(t.Context()))
	})
	taken := time.Now()
	select {
	case at := <-known:
		t.Logf("known after %v, taken after %v", at.Sub(start), taken.Sub(start))
		// By its own clock the holder notices seconds earlier, not because the connection ends. If the machine was
		// suspended, both happen at once.
		if margin := taken.Sub(at); margin < time.Second && still < time.Second {
			t.Errorf("the holder knew %v before the lock was somebody else's, want seconds", margin)
		}
	case <-time.After(20 * time.Second):
		t.Error("the holder still believes that it leads")
	}
}

// No error quotes the password, however wrong the URL.
func TestNoErrorQuotesThePassword(t *testing.T) {
	t.Parallel()
	const secret = "s3cr3t"
	for _, url := range []string{
		"postgres://u:" + secret + "@host:port/db", "postgres://u:" + secret + "%zz@host/db",
		"postgres://u:" + secret + "@[::1/db", "postgres://u:" + secret + "@host/db?sslmode=maybe",
		"postgres://u:" + secret + "@host/db?connect_timeout=x", "postgres:/u:" + secret + "@host",
		"host=h password=" + secret + " port=x", "host=h password='" + secret, "password=" + secret + " x",
		"postgres://u:" + secret + "@host/db?password=" + secret + "&sslrootcert=/none&sslmode=verify-full",
		"postgres://u:" + secret + "@host/db?pool_max_conns=x", "u:" + secret + "@host/db",
		"postgres://u:p/" + secret + "@host/db", "postgres://u:" + secret + "@127.0.0.1:1/db",
		"postgres://u:x#" + secret + "@127.0.0.1:1/db",
	} {
		_, err := sql.ConnConfig(url, "public", "test")
		_, perr := sql.PoolConfig(url, "public", "test")
		_, lerr := sql.NewLocks(url, "public", nil).Open(t.Context())
		_, merr := sql.Migrate(t.Context(), url, "public", slog.New(slog.DiscardHandler))
		for step, err := range map[string]error{"conn": err, "pool": perr, "locks": lerr, "migrate": merr} {
			if strings.Contains(fmt.Sprintf("%v %+v", err, err), secret) {
				t.Errorf("%s: %v", step, err)
			}
		}
		if lerr == nil || merr == nil {
			t.Errorf("no error for %s", url)
		}
	}
}
