package api

import (
	"context"
	"crypto/ecdsa"
	"crypto/ed25519"
	"crypto/rsa"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"net/netip"
	"net/url"
	"os"
	"strings"
	"sync/atomic"
	"time"

	"github.com/go-jose/go-jose/v4"
	"github.com/go-jose/go-jose/v4/jwt"

	"posthaste/internal/pause"
)

// Times of an issuer's keys.
const (
	// refreshEvery is the interval of unrequested refreshes.
	refreshEvery = 5 * time.Minute
	// refreshGap is the minimum pause between two refreshes, independent of the requests.
	refreshGap = 10 * time.Second
	// refreshTimeout bounds one refresh.
	refreshTimeout = 5 * time.Second
	// unknownWait is how long a request with an unknown key waits for a refresh.
	unknownWait = 2 * time.Second
	// keysKept is how long keys are used when they cannot be refreshed. It bounds how long a withdrawn key is valid.
	keysKept = 24 * time.Hour
)

// maxJWKS is the longest key set, in bytes.
const maxJWKS = 256 << 10

// publicKeys are an issuer's keys at one time, by id.
type publicKeys struct {
	byID map[string]jose.JSONWebKey
	// asked is when their fetch began.
	asked time.Time
}

// always is the fetch time of keys from a file, which are never outdated.
var always = time.Date(9999, 1, 1, 0, 0, 0, 0, time.UTC)

// good reports whether the keys may still be used.
func (p *publicKeys) good() bool { return p != nil && time.Since(p.asked) < keysKept }

// key returns the key for a token, or nil. A key that names its algorithm is valid for that one only.
func (p *publicKeys) key(h jose.Header) any {
	if !p.good() {
		return nil
	}
	if k, ok := p.byID[h.KeyID]; ok && (k.Algorithm == "" || k.Algorithm == h.Algorithm) {
		return k.Key
	}
	return nil
}

// issuerKeys caches the public keys of a token issuer. Finding a cached key never blocks. Safe for concurrent use.
type issuerKeys struct {
	set atomic.Pointer[publicKeys]
	// file is the source of the keys, or nil for a URL.
	file   *watchedFile
	url    string
	client *http.Client
	// gap is refreshGap outside tests.
	gap time.Duration
	// wanted holds at most one request for a refresh.
	wanted chan struct{}
	// next is closed when the next refresh has ended. It is nil while none may start.
	next atomic.Pointer[chan struct{}]
	// failing is set if the last refresh failed or there was none.
	failing atomic.Bool
}

// CheckJWKS validates the location of a key set: an https:// URL, an http:// URL of a loopback address (or localhost),
// or the path of a file that exists. Its errors do not quote the URL.
func CheckJWKS(place string) error {
	if isFile(place) {
		_, err := os.Stat(place)
		return err
	}
	u, err := url.Parse(place)
	if err != nil || u.Host == "" || u.Scheme != "https" && (u.Scheme != "http" || !loopback(u.Hostname())) {
		return errors.New("want an https:// URL, an http:// URL on loopback, or the path of a file")
	}
	return nil
}

// isFile reports whether a location is a path. A URL that lacks a slash is not: errors would quote it as a path.
func isFile(place string) bool {
	return !strings.Contains(place, "://") && !strings.HasPrefix(place, "http:") && !strings.HasPrefix(place, "https:")
}

func loopback(host string) bool {
	addr, err := netip.ParseAddr(host)
	return host == "localhost" || err == nil && addr.IsLoopback()
}

func newIssuerKeys(place string) (*issuerKeys, error) {
	if err := CheckJWKS(place); err != nil {
		return nil, fmt.Errorf("the issuer's keys: %w", err)
	}
	k := &issuerKeys{gap: refreshGap, wanted: make(chan struct{}, 1)}
	if isFile(place) {
		k.file = &watchedFile{path: place, what: "file of the issuer's keys"}
		k.file.take = func(r io.Reader) (int, error) { return k.take(r, always) }
		_, err := k.file.load()
		return k, err
	}
	k.url = place
	k.failing.Store(true)
	k.client = &http.Client{
		// One connection is needed every few minutes.
		Transport: &http.Transport{Proxy: http.ProxyFromEnvironment, DisableKeepAlives: true},
		// Redirects could lead to another host than the configured issuer.
		CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
		Timeout:       refreshTimeout,
	}
	return k, nil
}

// find returns the key that a token names. If the key is unknown, find waits for a refresh, within the limits. A token
// whose key may be newer than the cached keys gets a 429 or 503, never a 401.
func (k *issuerKeys) find(ctx context.Context, token *jwt.JSONWebToken) (any, *problem) {
	arrived, h := time.Now(), token.Headers[0]
	if h.KeyID == "" {
		return nil, refuse401("the token names no key")
	}
	if key := k.set.Load().key(h); key != nil {
		return key, nil
	}
	k.refresh(ctx)
	set := k.set.Load()
	switch key := set.key(h); {
	case key != nil:
		return key, nil
	case !set.good():
		return nil, &problem{
			kind: kindUnavailable, detail: "the keys of the tokens' issuer cannot be read", retryAfter: refreshGap,
		}
	case set.asked.Before(arrived) && issued(token).After(set.asked.Add(-skew)):
		return nil, &problem{kind: kindRateLimited, detail: "the token's key is not known yet", retryAfter: refreshGap}
	}
	return nil, refuse401("the token's key is not one of its issuer's")
}

// issued returns when a token was issued. The token is not verified yet: a forged time only changes the error.
func issued(token *jwt.JSONWebToken) time.Time {
	var c jwt.Claims
	if err := token.UnsafeClaimsWithoutVerification(&c); err != nil || c.IssuedAt == nil {
		return time.Time{}
	}
	return c.IssuedAt.Time()
}

// refresh requests a refresh, and waits for its end if it may start now.
func (k *issuerKeys) refresh(ctx context.Context) {
	if k.file != nil {
		return // run checks it every second
	}
	select {
	case k.wanted <- struct{}{}:
	default: // already requested
	}
	next := k.next.Load()
	if next == nil {
		return
	}
	select {
	case <-*next:
	case <-ctx.Done():
	case <-time.After(unknownWait):
	}
}

// run refreshes the keys until ctx ends.
func (k *issuerKeys) run(ctx context.Context, log *slog.Logger) {
	if k.file != nil {
		k.file.run(ctx, log)
		return
	}
	for wait := time.Duration(0); ; pause.For(ctx, k.gap) {
		done := make(chan struct{})
		k.next.Store(&done)
		select {
		case <-ctx.Done():
			return
		case <-k.wanted:
		case <-time.After(wait):
		}
		err := k.fetch(ctx)
		k.next.Store(nil)
		k.report(err, log)
		close(done)
		if wait = refreshEvery - k.gap; err != nil {
			wait = 0
		}
	}
}

// report logs when refreshes begin to fail and when they succeed again.
func (k *issuerKeys) report(err error, log *slog.Logger) {
	first := k.set.Load() == nil
	switch was := k.failing.Swap(err != nil); {
	case err != nil && (!was || first):
		log.Warn("the keys of the tokens' issuer cannot be read", "err", err, "kept", !first)
	case err == nil && was:
		log.Info("the keys of the tokens' issuer are known", "keys", len(k.set.Load().byID))
	}
}

func (k *issuerKeys) fetch(ctx context.Context) error {
	asked := time.Now()
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, k.url, http.NoBody)
	if err != nil {
		return errors.New("the URL cannot be used")
	}
	res, err := k.client.Do(req)
	if err != nil {
		if quoting, ok := errors.AsType[*url.Error](err); ok {
			err = quoting.Err // the URL may contain a secret
		}
		return err
	}
	defer res.Body.Close()
	if res.StatusCode != http.StatusOK {
		return fmt.Errorf("the answer has status %d", res.StatusCode)
	}
	_, err = k.take(res.Body, asked)
	return err
}

// take replaces the keys by those of a set, and returns their number.
func (k *issuerKeys) take(r io.Reader, asked time.Time) (int, error) {
	byID, err := parseJWKS(r)
	if err != nil {
		return 0, err
	}
	k.set.Store(&publicKeys{byID, asked})
	return len(byID), nil
}

// parseJWKS reads the signing keys of a set (RFC 7517). It skips other keys, as the RFC requires.
func parseJWKS(r io.Reader) (map[string]jose.JSONWebKey, error) {
	text, err := io.ReadAll(io.LimitReader(r, maxJWKS+1))
	if err != nil {
		return nil, fmt.Errorf("read a key set: %w", err)
	}
	var set struct {
		Keys []json.RawMessage `json:"keys"`
	}
	if len(text) > maxJWKS || json.Unmarshal(text, &set) != nil {
		return nil, fmt.Errorf("a key set is JSON of at most %d bytes", maxJWKS)
	}
	byID := make(map[string]jose.JSONWebKey)
	for _, raw := range set.Keys {
		var key jose.JSONWebKey
		if err := key.UnmarshalJSON(raw); err != nil || !signs(&key) {
			continue
		}
		if _, ok := byID[key.KeyID]; !ok {
			byID[key.KeyID] = key
		}
	}
	if len(byID) == 0 {
		return nil, errors.New("a key set has no public key with an id that signs tokens")
	}
	return byID, nil
}

// signs reports whether a key is a public signing key that is strong enough.
func signs(k *jose.JSONWebKey) bool {
	if k.KeyID == "" || k.Use != "" && k.Use != "sig" {
		return false
	}
	switch key := k.Key.(type) {
	case *rsa.PublicKey:
		return key.N.BitLen() >= 2048
	case *ecdsa.PublicKey, ed25519.PublicKey:
		return true
	}
	return false
}
