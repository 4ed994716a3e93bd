package api

import (
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/google/uuid"

	"posthaste/idem"
	"posthaste/internal/testenv"
)

const otherUser = "0b3c1f9e-8a57-4d0e-9d55-2f4a6b1c7e22"

func hashOf(key string) string {
	sum := sha256.Sum256([]byte(key))
	return hex.EncodeToString(sum[:])
}

func testKeys(tb testing.TB) *Keys {
	tb.Helper()
	k, err := ParseKeys(strings.NewReader(fmt.Sprintf("# keys\n\n%s %s\n%s %s\n  %s *\n",
		hashOf("alice-key"), testUser, hashOf("bob-key"), otherUser, strings.ToUpper(hashOf("robot-key")))))
	if err != nil {
		tb.Fatal(err)
	}
	return k
}

func TestKeysDecideWhoMayDoWhat(t *testing.T) {
	t.Parallel()
	w := newWorld(t, func(o *Options) { o.Keys = testKeys(t) })
	alice, bob, robot := []string{"Authorization", "Bearer alice-key"}, []string{"Authorization", "bearer bob-key"},
		[]string{"Authorization", "Bearer robot-key"}
	for _, h := range [][]string{
		nil,
		{"Authorization", "Bearer x"},
		{"Authorization", "Bearer"},
		{"Authorization", "Basic alice-key"},
		{"Authorization", "Bearer alice-key", "Authorization", "Bearer alice-key"},
		{"Authorization", "Bearer " + hashOf("alice-key")},
	} {
		r := w.post(newKey(), orderJSON(1), h...)
		want(t, r, 401, "unauthorized")
		if r.header.Get("Www-Authenticate") == "" {
			t.Error("no challenge")
		}
		want(t, w.do("GET", "/orders/"+uuid.NewString(), "", h...), 401, "unauthorized")
	}
	key := newKey()
	mine := w.post(key, `{"amount":1,"currency":"USD"}`, alice...)
	want(t, mine, 201, "")
	if got := mine.order(t).UserID.String(); got != testUser {
		t.Errorf("the order is %s's", got)
	}
	if r := w.post(key, orderJSON(1), alice...); r.body != mine.body {
		t.Errorf("named and implied user differ: %v", r)
	}
	want(t, w.post(newKey(), orderJSON(1), bob...), 403, "forbidden_user")
	want(t, w.post(newKey(), orderJSON(1), robot...), 201, "")
	want(t, w.post(newKey(), `{"amount":1,"currency":"USD"}`, robot...), 422, "validation_failed")
	path := mine.header.Get("Location")
	want(t, w.do("GET", path, "", alice...), 200, "")
	want(t, w.do("GET", path, "", robot...), 200, "")
	want(t, w.do("GET", path, "", bob...), 404, "not_found")
	want(t, w.do("GET", "/orders/by-key", "", append(alice, idem.KeyHeader, key)...), 200, "")
	want(t, w.do("GET", "/orders/by-key", "", append(bob, idem.KeyHeader, key)...), 404, "not_found")
	want(t, w.do("GET", "/orders/by-key?user_id="+testUser, "", append(bob, idem.KeyHeader, key)...), 403,
		"forbidden_user")
	want(t, w.do("GET", "/orders", "", alice...), 200, "")
	want(t, w.do("GET", "/orders?user_id="+testUser, "", bob...), 403, "forbidden_user")
	want(t, w.do("GET", "/orders", "", robot...), 400, "invalid_parameter")
	want(t, w.do("GET", "/.well-known/idempotency", ""), 200, "")
	w.checkInvariants(2)
}

func TestTheRateLimitIsPerKeyAndComesBeforeTheGuard(t *testing.T) {
	t.Parallel()
	w := newWorld(t, func(o *Options) { o.Keys, o.RateLimit = testKeys(t), 2 })
	key := newKey()
	begun, taken, limited := time.Now(), 0, 0
	for limited < 5 {
		r := w.post(key, `{"amount":1,"currency":"USD"}`, "Authorization", "Bearer alice-key")
		if r.status == 429 {
			limited++
			if r.header.Get("Retry-After") != "1" || r.code() != "rate_limited" {
				t.Errorf("%v %v", r, r.header)
			}
		} else {
			taken++
		}
		// Two at once, and two more with every second.
		if most := 2 + int(2*time.Since(begun).Seconds()) + 1; taken > most {
			t.Fatalf("%d requests were taken, want %d at most", taken, most)
		}
	}
	want(t, w.post(newKey(), `{"amount":1,"currency":"USD"}`, "Authorization", "Bearer bob-key"), 201, "")
	testenv.Eventually(t, 20*time.Second, func() error {
		if r := w.post(key, `{"amount":1,"currency":"USD"}`, "Authorization", "Bearer alice-key"); r.status != 201 {
			return fmt.Errorf("%v", r)
		}
		return nil
	})
}

func TestFilesOfKeys(t *testing.T) {
	t.Parallel()
	for text, want := range map[string]string{
		"":                                 "no keys",
		"# only a comment\n":               "no keys",
		"abc " + testUser:                  "line 1",
		"\n" + hashOf("x"):                 "line 2",
		hashOf("x") + " nobody":            "line 1",
		hashOf("x") + " " + testUser + "x": "line 1",
		hashOf("x") + " a b":               "line 1",
	} {
		_, err := ParseKeys(strings.NewReader(text))
		if err == nil || !strings.Contains(err.Error(), want) || strings.Contains(err.Error(), hashOf("x")) {
			t.Errorf("%q: %v, want %q", text, err, want)
		}
	}
	if _, err := LoadKeys("/nonexistent/keys"); err == nil {
		t.Error("a missing file was read")
	}
}

func TestResponsesCarrySecurityHeaders(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	for _, r := range []reply{w.post(newKey(), orderJSON(1)), w.do("GET", "/nowhere", ""), w.post("x", "")} {
		for name, want := range map[string]string{
			"X-Content-Type-Options": "nosniff", "X-Frame-Options": "DENY", "Referrer-Policy": "no-referrer",
			"Content-Security-Policy": "default-src 'none'; frame-ancestors 'none'",
		} {
			if got := r.header.Get(name); got != want {
				t.Errorf("%v: %s %q", r, name, got)
			}
		}
		if r.header.Get("X-Request-Id") == "" || !strings.Contains(r.header.Get("Access-Control-Expose-Headers"),
			"Idempotent-Replayed") {
			t.Errorf("headers %v", r.header)
		}
	}
}

// FuzzParseKeys: every key of a file that is taken stands in it, and errors quote nothing.
func FuzzParseKeys(f *testing.F) {
	for _, seed := range []string{
		"", "# c\n", hashOf("x") + " *", hashOf("x") + " " + testUser + "\r\n\n", strings.ToUpper(hashOf("x")) + "\t*",
		hashOf("x") + " * *", hashOf("x") + "00 *",
	} {
		f.Add(seed)
	}
	f.Fuzz(func(t *testing.T, text string) {
		k, err := ParseKeys(strings.NewReader(text))
		if err != nil {
			for field := range strings.FieldsSeq(text) {
				if len(field) > 40 && strings.Contains(err.Error(), field) {
					t.Fatalf("%q: %v", text, err)
				}
			}
			return
		}
		for _, key := range k.list {
			if !strings.Contains(strings.ToLower(text), hex.EncodeToString(key.hash[:])) {
				t.Fatalf("%q: %x", text, key.hash)
			}
		}
	})
}
