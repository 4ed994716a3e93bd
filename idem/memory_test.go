package idem

import (
	"fmt"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/redis/go-redis/v9"

	"posthaste/internal/lab/testenv"
)

// bytesPerKey is the limit on what the record of a finished operation costs, its key and its expiry included.
const bytesPerKey = 260

func TestMemoryPerKey(t *testing.T) {
	t.Parallel()
	memoryPerKey(t, 30_000)
	// Records that hold a short response instead of pointing to it (the mutation).
	if each := bytesOf(t, 3_000, strings.Repeat("x", 180)); each <= bytesPerKey {
		t.Errorf("%d bytes a key with the response inside: this test would not notice it", each)
	}
}

func memoryPerKey(t *testing.T, n int) {
	t.Helper()
	each := bytesOf(t, n, strconv.FormatInt(1795210721781000, 36))
	fmt.Printf("guard: %d bytes a key over %d finished keys\n", each, n)
	if each > bytesPerKey {
		t.Errorf("%d bytes a key, want %d at most", each, bytesPerKey)
	}
}

// bytesOf returns what one of n finished records costs.
func bytesOf(t *testing.T, n int, payload string) int {
	t.Helper()
	r := testenv.Redis(t, "appendonly no")
	g := guardOn(t, r.URL())
	used := func() int {
		info, err := r.Client.Info(t.Context(), "memory").Result()
		must(t, err)
		_, v, _ := strings.Cut(info, "\r\nused_memory:")
		v, _, _ = strings.Cut(v, "\r\n")
		bytes, err := strconv.Atoi(v)
		must(t, err)
		return bytes
	}
	must(t, g.scripts[scriptPublish].Load(t.Context(), r.Client).Err())
	before := used()
	fp := NewFingerprint(1, "a").text()
	for from := 0; from < n; from += 1000 {
		_, err := r.Client.Pipelined(t.Context(), func(p redis.Pipeliner) error {
			for i := from; i < from+1000; i++ {
				g.scripts[scriptPublish].EvalSha(t.Context(), p, []string{NewKey(strconv.Itoa(i)).String()}, fp,
					"1795210721781000", "201", "01937c6e-5d0c-7c3a-9d1e-0f5a3c8b2e71", payload, TTL.Milliseconds())
			}
			return nil
		})
		must(t, err)
	}
	each := (used() - before) / n
	testenv.Equal(t, "keys", r.Client.DBSize(t.Context()).Val(), int64(n))
	return each
}

// While its server's memory is short, a finished record stays for a lease only, which leaves room for streams. A later
// repeat of the key is answered from the database, and the work is not done twice.
func TestFinishedRecordsLeaveRoom(t *testing.T) {
	t.Parallel()
	r := testenv.Redis(t, "appendonly no")
	reg := prometheus.NewRegistry()
	g := guardOn(t, r.URL(), func(o *Options) { o.Registerer = reg })
	stays := func(key string) time.Duration {
		t.Helper()
		d := begin(t, g, request(key, "a"))
		wantOutcome(t, d, Proceed)
		d.Ticket.Commit(t.Context(), Record{Status: 201, Ref: key})
		return r.Client.PTTL(t.Context(), request(key).Key.String()).Val()
	}
	r.Client.Set(t.Context(), "filling", strings.Repeat("x", 20<<20), 0) // connections take little in addition
	limit := func(share float64) {
		t.Helper()
		used := r.Client.InfoMap(t.Context(), "memory").Item("Memory", "used_memory")
		bytes, err := strconv.ParseFloat(used, 64)
		must(t, err)
		r.Client.ConfigSet(t.Context(), "maxmemory", strconv.Itoa(int(bytes/share)))
	}
	limit(0.9)
	g.memory.looked.Store(time.Now().Add(time.Hour).UnixNano()) // this machine's clock was set back since
	// The first publication checks the memory itself.
	if d := stays("short"); d <= 0 || d > g.lease || !g.Short() {
		t.Errorf("with 90%% of its memory in use it stays %v, want %v", d, g.lease)
	}
	if d := begin(t, guardOn(t, r.URL()), request("short", "a")); d.Outcome != Replay || d.Record.Ref != "short" {
		t.Errorf("repeated at once: %+v", d)
	}
	limit(0.2)
	must(t, g.Check(t.Context()))
	if d := stays("enough"); d <= TTL-time.Minute {
		t.Errorf("with memory to spare it stays %v, want %v", d, TTL)
	}
	r.Client.ConfigSet(t.Context(), "maxmemory", "0")
	if err := g.Check(t.Context()); err != nil || g.Short() {
		t.Errorf("without a limit: short %v, %v", g.Short(), err)
	}
}
