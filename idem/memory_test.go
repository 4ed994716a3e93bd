package idem

import (
	"fmt"
	"strconv"
	"strings"
	"testing"

	"github.com/redis/go-redis/v9"

	"posthaste/internal/testenv"
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
		if err != nil {
			t.Fatal(err)
		}
		_, v, _ := strings.Cut(info, "\r\nused_memory:")
		v, _, _ = strings.Cut(v, "\r\n")
		bytes, err := strconv.Atoi(v)
		if err != nil {
			t.Fatal(err)
		}
		return bytes
	}
	if err := g.scripts[scriptPublish].Load(t.Context(), r.Client).Err(); err != nil {
		t.Fatal(err)
	}
	before := used()
	fp := NewFingerprint(1, "a").text()
	for from := 0; from < n; from += 1000 {
		_, err := r.Client.Pipelined(t.Context(), func(p redis.Pipeliner) error {
			for i := from; i < from+1000; i++ {
				g.scripts[scriptPublish].EvalSha(t.Context(), p, []string{NewKey(strconv.Itoa(i)).String()}, fp,
					"1795210721781000", "201", "01937c6e-5d0c-7c3a-9d1e-0f5a3c8b2e71", payload, g.ttl.Milliseconds())
			}
			return nil
		})
		if err != nil {
			t.Fatal(err)
		}
	}
	each := (used() - before) / n
	if got := r.Client.DBSize(t.Context()).Val(); got != int64(n) {
		t.Errorf("%d keys, want %d", got, n)
	}
	return each
}
