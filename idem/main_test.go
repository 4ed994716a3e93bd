package idem

import (
	"context"
	"os"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/redis/go-redis/v9/logging"

	"posthaste/internal/lab/testenv"
)

func TestMain(m *testing.M) {
	logging.Disable() // go-redis writes every failed dial to standard error
	os.Exit(testenv.Main(m))
}

// guardOn returns a patient guard on a server, through its own client.
func guardOn(tb testing.TB, url string, edit ...func(*Options)) *Guard {
	tb.Helper()
	return Patient(guardWith(tb, PatientClient, url, edit...))
}

// quickGuardOn returns one that is as quick to give up as it is in production.
func quickGuardOn(tb testing.TB, url string) *Guard {
	tb.Helper()
	return guardWith(tb, NewClient, url)
}

func guardWith(tb testing.TB, client func(url string) (redis.UniversalClient, error), url string,
	edit ...func(*Options),
) *Guard {
	tb.Helper()
	c, err := client(url)
	must(tb, err)
	tb.Cleanup(func() { _ = c.Close() })
	o := Options{Redis: c, Routes: []string{"/t"}}
	for _, f := range edit {
		f(&o)
	}
	return New(o)
}

func request(key string, cmd ...string) Request {
	return Request{Key: NewKey("u", "POST", "/t", key), Fingerprint: NewFingerprint(1, cmd...), Route: "/t"}
}

func begin(tb testing.TB, g *Guard, r Request) Decision {
	tb.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
	defer cancel()
	d, err := g.Begin(ctx, r)
	if err != nil {
		tb.Fatalf("begin: %v", err)
	}
	return d
}

func wantOutcome(tb testing.TB, d Decision, want Outcome) {
	tb.Helper()
	if d.Outcome != want {
		tb.Fatalf("outcome %d, want %d (%+v)", d.Outcome, want, d)
	}
}

// wantGuarded requires a ticket that is guarded by Redis, or one that is not.
func wantGuarded(tb testing.TB, d Decision, guarded bool) {
	tb.Helper()
	wantOutcome(tb, d, Proceed)
	testenv.Equal(tb, "the ticket is guarded", !d.Ticket.Degraded(), guarded)
}

// replays requires that a request is answered with a record.
func replays(tb testing.TB, g *Guard, r Request, want Record) {
	tb.Helper()
	d := begin(tb, g, r)
	wantOutcome(tb, d, Replay)
	testenv.Equal(tb, "the record", d.Record, want)
}

func rawRecord(tb testing.TB, c *redis.Client, k Key) string {
	tb.Helper()
	v, err := c.Get(tb.Context(), k.String()).Result()
	if err != nil && err != redis.Nil { //nolint:errorlint // never wrapped
		tb.Fatal(err)
	}
	return v
}

func hasPrefix(tb testing.TB, got, want string) {
	tb.Helper()
	if !strings.HasPrefix(got, want) {
		tb.Fatalf("got %q, want prefix %q", got, want)
	}
}

// calls returns how often the server ran a command.
func calls(tb testing.TB, r *testenv.RedisServer, command string) int {
	tb.Helper()
	info, err := r.Client.InfoMap(tb.Context(), "commandstats").Result()
	must(tb, err)
	var n int
	for _, section := range info {
		if s, ok := section["cmdstat_"+command]; ok {
			s, _, _ = strings.Cut(strings.TrimPrefix(s, "calls="), ",")
			n, _ = strconv.Atoi(s)
		}
	}
	return n
}

var must = testenv.Must
