package api

import (
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/uuid"

	"posthaste/idem"
	"posthaste/internal/lab/testenv"
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
	must(tb, err)
	return k
}

func TestKeysDecideWhoMayDoWhat(t *testing.T) {
	t.Parallel()
	w := newWorld(t, func(o *Options) {
		o.Keys = testKeys(t)
		// An older version may have written the hash of the empty key into the file. It admits nobody.
		(*o.Keys.set.Load())[sha256.Sum256(nil)] = &apiKey{who: principal{any: true}}
	})
	alice, bob, robot := []string{"Authorization", "Bearer alice-key"}, []string{"Authorization", "bearer bob-key"},
		[]string{"Authorization", "Bearer robot-key"}
	for _, h := range [][]string{
		nil,
		{"Authorization", "Bearer x"},
		{"Authorization", ""},
		{"Authorization", "Bearer"},
		{"Authorization", "Bearer 	 "},
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
		minting := w.do("POST", "/add/"+testUser, `{"amount":1}`, append(h, idem.KeyHeader, newKey())...)
		want(t, minting, 401, "unauthorized")
	}
	key := newKey()
	mine := w.post(key, `{"amount":1,"currency":"USD"}`, alice...)
	want(t, mine, 201, "")
	testenv.Equal(t, "the user of the order", mine.order(t).UserID.String(), testUser)
	w.post(key, orderJSON(1), alice...).same(t, "a named user instead of an implied one", mine)
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
	const body = `{"amount":1,"currency":"USD"}`
	key := newKey()
	begun, taken, limited := time.Now(), 0, 0
	for limited < 5 {
		r := w.post(key, body, "Authorization", "Bearer alice-key")
		if r.status == 429 {
			limited++
			if r.header.Get("Retry-After") != "1" || r.code() != "rate_limited" {
				t.Errorf("%v %v", r, r.header)
			}
		} else {
			taken++
		}
		// The limit is two at once, and two more a second.
		if most := 2 + int(2*time.Since(begun).Seconds()) + 1; taken > most {
			t.Fatalf("%d requests were taken, want %d at most", taken, most)
		}
	}
	want(t, w.post(newKey(), body, "Authorization", "Bearer bob-key"), 201, "")
	again := func() int { return w.post(key, body, "Authorization", "Bearer alice-key").status }
	testenv.Becomes(t, "status", 201, again)
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
		hashOf("") + " *":                  "hash of an empty key",
		hashOf("x") + " * name=":           "a name has",
		hashOf("x") + " * name=" + strings.Repeat("n", 65): "a name has",
		hashOf("x") + " * scopes=":                         "the scopes are",
		hashOf("x") + " * scopes=all":                      "the scopes are",
		hashOf("x") + " * expires=soon":                    "neither a date",
		hashOf("x") + " * more=1":                          "there may be",
		hashOf("x") + " * name=a name=b":                   "twice",
		hashOf("x") + " " + testUser + " scopes=mint":      "only a key for any user",
		hashOf("x") + " *\n" + hashOf("x") + " *":          "line 2: the key has a line already",
	} {
		_, err := ParseKeys(strings.NewReader(text))
		if err == nil || !strings.Contains(err.Error(), want) || strings.Contains(err.Error(), hashOf("x")) {
			t.Errorf("%q: %v, want %q", text, err, want)
		}
	}
	_, err := LoadKeys("/nonexistent/keys")
	testenv.ErrorSays(t, "a missing file", err, "/nonexistent/keys")
}

// allowed returns the statuses of requests for the test's user with a bearer token: to read orders, place one, pay one,
// deduct, read the balance, and add credits. Without a bank the credit routes answer 503 to callers with the scope.
func (w *world) allowed(token string) [6]int {
	w.tb.Helper()
	auth := []string{"Authorization", "Bearer " + token}
	keyed := func() []string { return append([]string{idem.KeyHeader, newKey()}, auth...) }
	return [6]int{
		w.do("GET", "/orders?user_id="+testUser, "", auth...).status,
		w.post(newKey(), orderJSON(1), auth...).status,
		w.post(newKey(), paidJSON(testUser, 1), auth...).status,
		w.do("POST", "/deduct/"+testUser, `{"amount":1}`, keyed()...).status,
		w.do("GET", "/balance/"+testUser, "", auth...).status,
		w.do("POST", "/add/"+testUser, `{"amount":1}`, keyed()...).status,
	}
}

func TestScopesAndExpiry(t *testing.T) {
	t.Parallel()
	keys, err := ParseKeys(strings.NewReader(hashOf("reads") + " " + testUser + " name=dash scopes=read\n" +
		hashOf("orders") + " " + testUser + " scopes=order expires=2999-01-01\n" +
		hashOf("spends") + " " + testUser + " scopes=order,credit\n" +
		hashOf("mints") + " * scopes=mint\n" + hashOf("robot") + " * scopes=read,order,credit\n" +
		hashOf("user") + " " + testUser + "\n" + hashOf("any") + " * expires=2999-01-01T00:00:00Z\n" +
		hashOf("old") + " * expires=2020-01-01\n"))
	must(t, err)
	w := newWorld(t, func(o *Options) { o.Keys = keys })
	for key, want := range map[string][6]int{
		//       GET, order, paid, deduct, balance, add
		"reads":  {200, 403, 403, 403, 503, 403},
		"orders": {403, 201, 403, 403, 403, 403},
		"spends": {403, 201, 503, 503, 403, 403},
		"mints":  {403, 403, 403, 403, 403, 503},
		"robot":  {200, 201, 503, 503, 503, 403},
		"user":   {200, 201, 503, 503, 503, 403},
		"any":    {200, 201, 503, 503, 503, 503},
		"old":    {401, 401, 401, 401, 401, 401},
	} {
		testenv.Equal(t, key, w.allowed(key), want)
	}
}

// Keys follow changes of the file. An invalid file changes nothing.
func TestKeysFollowTheirFile(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), "keys")
	write := func(mode os.FileMode, text string) {
		t.Helper()
		must(t, errors.Join(os.WriteFile(path, []byte(text), 0o600), os.Chmod(path, mode)))
	}
	write(0o602, hashOf("first")+" *\n")
	_, err := LoadKeys(path)
	testenv.ErrorSays(t, "a file that anybody may write", err, "writable by all users")
	write(0o644, hashOf("first")+" *\n")
	keys, err := LoadKeys(path)
	must(t, err)
	w := newWorld(t, func(o *Options) { o.Keys = keys })
	stop := testenv.Background(t, w.s.Run)
	t.Cleanup(func() { testenv.ErrorIs(t, "Run", stop(), nil) })
	status := func(key string) int {
		return w.do("GET", "/orders?user_id="+testUser, "", "Authorization", "Bearer "+key).status
	}
	becomes := func(key string, want int) {
		t.Helper()
		testenv.Becomes(t, key, want, func() int { return status(key) })
	}
	becomes("first", 200)
	write(0o600, hashOf("second")+" *\n"+hashOf("third")+" *\n")
	becomes("second", 200)
	becomes("first", 401)
	write(0o600, "nonsense\n")
	testenv.ErrorSays(t, "nonsense", keys.Reload(), "")
	testenv.Equal(t, "a file that was not taken", status("third"), 200)
	write(0o600, hashOf("fourth")+" *\n")
	becomes("fourth", 200)
}

func TestResponsesCarrySecurityHeaders(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	for _, r := range []reply{w.post(newKey(), orderJSON(1)), w.do("GET", "/nowhere", ""), w.post("x", "")} {
		for name, want := range map[string]string{
			"X-Content-Type-Options": "nosniff", "X-Frame-Options": "DENY", "Referrer-Policy": "no-referrer",
			"Content-Security-Policy": "default-src 'none'; frame-ancestors 'none'",
		} {
			r.has(t, name, want)
		}
		if r.header.Get("X-Request-Id") == "" || !strings.Contains(r.header.Get("Access-Control-Expose-Headers"),
			"Idempotent-Replayed") {
			t.Errorf("headers %v", r.header)
		}
	}
}

// FuzzParseKeys: every accepted key is in the file, and errors quote nothing.
func FuzzParseKeys(f *testing.F) {
	for _, seed := range []string{
		"", "# c\n", hashOf("x") + " *", hashOf("x") + " " + testUser + "\r\n\n", strings.ToUpper(hashOf("x")) + "\t*",
		hashOf("x") + " * *", hashOf("x") + "00 *", hashOf("") + " *",
		hashOf("x") + " * scopes=read,mint name=a expires=2030-01-01",
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
		for hash, key := range *k.set.Load() {
			if !strings.Contains(strings.ToLower(text), hex.EncodeToString(hash[:])) || hash == sha256.Sum256(nil) ||
				!key.who.any && slices.Contains(key.who.scopes, ScopeMint) {
				t.Fatalf("%q: %x %+v", text, hash, key)
			}
		}
	})
}
