package api

import (
	"bytes"
	"context"
	"crypto"
	"crypto/ecdsa"
	"crypto/ed25519"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/rsa"
	"crypto/tls"
	"crypto/x509"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/go-jose/go-jose/v4"
	"github.com/go-jose/go-jose/v4/jwt"
	"github.com/google/uuid"

	"posthaste/idem"
	"posthaste/internal/lab/testenv"
)

const testIssuer, testAudience = "https://issuer.example/", "posthaste"

// Keys take long to generate, and the tests can share them.
var (
	rsaKey   = sync.OnceValue(func() *rsa.PrivateKey { return need(rsa.GenerateKey(rand.Reader, 2048)) })
	weakKey  = sync.OnceValue(func() *rsa.PrivateKey { return need(rsa.GenerateKey(rand.Reader, 1024)) })
	otherKey = sync.OnceValue(newECKey)
)

func need[T any](v T, err error) T {
	if err != nil {
		panic(err)
	}
	return v
}

func newECKey() *ecdsa.PrivateKey { return need(ecdsa.GenerateKey(elliptic.P256(), rand.Reader)) }

func pub(kid string, key crypto.PublicKey) jose.JSONWebKey {
	return jose.JSONWebKey{Key: key, KeyID: kid}
}

type issuer struct {
	mu   sync.Mutex
	keys []jose.JSONWebKey
	// answer, if not nil, replaces the keys.
	answer http.HandlerFunc
	served atomic.Int64
}

func (i *issuer) publish(keys ...jose.JSONWebKey) {
	i.mu.Lock()
	defer i.mu.Unlock()
	i.keys, i.answer = keys, nil
}

func (i *issuer) answers(h http.HandlerFunc) {
	i.mu.Lock()
	defer i.mu.Unlock()
	i.answer = h
}

func (i *issuer) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	i.served.Add(1)
	i.mu.Lock()
	text, answer := need(json.Marshal(jose.JSONWebKeySet{Keys: i.keys})), i.answer
	i.mu.Unlock()
	if answer != nil {
		answer(w, r)
		return
	}
	_, _ = w.Write(text)
}

// RoundTrip answers without a network.
func (i *issuer) RoundTrip(r *http.Request) (*http.Response, error) {
	w := httptest.NewRecorder()
	i.ServeHTTP(w, r)
	if err := r.Context().Err(); err != nil {
		return nil, err
	}
	return w.Result(), nil
}

// claims are those of a token that is valid for the test's user and all scopes. edit changes them.
func claims(edit ...func(map[string]any)) map[string]any {
	now := time.Now().Unix()
	c := map[string]any{
		"iss": testIssuer, "aud": []string{"other", testAudience}, "sub": testUser, "iat": now, "exp": now + 300,
		"scope": "openid read order credit mint", "client_id": "shop",
	}
	for _, f := range edit {
		f(c)
	}
	return c
}

func with(name string, value any) func(map[string]any) {
	return func(c map[string]any) { c[name] = value }
}

func sign(alg jose.SignatureAlgorithm, key any, kid string, claims map[string]any) string {
	o := (&jose.SignerOptions{}).WithType("at+jwt")
	if kid != "" {
		o = o.WithHeader("kid", kid)
	}
	s := need(jose.NewSigner(jose.SigningKey{Algorithm: alg, Key: key}, o))
	return need(jwt.Signed(s).Claims(claims).Serialize())
}

// newTokens returns Tokens with the key set at place.
func newTokens(tb testing.TB, place string) *Tokens {
	tb.Helper()
	t, err := NewTokens(TokenOptions{
		Issuer: testIssuer, Audience: testAudience, JWKS: place, UserClaim: "sub", ScopeClaim: "scope",
	})
	must(tb, err)
	return t
}

// inBubble runs a test on a clock of its own, with an issuer that publishes the key "k", and tokens that are refreshed
// from there without a network.
func inBubble(t *testing.T, f func(t *testing.T, from *issuer, tokens *Tokens, ec *ecdsa.PrivateKey)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		from, ec := &issuer{}, newECKey()
		from.publish(pub("k", &ec.PublicKey))
		f(t, from, from.tokens(t), ec)
	})
}

// tokens returns Tokens that are refreshed from an issuer in a bubble, and have asked it once.
func (i *issuer) tokens(t *testing.T) *Tokens {
	t.Helper()
	tokens := newTokens(t, "https://issuer.example/keys")
	tokens.keys.client.Transport = i
	keep(t, tokens)
	synctest.Wait()
	return tokens
}

// issuedWith returns Tokens of an issuer that publishes keys, without refreshes.
func issuedWith(tb testing.TB, keys ...jose.JSONWebKey) *Tokens {
	tb.Helper()
	t := newTokens(tb, "https://issuer.example/keys")
	text := need(json.Marshal(jose.JSONWebKeySet{Keys: keys}))
	if _, err := t.keys.take(bytes.NewReader(text), time.Now()); err != nil {
		tb.Fatal(err)
	}
	t.keys.failing.Store(false)
	return t
}

// keep runs the refreshes until the test ends.
func keep(tb testing.TB, t *Tokens) {
	ctx, cancel := context.WithCancel(context.Background())
	var running sync.WaitGroup
	running.Go(func() { t.keys.run(ctx, testenv.Logger(tb)) })
	tb.Cleanup(func() { cancel(); running.Wait() })
}

func TestTokensThatAreNotValid(t *testing.T) {
	t.Parallel()
	ec, ed := newECKey(), need2(ed25519.GenerateKey(rand.Reader))
	encrypts := pub("enc", &ec.PublicKey)
	encrypts.Use = "enc"
	pss := pub("pss", &rsaKey().PublicKey)
	pss.Algorithm = "PS256"
	tokens := issuedWith(t, pub("rsa", &rsaKey().PublicKey), pub("ec", &ec.PublicKey), pub("ed", ed.Public()),
		pub("weak", &weakKey().PublicKey), encrypts, pss)
	der := need(x509.MarshalPKIXPublicKey(&rsaKey().PublicKey))
	now := time.Now().Unix()
	good := sign("ES256", ec, "ec", claims())
	part := strings.Split(good, ".")
	others := strings.Split(sign("ES256", otherKey(), "ec", claims(with("sub", otherUser))), ".")
	header := func(h string) string {
		return base64.RawURLEncoding.EncodeToString([]byte(h)) + "." + part[1] + "."
	}
	const unknown, kind = "not one of its issuer's", "known kind"
	for name, c := range map[string]struct{ token, detail string }{
		"RS256":             {sign("RS256", rsaKey(), "rsa", claims()), ""},
		"PS512":             {sign("PS512", rsaKey(), "rsa", claims()), ""},
		"PS256":             {sign("PS256", rsaKey(), "pss", claims()), ""},
		"ES256":             {good, ""},
		"EdDSA":             {sign("EdDSA", ed, "ed", claims()), ""},
		"audience alone":    {sign("ES256", ec, "ec", claims(with("aud", testAudience))), ""},
		"expired just now":  {sign("ES256", ec, "ec", claims(with("exp", now-5))), ""},
		"valid in a moment": {sign("ES256", ec, "ec", claims(with("nbf", now+30), with("iat", now+30))), ""},
		"expired":           {sign("ES256", ec, "ec", claims(with("exp", now-90))), "has expired"},
		"for ever":          {sign("ES256", ec, "ec", claims(with("exp", nil))), "never does"},
		"not yet":           {sign("ES256", ec, "ec", claims(with("nbf", now+120))), "not valid yet"},
		"from the future":   {sign("ES256", ec, "ec", claims(with("iat", now+120))), "not valid yet"},
		"other issuer":      {sign("ES256", ec, "ec", claims(with("iss", testIssuer+"x"))), "another issuer"},
		"issuer's prefix":   {sign("ES256", ec, "ec", claims(with("iss", "https://issuer.example"))), "another issuer"},
		"no issuer":         {sign("ES256", ec, "ec", claims(with("iss", nil))), "another issuer"},
		"other audience":    {sign("ES256", ec, "ec", claims(with("aud", "posthaste2"))), "another audience"},
		"no audience":       {sign("ES256", ec, "ec", claims(with("aud", []string{}))), "another audience"},
		"null audience":     {sign("ES256", ec, "ec", claims(with("aud", nil))), "form"},
		"no user":           {sign("ES256", ec, "ec", claims(with("sub", "alice"))), "names no user"},
		"user of no text":   {sign("ES256", ec, "ec", claims(with("sub", nil))), "names no user"},
		"user nobody":       {sign("ES256", ec, "ec", claims(with("sub", uuid.Nil.String()))), "names no user"},
		"other user form":   {sign("ES256", ec, "ec", claims(with("sub", "{"+testUser+"}"))), "names no user"},
		"unknown key":       {sign("ES256", ec, "new", claims(with("iat", now-120))), unknown},
		"key of another":    {sign("ES256", otherKey(), "ec", claims()), "signature"},
		"no key":            {sign("ES256", ec, "", claims()), "names no key"},
		"key to encrypt":    {sign("ES256", ec, "enc", claims(with("iat", now-120))), unknown},
		"weak key":          {sign("RS256", weakKey(), "weak", claims(with("iat", now-120))), unknown},
		"key's other alg":   {sign("RS256", rsaKey(), "pss", claims(with("iat", now-120))), unknown},
		"other kind of key": {sign("ES256", ec, "rsa", claims()), "signature"},
		"HMAC of the key":   {sign("HS256", der, "rsa", claims()), "known kind"},
		"HMAC of its id":    {sign("HS256", []byte(strings.Repeat("rsa", 11)), "rsa", claims()), "known kind"},
		"alg none":          {header(`{"alg":"none","kid":"ec"}`), "known kind"},
		"alg None":          {header(`{"alg":"None","kid":"ec"}`) + part[2], kind},
		"no alg":            {header(`{"kid":"ec"}`) + part[2], kind},
		"own key in header": {header(`{"alg":"ES256","kid":"ec","jwk":{"kty":"oct","k":"eA"}}`) + part[2], kind},
		"critical header":   {header(`{"alg":"ES256","kid":"ec","crit":["x"],"x":1}`) + part[2], "signature"},
		"no signature":      {part[0] + "." + part[1] + ".", "signature"},
		"other claims":      {part[0] + "." + others[1] + "." + part[2], "signature"},
		"two parts":         {part[0] + "." + part[1], "known kind"},
		"five parts":        {good + ".e30.e30", "known kind"},
		"JSON":              {`{"payload":"` + part[1] + `"}`, "known kind"},
	} {
		t.Run(name, func(t *testing.T) {
			from, p := tokens.caller(t.Context(), c.token)
			switch {
			case c.detail == "" && p != nil:
				t.Errorf("refused: %q", p.detail)
			case c.detail == "" && (from.who.user.String() != testUser || from.name != "shop"):
				t.Errorf("the caller is %+v", from)
			case c.detail != "" && (p == nil || p.kind != kindUnauthorized || !strings.Contains(p.detail, c.detail)):
				t.Errorf("%+v, want 401 that says %q", p, c.detail)
			}
		})
	}
	if _, p := tokens.caller(t.Context(), ""); p == nil || p.kind != kindUnauthorized {
		t.Errorf("no token: %+v", p)
	}
}

func need2[A, B any](_ A, b B, err error) B { return need(b, err) }

func TestScopesOfTokens(t *testing.T) {
	t.Parallel()
	ec := newECKey()
	tokens := issuedWith(t, pub("k", &ec.PublicKey))
	w := newWorld(t, func(o *Options) { o.Tokens = tokens })
	service := with("sub", "service")
	for name, c := range map[string]struct {
		claims map[string]any
		want   [6]int
	}{
		//                                                       GET, order, paid, deduct, balance, add
		"no claim":    {claims(with("scope", nil)), [6]int{403, 403, 403, 403, 403, 403}},
		"empty":       {claims(with("scope", "")), [6]int{403, 403, 403, 403, 403, 403}},
		"unknown":     {claims(with("scope", "READ reads posthaste:read *")), [6]int{403, 403, 403, 403, 403, 403}},
		"number":      {claims(with("scope", 7)), [6]int{403, 403, 403, 403, 403, 403}},
		"text":        {claims(with("scope", "openid read")), [6]int{200, 403, 403, 403, 503, 403}},
		"list":        {claims(with("scope", []any{"order", 7, "x"})), [6]int{403, 201, 403, 403, 403, 403}},
		"item":        {claims(with("scope", []any{"order credit"})), [6]int{403, 403, 403, 403, 403, 403}},
		"spends":      {claims(with("scope", "order credit")), [6]int{403, 201, 503, 503, 403, 403}},
		"user mints":  {claims(with("scope", "read mint")), [6]int{200, 403, 403, 403, 503, 403}},
		"any alone":   {claims(service, with("scope", "any_user")), [6]int{403, 403, 403, 403, 403, 403}},
		"any, orders": {claims(service, with("scope", "any_user order")), [6]int{403, 201, 403, 403, 403, 403}},
		"any mints":   {claims(service, with("scope", "any_user mint")), [6]int{403, 403, 403, 403, 403, 503}},
		"other user": {
			claims(with("sub", otherUser), with("scope", "read order credit")),
			[6]int{403, 403, 403, 403, 403, 403},
		},
	} {
		testenv.Equal(t, name, w.allowed(sign("ES256", ec, "k", c.claims)), c.want)
	}
}

// A 401 describes the fault as RFC 6750 requires, and quotes nothing of the token.
func TestChallenges(t *testing.T) {
	t.Parallel()
	ec := newECKey()
	w := newWorld(t, func(o *Options) { o.Tokens = issuedWith(t, pub("k", &ec.PublicKey)) })
	const realm = `Bearer realm="posthaste"`
	none := w.do("GET", "/orders", "")
	want(t, none, 401, "unauthorized")
	none.has(t, "Www-Authenticate", realm)
	const marker = "d0not-repeat-me"
	for _, token := range []string{
		marker, sign("ES256", ec, "k", claims(with("iss", marker))),
		sign("ES256", ec, "k", claims(with("sub", marker))),
		sign("ES256", ec, marker, claims(with("iat", 1))), sign("ES256", ec, "k", claims(with("aud", marker))),
	} {
		r := w.do("GET", "/orders", "", "Authorization", "Bearer "+token)
		want(t, r, 401, "unauthorized")
		got := r.header.Get("Www-Authenticate")
		if got != realm+`, error="invalid_token"` || strings.Contains(r.body, marker) {
			t.Errorf("%q, %v", got, r)
		}
	}
}

// A user's keys and tokens mean the same user, so an order is placed once with either. No token reaches another user's
// orders.
func TestAKeyAndATokenAreOneUser(t *testing.T) {
	t.Parallel()
	ec := newECKey()
	w := newWorld(t, func(o *Options) { o.Keys = testKeys(t) })
	v := w.sibling(func(o *Options) { o.Tokens = issuedWith(t, pub("k", &ec.PublicKey)) })
	bearer := func(edit ...func(map[string]any)) []string {
		return []string{"Authorization", "Bearer " + sign("ES256", ec, "k", claims(edit...))}
	}
	const body = `{"amount":1,"currency":"USD"}`
	key := newKey()
	first := w.post(key, body, "Authorization", "Bearer alice-key")
	want(t, first, 201, "")
	path := first.header.Get("Location")
	for name, auth := range map[string][]string{
		"token":          bearer(),
		"capitals":       bearer(with("sub", strings.ToUpper(testUser))),
		"another client": bearer(with("client_id", "app")),
	} {
		v.post(key, body, auth...).same(t, name, first)
		want(t, v.do("GET", path, "", auth...), 200, "")
	}
	service := bearer(with("sub", "service"), with("scope", "any_user read order"))
	v.post(key, orderJSON(1), service...).same(t, "a service for the user", first)
	other := bearer(with("sub", otherUser))
	want(t, v.do("GET", path, "", other...), 404, "not_found")
	want(t, v.do("GET", "/orders?user_id="+testUser, "", other...), 403, "forbidden_user")
	want(t, v.do("GET", "/orders/by-key", "", append(other, idem.KeyHeader, key)...), 404, "not_found")
	want(t, v.post(newKey(), orderJSON(1), other...), 403, "forbidden_user")
	if r := v.post(key, body, other...); r.status != 201 || r.body == first.body {
		t.Errorf("the key of another user: %v", r)
	}
	w.checkInvariants(2)
}

// Limits are per user, whatever clients and tokens the user has, and per service that may act for any user.
func TestTheRateLimitOfTokensIsPerUser(t *testing.T) {
	t.Parallel()
	ec := newECKey()
	tokens := issuedWith(t, pub("k", &ec.PublicKey))
	limit := func(edit ...func(map[string]any)) [32]byte {
		t.Helper()
		from, p := tokens.caller(t.Context(), sign("ES256", ec, "k", claims(edit...)))
		if p != nil {
			t.Fatal(p.detail)
		}
		return from.limit
	}
	user, service := limit(), limit(with("scope", "any_user"))
	for name, same := range map[string]bool{
		"another token":    user == limit(with("jti", "2"), with("client_id", "app"), with("scope", "")),
		"other users":      user != limit(with("sub", otherUser)),
		"user and service": user != service,
		"services":         service != limit(with("scope", "any_user"), with("sub", otherUser)),
		"one service":      service == limit(with("scope", []any{"any_user", "read"})),
	} {
		if !same {
			t.Error(name)
		}
	}
}

// Clients use a new key as soon as it is published, and old keys are removed. No valid token is refused.
func TestKeysRotateUnderLoad(t *testing.T) {
	t.Parallel()
	from := &issuer{}
	server := httptest.NewServer(from)
	t.Cleanup(server.Close)
	tokens := newTokens(t, server.URL)
	tokens.keys.gap = time.Millisecond
	w := newWorld(t, func(o *Options) { o.Tokens = tokens })
	var mu sync.RWMutex // like an issuer, a rotation waits for the requests with the old token
	var token string
	rotate := func(n int) {
		mu.Lock()
		defer mu.Unlock()
		key, kid := newECKey(), fmt.Sprint("key-", n)
		from.publish(pub(kid, &key.PublicKey))
		token = sign("ES256", key, kid, claims())
	}
	rotate(0)
	keep(t, tokens)
	ask := func() int {
		mu.RLock()
		defer mu.RUnlock()
		r, err := send(t.Context(), "GET", w.url+"/orders", "", "Authorization", "Bearer "+token)
		testenv.ErrorIs(t, "Run", err, nil)
		return r.status
	}
	testenv.Becomes(t, "the first keys cannot be read", false, tokens.keys.failing.Load)
	var ended atomic.Bool
	var done atomic.Int64
	var load sync.WaitGroup
	for range 8 {
		load.Go(func() {
			for !ended.Load() && !t.Failed() {
				switch status := ask(); status {
				case 200:
					done.Add(1)
				case 429: // the key is not known yet
				default:
					t.Errorf("a valid token: %d", status)
				}
			}
		})
	}
	old := ""
	for n := range 10 {
		at := done.Load()
		testenv.Eventually(t, 20*time.Second, func() error {
			got := done.Load()
			return testenv.FailIf(got < at+50, "%d requests with key %d", got-at, n)
		})
		old = token
		rotate(n + 1)
	}
	ended.Store(true)
	load.Wait()
	// A removed key may be a new one until a refresh that began later lacks it.
	testenv.Eventually(t, 20*time.Second, func() error {
		gone, known := w.do("GET", "/orders", "", "Authorization", "Bearer "+old), ask()
		return testenv.FailIf(gone.status != 401 || known != 200, "the old key: %v, the new one: %d", gone, known)
	})
}

// Tokens with random keys cause no load on the issuer and do not delay other requests. A new key is still found.
func TestRandomKeysCostTheIssuerNothing(t *testing.T) {
	t.Parallel()
	inBubble(t, func(t *testing.T, from *issuer, tokens *Tokens, ec *ecdsa.PrivateKey) {
		ctx := t.Context()
		var all sync.WaitGroup
		begun := time.Now()
		const last = 3 * time.Minute
		for attacker := range 5 {
			all.Go(func() {
				for n := 0; time.Since(begun) < last; n++ {
					kid := fmt.Sprintf("%d-%d", attacker, n)
					if _, p := tokens.caller(ctx, sign("ES256", otherKey(), kid, claims())); p == nil ||
						p.kind != kindUnauthorized && p.kind != kindRateLimited {
						t.Errorf("a random key: %+v", p)
					}
					time.Sleep(time.Second)
				}
			})
		}
		for time.Since(begun) < last {
			at := time.Now()
			if _, p := tokens.caller(ctx, sign("ES256", ec, "k", claims())); p != nil || time.Since(at) != 0 {
				t.Errorf("a known key: %+v after %v", p, time.Since(at))
			}
			time.Sleep(7 * time.Second)
		}
		if n, most := from.served.Load(), int64(last/refreshGap)+2; n > most || n < most/2 {
			t.Errorf("the issuer was asked %d times in %v, want %d at most", n, last, most)
		}
		next := newECKey()
		from.publish(pub("k", &ec.PublicKey), pub("next", &next.PublicKey))
		for at := time.Now(); ; time.Sleep(time.Second) {
			_, p := tokens.caller(ctx, sign("ES256", next, "next", claims()))
			if p == nil {
				break
			}
			if p.kind != kindRateLimited || p.retryAfter != refreshGap || time.Since(at) > refreshGap+unknownWait {
				t.Fatalf("a new key, after %v: %+v", time.Since(at), p)
			}
		}
		all.Wait()
	})
}

// A slow issuer delays only requests with an unknown key, and only briefly.
func TestASlowIssuerHoldsUpNobodyElse(t *testing.T) {
	t.Parallel()
	inBubble(t, func(t *testing.T, from *issuer, tokens *Tokens, ec *ecdsa.PrivateKey) {
		ctx := t.Context()
		from.answers(func(_ http.ResponseWriter, r *http.Request) { <-r.Context().Done() })
		time.Sleep(refreshGap)
		synctest.Wait()
		var unknown sync.WaitGroup
		for range 50 {
			unknown.Go(func() {
				at := time.Now()
				_, p := tokens.caller(ctx, sign("ES256", otherKey(), "x", claims()))
				if p == nil || p.kind != kindRateLimited || time.Since(at) != unknownWait {
					t.Errorf("an unknown key: %+v after %v", p, time.Since(at))
				}
			})
		}
		synctest.Wait()
		at := time.Now()
		if _, p := tokens.caller(ctx, sign("ES256", ec, "k", claims())); p != nil || time.Since(at) != 0 {
			t.Errorf("a known key: %+v after %v", p, time.Since(at))
		}
		unknown.Wait()
	})
}

// While the issuer is down, no token is reported as invalid. Known keys are used for a day.
func TestTheIssuerIsDown(t *testing.T) {
	t.Parallel()
	inBubble(t, func(t *testing.T, from *issuer, _ *Tokens, ec *ecdsa.PrivateKey) {
		broken := func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(500) }
		from.answers(broken)
		tokens := from.tokens(t)
		ask := func() *problem {
			_, p := tokens.caller(t.Context(), sign("ES256", ec, "k", claims()))
			return p
		}
		if p := ask(); p == nil || p.kind != kindUnavailable || p.retryAfter == 0 || !tokens.keys.failing.Load() {
			t.Errorf("down at the start: %+v", p)
		}
		from.publish(pub("k", &ec.PublicKey))
		time.Sleep(refreshGap)
		synctest.Wait()
		if p := ask(); p != nil || tokens.keys.failing.Load() {
			t.Errorf("up: %+v", p)
		}
		known := time.Now()
		from.answers(broken)
		time.Sleep(keysKept - time.Minute)
		if p := ask(); p != nil || !tokens.keys.failing.Load() {
			t.Errorf("down for %v: %+v", time.Since(known), p)
		}
		time.Sleep(refreshEvery + time.Minute)
		if p := ask(); p == nil || p.kind != kindUnavailable || p.retryAfter == 0 {
			t.Errorf("down for %v: %+v", time.Since(known), p)
		}
		from.publish(pub("k", &ec.PublicKey))
		time.Sleep(refreshGap)
		synctest.Wait()
		if p := ask(); p != nil {
			t.Errorf("up again: %+v", p)
		}
	})
}

// An invalid key set, or one that is not the issuer's, changes nothing.
func TestKeySetsThatAreNotTaken(t *testing.T) {
	t.Parallel()
	from, ec := &issuer{}, newECKey()
	server := httptest.NewServer(from)
	t.Cleanup(server.Close)
	elsewhere := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		t.Error("a redirect was followed")
	}))
	t.Cleanup(elsewhere.Close)
	tokens := newTokens(t, server.URL)
	from.publish(pub("k", &ec.PublicKey))
	must(t, tokens.keys.fetch(t.Context()))
	before := tokens.keys.set.Load()
	set := func(keys ...jose.JSONWebKey) string {
		return string(need(json.Marshal(jose.JSONWebKeySet{Keys: keys})))
	}
	encrypts := pub("k", &ec.PublicKey)
	encrypts.Use = "enc"
	for name, body := range map[string]string{
		"nothing": "", "no JSON": "<html>", "no keys": `{"keys":[]}`, "other JSON": `{"kid":"k"}`, "null": "null",
		"too large": set(pub("k", &ec.PublicKey)) + strings.Repeat(" ", maxJWKS), "private": set(pub("k", ec)),
		"secret": set(pub("k", []byte("secret"))), "weak": set(pub("k", &weakKey().PublicKey)),
		"no id": set(pub("", &ec.PublicKey)), "to encrypt": set(encrypts),
	} {
		from.answers(func(w http.ResponseWriter, _ *http.Request) { _, _ = io.WriteString(w, body) })
		if err := tokens.keys.fetch(t.Context()); err == nil || tokens.keys.set.Load() != before {
			t.Errorf("%s: taken, %v", name, err)
		}
	}
	from.answers(func(w http.ResponseWriter, r *http.Request) { http.Redirect(w, r, elsewhere.URL, http.StatusFound) })
	if err := tokens.keys.fetch(t.Context()); err == nil || tokens.keys.set.Load() != before {
		t.Errorf("a redirect: %v", err)
	}
	server.Close()
	tokens.keys.url += "/?key=s3cret"
	if err := tokens.keys.fetch(t.Context()); err == nil || strings.Contains(err.Error(), "s3cret") {
		t.Errorf("down: %v", err)
	}
	// Unknown kinds of keys do not spoil the others.
	mixed := `{"keys":[{"kty":"XX","kid":"x"},{"kty":"EC","crv":"secp256k1","kid":"y","x":"AA","y":"AA"},7,` +
		strings.TrimPrefix(set(pub("k", &ec.PublicKey)), `{"keys":[`)
	if keys, err := parseJWKS(strings.NewReader(mixed)); err != nil || len(keys) != 1 {
		t.Errorf("a mixed set: %v, %v", keys, err)
	}
}

// Keys are read only from a server with a valid certificate for the issuer's name.
func TestTheIssuerShowsACertificate(t *testing.T) {
	t.Parallel()
	ca, otherCA := testenv.NewCA(t), testenv.NewCA(t)
	ec := newECKey()
	from := &issuer{}
	from.publish(pub("k", &ec.PublicKey))
	for name, c := range map[string]struct {
		shown tls.Certificate
		want  any
	}{
		"valid":      {ca.Pair(t), nil},
		"wrong host": {ca.Pair(t, testenv.Elsewhere), new(x509.HostnameError)},
		"wrong CA":   {otherCA.Pair(t), new(x509.UnknownAuthorityError)},
		"expired":    {ca.Pair(t, testenv.Expired), new(x509.CertificateInvalidError)},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			server := httptest.NewUnstartedServer(from)
			server.TLS = &tls.Config{Certificates: []tls.Certificate{c.shown}, MinVersion: tls.VersionTLS12}
			server.Config.ErrorLog = slog.NewLogLogger(testenv.Logger(t).Handler(), slog.LevelDebug)
			server.StartTLS()
			t.Cleanup(server.Close)
			_, port, _ := strings.Cut(server.Listener.Addr().String(), ":")
			tokens := newTokens(t, "https://localhost:"+port)
			transport := tokens.keys.client.Transport.(*http.Transport)
			transport.TLSClientConfig = &tls.Config{RootCAs: ca.Pool, MinVersion: tls.VersionTLS12}
			err := tokens.keys.fetch(t.Context())
			if c.want == nil && err != nil || c.want != nil && (err == nil || !errors.As(err, c.want)) {
				t.Errorf("%v, want %T", err, c.want)
			}
		})
	}
}

// Keys may be in a file. Like that of API keys it is reloaded when it changes.
func TestTheIssuersKeysFollowTheirFile(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), "jwks.json")
	write := func(text string) {
		t.Helper()
		must(t, os.WriteFile(path, []byte(text), 0o644))
	}
	o := TokenOptions{Issuer: testIssuer, Audience: testAudience, JWKS: path, UserClaim: "sub", ScopeClaim: "scope"}
	write("{}")
	if _, err := NewTokens(o); err == nil {
		t.Error("a file without keys was taken")
	}
	set := func(kid string, key *ecdsa.PrivateKey) string {
		return string(need(json.Marshal(jose.JSONWebKeySet{Keys: []jose.JSONWebKey{pub(kid, &key.PublicKey)}})))
	}
	first, second := newECKey(), newECKey()
	write(set("1", first))
	tokens := newTokens(t, path)
	keep(t, tokens)
	ask := func(kid string, key *ecdsa.PrivateKey) *problem {
		_, p := tokens.caller(t.Context(), sign("ES256", key, kid, claims()))
		return p
	}
	if p := ask("1", first); p != nil || tokens.keys.failing.Load() {
		t.Errorf("the first key: %+v", p)
	}
	if p := ask("2", second); p == nil || p.kind != kindUnauthorized {
		t.Errorf("a key that is not in the file: %+v", p)
	}
	write(set("second", second))
	testenv.Eventually(t, 20*time.Second, func() error {
		if p := ask("second", second); p != nil {
			return errors.New(p.detail)
		}
		return nil
	})
	if p := ask("1", first); p == nil || p.kind != kindUnauthorized {
		t.Errorf("a key that is not in the file any more: %+v", p)
	}
}
